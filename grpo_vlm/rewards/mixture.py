"""Several reward functions as one: "overall" is the weighted sum, each function's own score stands under its name."""

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.results import Scores


def labels(names: Sequence[str]) -> list[str]:
    """A short, distinct name for each function: its own name, with that of its file where two are alike, and a number
    where that does not help. "rewards/geo3k.py:compute_score" -> "compute_score" or "geo3k.compute_score"."""
    places = [name.rpartition(":") for name in names]
    short = [function.rpartition(".")[2] for _, _, function in places]
    alike = Counter(short)
    long = [
        function if alike[function] == 1 else f"{PurePath(place).stem.rpartition('.')[2] or 'reward'}.{function}"
        for function, (place, _, _) in zip(short, places, strict=True)
    ]
    return [name if long.count(name) == 1 else f"{name}_{number}" for number, name in enumerate(long, start=1)]


def mix(
    names: Sequence[str], weights: Sequence[float], found: Sequence[Sequence[Scores | None]]
) -> list[Scores | None]:
    """One score a sample from `found`, which has a list for each function. A function that left the sample unscored
    (None) has no part in the sum; a sample that none scored stays unscored. A single function keeps its own keys."""
    if len(found) == 1:
        (weight,) = weights
        if weight == 1.0:
            return list(found[0])
        return [None if score is None else {**score, "overall": weight * score["overall"]} for score in found[0]]
    short = labels(names)
    return [_mixed(short, weights, scores) for scores in zip(*found, strict=True)]


def _mixed(short: Sequence[str], weights: Sequence[float], scores: Sequence[Scores | None]) -> Scores | None:
    parts = [part for part in zip(short, weights, scores, strict=True) if part[2] is not None]
    if not parts:
        return None
    mixed = {"overall": sum(weight * score["overall"] for _, weight, score in parts)}
    for name, _, score in parts:
        mixed[name] = score["overall"]
        mixed |= {f"{name}/{key}": value for key, value in score.items() if key != "overall"}
    return mixed


def check_weights(weights: Sequence[float], functions: int) -> list[float]:
    """The weight of each function, 1 where none are given. Raises RewardError when there are more or fewer."""
    if not weights:
        return [1.0] * functions
    if len(weights) != functions:
        raise RewardError(
            f"worker.reward.reward_weights has {len(weights)} numbers for {functions} function(s); give one each"
        )
    return [float(weight) for weight in weights]
