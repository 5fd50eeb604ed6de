"""Loads the user's reward function and calls it in the form it was written for: EasyR1's, TRL's or verl's.

The form is read off the parameter names, so a file from any of the three projects works unchanged. Whatever the
function does wrong becomes one RewardError that names the function, the row and, when it raised, the user's own lines.
"""

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.forms import Form, RewardSample, detect_form, plain_function
from grpo_vlm.rewards.results import Scores, check_keys, read_batch, read_one, shown

DEFAULT_FUNCTION = "main"  # EasyR1's


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@dataclass(frozen=True)
class Reward:
    """A loaded reward function. Calling it with N samples returns N scores, each a dict of finite floats with
    "overall" and the same keys, or None where the function leaves the sample unscored.

    It runs here and now, in this process; pool.py runs it where it can be stopped. Raises RewardError when the
    function raises or returns anything else.
    """

    function: Callable[..., Any]
    name: str
    form: Form
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, samples: Sequence[RewardSample]) -> list[Scores | None]:
        if not samples:
            return []
        if self.form.whole_batch:
            scores = read_batch(self.name, self.form, samples, self._told(samples))
        else:
            scores = [read_one(self.name, self.form, sample, self._told([sample])) for sample in samples]
        check_keys(self.name, samples, scores)
        return scores

    def start(self, samples: Sequence[RewardSample], watched: Callable[[list], list] = list) -> Any:
        """What the function returns for these samples (one unless the form takes the whole batch), or an awaitable of
        it. Raises what the function raises; see Form.arguments for `watched`."""
        positional, named = self.form.arguments(samples, watched)
        return self.function(*positional, **named, **self.kwargs)

    def fault(self, samples: Sequence[RewardSample], lines: str) -> str:
        """The message for a call with these samples that raised; `lines` is the traceback."""
        return f"{self.name} raised on {place(samples)}:\n{lines}"

    def user_traceback(self, error: BaseException) -> str:
        """The traceback from the first frame in the function's own file on; only the message when the call itself
        failed."""
        code = plain_function(self.function)
        filename = code.__code__.co_filename if inspect.isfunction(code) else ""
        return _format(error, _frames_from(error.__traceback__, filename))

    def _told(self, samples: Sequence[RewardSample]) -> Any:
        try:
            return self._finish(samples)
        except (Exception, SystemExit) as error:
            guilty, error = self._culprit(samples, error)
            raise RewardError(self.fault(guilty, self.user_traceback(error))) from None

    def _finish(self, samples: Sequence[RewardSample]) -> Any:
        result = self.start(samples)
        return asyncio.run(_result_of(result)) if inspect.isawaitable(result) else result

    def _culprit(
        self, samples: Sequence[RewardSample], error: BaseException
    ) -> tuple[Sequence[RewardSample], BaseException]:
        """The first sample that raises on its own, with that error; all when the fault needs the whole batch."""
        for sample in samples if len(samples) > 1 else ():
            try:
                self._finish([sample])
            except (Exception, SystemExit) as single:
                return [sample], single
        return samples, error


def place(samples: Sequence[RewardSample]) -> str:
    """Which samples a fault is about, for messages."""
    if len(samples) > 1:
        return f"a batch of {len(samples)} from row {samples[0].row_id} on"
    return f"row {samples[0].row_id} (response starts {samples[0].response[:60]!r})"


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
    return _bound(*_find(spec, base_dir), dict(kwargs or {}))


def load_rewards(
    specs: Sequence[str | Callable[..., Any] | Reward],
    kwargs: Mapping[str, Any] | None = None,
    *,
    base_dir: str | Path | None = None,
) -> list[Reward]:
    """Several functions that share `kwargs`: each gets those that it has parameters for; a single one gets all. What
    is a Reward already stays as it is.

    Raises RewardError like load_reward, and for a keyword argument that no function takes.
    """
    rewards = [_load(spec, dict(kwargs or {}), base_dir, alone=len(specs) == 1) for spec in specs]
    idle = sorted(key for key in kwargs or {} if not any(key in reward.kwargs for reward in rewards))
    if idle:
        raise RewardError(
            f"worker.reward.reward_function_kwargs: no function has a parameter {', '.join(map(repr, idle))}"
        )
    return rewards


def _load(
    spec: str | Callable[..., Any] | Reward, kwargs: dict[str, Any], base_dir: str | Path | None, alone: bool
) -> Reward:
    if isinstance(spec, Reward):
        return spec
    module, function, name = _find(spec, base_dir)
    return _bound(module, function, name, kwargs if alone else taken_by(function, kwargs))


Found = tuple[ModuleType | None, Callable[..., Any], str]


def _find(spec: str | Callable[..., Any], base_dir: str | Path | None) -> Found:
    """Module, function and name."""
    if isinstance(spec, str):
        return _resolve(spec, base_dir)
    if inspect.isclass(spec):
        raise RewardError(f"the reward {spec.__qualname__} is a class; pass an object of it: {spec.__qualname__}(...)")
    if callable(spec):
        code = plain_function(spec)
        return inspect.getmodule(code), spec, code.__qualname__
    raise RewardError(f"a reward is 'path.py:function', 'package.module:name' or a callable, got {shown(spec)}")


def _bound(module: ModuleType | None, function: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Reward:
    return Reward(function, name, detect_form(function, name, {} if module is None else vars(module), kwargs), kwargs)


def taken_by(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments that this function has parameters for; all of them for one with **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(kwargs)
    names = {p.name for p in parameters}
    return {key: value for key, value in kwargs.items() if key in names}


def _resolve(spec: str, base_dir: str | Path | None) -> Found:
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
    if inspect.isclass(function):
        raise RewardError(
            f"worker.reward.reward_function: {location}:{function_name} is a class; make an object of it there, "
            f"such as reward = {function_name}(...), and name that"
        )
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
        raise RewardError(
            f"worker.reward.reward_function: {path} cannot be imported:\n{lines}{_hint(error, path)}"
        ) from None
    return module


def _hint(error: BaseException, path: Path) -> str:
    """For an import of what lies beside the reward file."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or not (path.with_name(f"{name}.py").is_file() or path.with_name(name).is_dir()):
        return ""
    return f"\n{name!r} lies beside the reward file, but its folder is not searched: add {path.parent} to PYTHONPATH"


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


def _frames_from(trace: TracebackType | None, filename: str) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename != filename:
        trace = trace.tb_next
    return trace


def _format(error: BaseException, trace: TracebackType | None) -> str:
    lines = traceback.format_exception(type(error), error, trace, chain=False)
    return "".join(lines).rstrip()
