"""Loads the user's reward function and calls it in the form it was written for: EasyR1's, TRL's or verl's.

The form is read off the parameter names, so a file from any of the three projects works unchanged. Whatever the
function does wrong becomes one RewardError that names the function, the row and, when it raised, the user's own lines.
"""

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.forms import EASYR1, VERL, Form, RewardSample, detect_form

DEFAULT_FUNCTION = "main"  # EasyR1's


@dataclass(frozen=True)
class Reward:
    """A loaded reward function. Calling it with N samples returns N dicts of finite floats, each with "overall".

    Every dict has the same keys. Raises RewardError when the function raises or returns anything else.
    """

    function: Callable[..., Any]
    name: str
    form: Form
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, samples: Sequence[RewardSample]) -> list[dict[str, float]]:
        if not samples:
            return []
        if self.form.whole_batch:
            results = self._whole_batch(samples)
        else:
            results = [self._checked_call([sample]) for sample in samples]
        scores = [self._scores(sample, result) for sample, result in zip(samples, results, strict=True)]
        for sample, score in zip(samples, scores, strict=True):
            if score.keys() != scores[0].keys():
                raise RewardError(
                    f"{self.name}: row {sample.row_id} got the keys {sorted(score)} but row {samples[0].row_id} "
                    f"{sorted(scores[0])}; return the same keys for every sample"
                )
        return scores

    def _whole_batch(self, samples: Sequence[RewardSample]) -> list[Any]:
        results = self._checked_call(samples)
        if isinstance(results, (np.ndarray, torch.Tensor)):
            results = results.tolist()
        expected = f"a list of {len(samples)} {self.form.item_name}, one per completion"
        if not isinstance(results, (list, tuple)):
            hint = (
                '; for one dict a call set REWARD_TYPE = "sequential" in the file' if self.form.kind == EASYR1 else ""
            )
            raise RewardError(f"{self.name} must return {expected}, it returned {_shown(results)}{hint}")
        if len(results) != len(samples):
            rows = sorted({sample.row_id for sample in samples})
            raise RewardError(
                f"{self.name} must return {expected}, it returned {len(results)} "
                f"(rows {', '.join(rows[:4])}{', ...' if len(rows) > 4 else ''})"
            )
        return list(results)

    def _checked_call(self, samples: Sequence[RewardSample]) -> Any:
        try:
            result = self._call(samples)
        except (Exception, SystemExit) as error:
            sample, error = self._culprit(samples, error)
            row = f"row {sample.row_id}" if sample else f"a batch of {len(samples)} from row {samples[0].row_id} on"
            response = f" (response starts {sample.response[:60]!r})" if sample else ""
            lines = _user_traceback(error, self.function)
            raise RewardError(f"{self.name} raised on {row}{response}:\n{lines}") from None
        if inspect.isawaitable(result):
            raise RewardError(
                f"{self.name} returned an awaitable; asynchronous rewards are not supported, use plain `def`"
            )
        return result

    def _culprit(
        self, samples: Sequence[RewardSample], error: BaseException
    ) -> tuple[RewardSample | None, BaseException]:
        """The first sample that raises on its own, with that error; None when the fault needs the whole batch."""
        if len(samples) == 1:
            return samples[0], error
        for sample in samples:
            try:
                self._call([sample])
            except (Exception, SystemExit) as single:
                return sample, single
        return None, error

    def _call(self, samples: Sequence[RewardSample]) -> Any:
        positional, named = self.form.arguments(samples)
        return self.function(*positional, **named, **self.kwargs)

    def _scores(self, sample: RewardSample, result: Any) -> dict[str, float]:
        where = f"{self.name}, row {sample.row_id}"
        if self.form.kind == EASYR1 and not isinstance(result, Mapping):
            raise RewardError(f'{where}: each sample needs a dict with "overall", got {_shown(result)}')
        if not isinstance(result, Mapping):
            return {"overall": _finite(result, where, "the score")}
        if self.form.kind == VERL:  # verl's own graders return texts such as "pred" beside the numbers
            result = {"overall" if key == "score" else key: v for key, v in result.items() if not isinstance(v, str)}
        if "overall" not in result:
            wanted = '"score"' if self.form.kind == VERL else '"overall"'
            raise RewardError(f"{where}: the dict has no number {wanted}; keys {list(result)}")
        return {str(key): _finite(value, where, repr(key)) for key, value in result.items()}


def load_reward(
    spec: str | Callable[..., Any], kwargs: Mapping[str, Any] | None = None, *, base_dir: str | Path | None = None
) -> Reward:
    """Loads a reward function and finds out its form.

    spec: "path.py:function" (function "main" when left out; relative to base_dir, else the working directory),
    "package.module:name" or a callable.
    kwargs: worker.reward.reward_function_kwargs, bound to every call.
    Raises RewardError when file, module or function is absent, the file does not import, or the parameters fit no
    form.
    """
    if isinstance(spec, str):
        module, function, name = _resolve(spec, base_dir)
    elif callable(spec):
        code = _code_of(spec)
        function, name, module = spec, code.__qualname__, inspect.getmodule(code)
    else:
        raise RewardError(f"a reward is 'path.py:function', 'package.module:name' or a callable, got {_shown(spec)}")
    constants = {} if module is None else vars(module)
    return Reward(function, name, detect_form(function, name, constants, dict(kwargs or {})), dict(kwargs or {}))


def _resolve(spec: str, base_dir: str | Path | None) -> tuple[ModuleType, Callable[..., Any], str]:
    location, _, function_name = spec.partition(":") if ":" in spec else (spec, "", DEFAULT_FUNCTION)
    if location.endswith(".py"):
        module = _load_file(Path(base_dir or "", location).expanduser().resolve())
    elif ":" in spec and all(part.isidentifier() for part in location.split(".")):
        module = _import_module(location)
    else:
        raise RewardError(
            f"worker.reward.reward_function: {spec!r} is neither 'path.py:function' nor 'package.module:name'"
        )
    function = vars(module).get(function_name)
    if not callable(function):
        present = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        near = difflib.get_close_matches(function_name, present, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; functions there: {', '.join(present) or 'none'}"
        raise RewardError(f"worker.reward.reward_function: {location} has no function {function_name!r}{hint}")
    return module, function, f"{location}:{function_name}"


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(
            f"worker.reward.reward_function: {path} does not exist; relative paths start at the working directory"
        )
    name = f"grpo_vlm_reward_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickle look the module up by name
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = _format(error, _frames_from(error.__traceback__, str(path)))
        raise RewardError(f"worker.reward.reward_function: {path} cannot be imported:\n{lines}") from None
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise RewardError(
                f"worker.reward.reward_function: there is no module {name!r} (no {error.name!r}); install it, add its "
                "folder to PYTHONPATH, or use 'path.py:function'"
            ) from None
        raise RewardError(f"worker.reward.reward_function: importing {name!r} failed: {error}; install it") from None
    except (Exception, SystemExit) as error:
        lines = _format(error, None)
        raise RewardError(f"worker.reward.reward_function: importing {name!r} failed: {lines}") from error


def _finite(value: Any, where: str, what: str) -> float:
    if value is None:
        raise RewardError(f"{where}: {what} is None; leaving samples unscored is not supported yet, return a number")
    if isinstance(value, (np.ndarray, torch.Tensor)) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, (int, float, np.number, np.bool_)):
        raise RewardError(f"{where}: {what} must be a number, got {_shown(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{where}: {what} is {number}; return a finite number (0.0 for an answer without grade)")
    return number


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _user_traceback(error: BaseException, function: Callable[..., Any]) -> str:
    """The traceback from the first frame in the function's own file on; only the message when the call itself
    failed."""
    code = _code_of(function)
    filename = code.__code__.co_filename if inspect.isfunction(code) else ""
    return _format(error, _frames_from(error.__traceback__, filename))


def _code_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain function behind partials, decorators, methods and objects with __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    return function.__func__ if inspect.ismethod(function) else function


def _frames_from(trace: TracebackType | None, filename: str) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    return trace


def _format(error: BaseException, trace: TracebackType | None) -> str:
    lines = traceback.format_exception(type(error), error, trace, chain=False)
    return "".join(lines).rstrip()
