"""What a reward function returned, read into scores or refused with one message that names the function and the row.

A score is a dict of finite floats with "overall", or None: the function leaves this sample unscored.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.forms import EASYR1, VERL, Form, RewardSample

Scores = dict[str, float]
LISTED_ROWS = 4


def read_batch(name: str, form: Form, samples: Sequence[RewardSample], returned: Any) -> list[Scores | None]:
    """The scores in the result of one call for all samples. Raises RewardError."""
    if _is_array(returned):
        returned = returned.tolist()
    expected = f"a list of {len(samples)} {form.item_name}, one per completion"
    if not isinstance(returned, (list, tuple)):
        hint = '; for one dict a call set REWARD_TYPE = "sequential" in the file' if form.kind == EASYR1 else ""
        raise RewardError(f"{name} must return {expected}, it returned {shown(returned)}{hint}")
    if len(returned) != len(samples):
        rows = sorted({sample.row_id for sample in samples})
        listed = ", ".join(rows[:LISTED_ROWS]) + (", ..." if len(rows) > LISTED_ROWS else "")
        raise RewardError(f"{name} must return {expected}, it returned {len(returned)} (rows {listed})")
    return [read_one(name, form, sample, item) for sample, item in zip(samples, returned, strict=True)]


def read_one(name: str, form: Form, sample: RewardSample, result: Any) -> Scores | None:
    """The score of one sample; verl's texts beside the numbers are left out. Raises RewardError."""
    if result is None:
        return None
    where = f"{name}, row {sample.row_id}"
    if form.kind == EASYR1 and not isinstance(result, Mapping):
        raise RewardError(f'{where}: each sample needs a dict with "overall" or None, got {shown(result)}')
    if not isinstance(result, Mapping):
        return {"overall": _finite(result, where, "the score")}
    if form.kind == VERL:  # verl's own graders return texts such as "pred" beside the numbers
        result = {"overall" if key == "score" else key: v for key, v in result.items() if not isinstance(v, str)}
    if "overall" not in result:
        wanted = '"score"' if form.kind == VERL else '"overall"'
        raise RewardError(f"{where}: the dict has no number {wanted}; keys {list(result)}")
    if result["overall"] is None:
        return None
    return {str(key): _finite(value, where, repr(key)) for key, value in result.items()}


def check_keys(name: str, samples: Sequence[RewardSample], scores: Sequence[Scores | None]) -> None:
    """Raises RewardError when two scores have different keys."""
    scored = [(sample.row_id, score) for sample, score in zip(samples, scores, strict=True) if score is not None]
    for row_id, score in scored:
        first_row, first = scored[0]
        if score.keys() != first.keys():
            raise RewardError(
                f"{name}: row {row_id} got the keys {sorted(score)} but row {first_row} {sorted(first)}; return the "
                "same keys for every sample"
            )


def shown(value: Any) -> str:
    """Type and beginning of a value, for messages."""
    return f"{type(value).__name__} {str(value)[:60]!r}"


def _finite(value: Any, where: str, what: str) -> float:
    if _is_array(value) and math.prod(value.shape) == 1:
        value = value.item()
    numpy = sys.modules.get("numpy")
    numbers = (int, float) if numpy is None else (int, float, numpy.integer, numpy.floating, numpy.bool_)
    if not isinstance(value, numbers):
        raise RewardError(f"{where}: {what} must be a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:  # an int of more than 308 digits
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        raise RewardError(f"{where}: {what} is {number}; return a finite number, or None to leave the sample unscored")
    return number


def _is_array(value: Any) -> bool:
    """Whether it is a numpy array or a tensor. Nothing can be one unless its library is loaded; importing torch here
    would cost every worker a second."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    return torch is not None and isinstance(value, torch.Tensor)
