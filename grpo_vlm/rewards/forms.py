"""The three forms of reward functions in use, told apart by parameter names, and the arguments each one gets.

EasyR1: one parameter, a list of inputs (or one input with REWARD_TYPE = "sequential"); returns dicts with "overall".
TRL: (completions, prompts, **columns), completions as message lists; returns a list of numbers.
verl: (data_source, solution_str, ground_truth, extra_info); returns a number or a dict with "score".
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_vlm.errors import RewardError

EASYR1, TRL, VERL = "easyr1", "trl", "verl"
FORMS_HELP = (
    "three forms work: EasyR1 `f(reward_inputs, **options)` with one input parameter, returning dicts with 'overall'; "
    "TRL `f(completions, prompts, **columns)`, returning a list of numbers; verl "
    "`f(data_source, solution_str, ground_truth, extra_info)`, returning a number or a dict with 'score'; values for "
    "further parameters go into worker.reward.reward_function_kwargs"
)
VERL_NAMES = {"data_source", "solution_str", "ground_truth", "extra_info"}


@dataclass(frozen=True, eq=False)
class RewardSample:
    """One completion as a reward function may see it.

    response: the decoded completion; response_length: its tokens, token_ids the tokens themselves.
    prompt_messages: chat messages of the question; prompt_text: the rendered chat template.
    columns: the columns of the row; images: the pictures, passed on only to a function that asks for them.
    """

    row_id: str
    response: str
    response_length: int
    token_ids: tuple[int, ...]
    ground_truth: str
    prompt_messages: list[dict[str, Any]]
    prompt_text: str
    columns: dict[str, Any] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)

    def without_images(self) -> "RewardSample":
        """The same for a function that asks for none: what need not travel stays here."""
        return replace(self, images=[]) if self.images else self


@dataclass(frozen=True)
class Form:
    """How to call one function.

    kind: EASYR1, TRL or VERL; whole_batch: one call for all samples, else one call a sample.
    parameters: names that the function takes and we may fill; takes_any: it has **kwargs; needs_images: it asked for
    pictures; asynchronous: it is an `async def`.
    """

    kind: str
    whole_batch: bool
    parameters: frozenset[str]
    takes_any: bool
    needs_images: bool
    asynchronous: bool

    @property
    def item_name(self) -> str:
        """What one element of a batch result is called in messages."""
        return 'dicts with "overall"' if self.kind == EASYR1 else "numbers"

    def arguments(
        self, samples: Sequence[RewardSample], watched: Callable[[list], list] = list
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments for one call; samples has one element unless whole_batch. `watched` makes the
        list whose walk shows how far a call for the whole batch has come."""
        if self.kind == EASYR1:
            inputs = [_easyr1_input(sample, self.needs_images) for sample in samples]
            images = [sample.images for sample in samples]
            named = {"images": images if self.whole_batch else images[0]} if "images" in self.parameters else {}
            return (watched(inputs) if self.whole_batch else inputs[0],), named
        named = _trl_arguments(samples) if self.kind == TRL else _verl_arguments(samples[0], self.needs_images)
        if self.kind == TRL:
            named["completions"] = watched(named["completions"])
        if "images" in self.parameters:
            named["images"] = [s.images for s in samples] if self.kind == TRL else samples[0].images
        return (), {key: value for key, value in named.items() if self.takes_any or key in self.parameters}


def detect_form(
    function: Callable[..., Any], name: str, constants: Mapping[str, Any], kwargs: Mapping[str, Any]
) -> Form:
    """Reads the form off the parameter names. constants: the module's globals (REWARD_TYPE, NEEDS_IMAGES).

    Raises RewardError for unknown options, or parameters that fit none or two of the forms.
    """
    asynchronous = inspect.iscoroutinefunction(plain_function(function))
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise RewardError(f"{name} shows no parameters (written in C?); wrap it in a Python function") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    by_name = {p.name for p in plain if p.kind is not p.POSITIONAL_ONLY}
    unknown = sorted(key for key in kwargs if key not in by_name)
    if unknown and not takes_any:
        raise RewardError(
            f"worker.reward.reward_function_kwargs: {name} has no parameter {', '.join(map(repr, unknown))}; "
            f"its parameters are {', '.join(p.name for p in plain)}"
        )
    needed = [p.name for p in plain if p.default is p.empty and p.name not in kwargs]
    names = {p.name for p in plain} - kwargs.keys()
    kind = _kind(name, names, needed)
    if kind == EASYR1:
        return _easyr1_form(name, plain, names, takes_any, constants, asynchronous)
    if kind == VERL and (missing := sorted(set(needed) - VERL_NAMES - {"images"})):
        raise RewardError(
            f"{name} looks like verl's form but also needs {', '.join(map(repr, missing))}; give a default or a value "
            "in worker.reward.reward_function_kwargs"
        )
    needs_images = "images" in names or constants.get("NEEDS_IMAGES", False) is True
    return Form(kind, kind == TRL, frozenset(names), takes_any, needs_images, asynchronous)


def plain_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind partials, decorators, methods and objects with __call__."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function).__call__
    return function.__func__ if inspect.ismethod(function) else function


def _kind(name: str, names: set[str], needed: list[str]) -> str:
    is_trl, is_verl = "completions" in names, "solution_str" in names
    inputs = [n for n in needed if n != "images"]
    if is_trl != is_verl:
        return TRL if is_trl else VERL
    if not is_trl and len(inputs) == 1 and inputs[0] not in VERL_NAMES | {"prompts"}:
        return EASYR1
    shown = ", ".join(sorted(names)) or "none"
    raise RewardError(f"{name}: the parameters ({shown}) fit no known form of a reward function; {FORMS_HELP}")


def _easyr1_form(
    name: str,
    plain: list[inspect.Parameter],
    names: set[str],
    takes_any: bool,
    constants: Mapping[str, Any],
    asynchronous: bool,
) -> Form:
    reward_type = constants.get("REWARD_TYPE", "batch")
    if reward_type not in ("batch", "sequential"):
        raise RewardError(f'{name}: REWARD_TYPE is {reward_type!r}; it must be "batch" (a list) or "sequential" (one)')
    if plain[0].kind is inspect.Parameter.KEYWORD_ONLY or plain[0].default is not inspect.Parameter.empty:
        raise RewardError(f"{name}: the input must be the first parameter and have no default; {FORMS_HELP}")
    needs_images = "images" in names or constants.get("NEEDS_IMAGES", False) is True
    return Form(EASYR1, reward_type == "batch", frozenset(names), takes_any, needs_images, asynchronous)


def _easyr1_input(sample: RewardSample, needs_images: bool) -> dict[str, Any]:
    """EasyR1's RewardInput (response, response_length, ground_truth) and what it leaves out."""
    item = {
        "response": sample.response,
        "response_length": sample.response_length,
        "ground_truth": sample.ground_truth,
        "prompt": sample.prompt_messages,
        "prompt_text": sample.prompt_text,
        "token_ids": sample.token_ids,
        "row_id": sample.row_id,
        "columns": sample.columns,
    }
    return item | {"images": sample.images} if needs_images else item


def _trl_arguments(samples: Sequence[RewardSample]) -> dict[str, Any]:
    """Lists with one element a completion: TRL's own names, the row's columns, and ground_truth/answer where no column
    has that name."""
    keys = dict.fromkeys(key for sample in samples for key in sample.columns)
    truths = [sample.ground_truth for sample in samples]
    return (
        {"ground_truth": truths, "answer": truths, "row_id": [sample.row_id for sample in samples]}
        | {key: [sample.columns.get(key) for sample in samples] for key in keys}
        | {
            "prompts": [sample.prompt_messages for sample in samples],
            "completions": [[{"role": "assistant", "content": sample.response}] for sample in samples],
            "completion_ids": [list(sample.token_ids) for sample in samples],
        }
    )


def _verl_arguments(sample: RewardSample, needs_images: bool) -> dict[str, Any]:
    """verl's four arguments; extra_info holds the row's own extra_info over the other columns and what we know of the
    completion."""
    own = sample.columns.get("extra_info")
    known = {"row_id": sample.row_id, "prompt": sample.prompt_messages, "response_length": sample.response_length}
    if needs_images:
        known["images"] = sample.images
    return {
        "data_source": sample.columns.get("data_source", sample.row_id.rpartition(":")[0]),
        "solution_str": sample.response,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.columns | known | (dict(own) if isinstance(own, Mapping) else {}),
    }
