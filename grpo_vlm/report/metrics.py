"""Per-sample lists of one step -> EasyR1's metric names. Plain arithmetic: every number can be checked by hand.

Each function returns a dict of floats, finite for finite inputs, and leaves out what an empty list or a zero duration
does not define. One departure from EasyR1: time_per_step and throughput leave out validation and saving, so that they
do not jump on the steps that do either.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import psutil

GIB = 1024**3
RESPONSE_PHASES = ("gen", "reward")
ALL_TOKEN_PHASES = ("ref", "old", "values", "adv", "update_critic", "update_actor")
OUTSIDE_PHASES = ("validation", "save_checkpoint")


def reward_metrics(scores: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """reward/{key}: the mean of each part that the reward function returned, "overall" among them."""
    return {f"reward/{key}": _mean(values) for key, values in _columns(scores).items()}


class Spread(NamedTuple):
    """Of the values at a sample's tokens."""

    low: float
    mean: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(min(values), math.fsum(values) / len(values), max(values))


def critic_metrics(
    scores: Sequence[float],
    rewards: Sequence[float],
    advantages: Sequence[Spread | None],
    returns: Sequence[Spread | None],
    response_lengths: Sequence[int],
) -> dict[str, float]:
    """critic/{score,rewards,advantages,returns}/{mean,max,min} of one step, one entry per sample in each list.

    `scores` are the reward function's, `rewards` the ones after a KL penalty, if any. Advantages and returns are those
    of all response tokens, as in EasyR1; None for a sample without any.
    """
    result = {**_summary("critic/score", scores), **_summary("critic/rewards", rewards)}
    for name, values in (("critic/advantages", advantages), ("critic/returns", returns)):
        pairs = [pair for pair in zip(values, response_lengths, strict=True) if pair[0] is not None]
        if pairs:
            total = math.fsum(value.mean * length for value, length in pairs)
            result[f"{name}/mean"] = total / sum(length for _, length in pairs)
            result[f"{name}/max"] = max(value.high for value, _ in pairs)
            result[f"{name}/min"] = min(value.low for value, _ in pairs)
    return result


def length_metrics(
    response_lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    *,
    max_response_length: int,
    max_prompt_length: int,
    prefix: str = "",
) -> dict[str, float]:
    """{response,prompt}_length/{mean,max,min,clip_ratio} in tokens; clip_ratio is the share that reaches the limit."""
    result: dict[str, float] = {}
    for name, lengths, limit in (
        ("response_length", response_lengths, max_response_length),
        ("prompt_length", prompt_lengths, max_prompt_length),
    ):
        result.update(_summary(f"{prefix}{name}", lengths))
        if lengths:
            result[f"{prefix}{name}/clip_ratio"] = _mean([length >= limit for length in lengths])
    return result


def group_metrics(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """How much the answers to one prompt differ, from the overall scores of each group.

    group/zero_variance_share is the share of groups with equal scores, which teach nothing; group/reward_std the mean
    standard deviation within a group; group/reward_best the mean of each group's best score.
    """
    groups = [group for group in groups if group]
    if not groups:
        return {}
    return {
        "group/zero_variance_share": _mean([max(group) == min(group) for group in groups]),
        "group/reward_std": _mean([_std(group) for group in groups]),
        "group/reward_best": _mean([max(group) for group in groups]),
    }


def timing_metrics(seconds: Mapping[str, float], *, response_tokens: int, total_tokens: int) -> dict[str, float]:
    """timing_s/{phase}, and timing_per_token_ms/{phase} of the phases that work on tokens.

    Generation and reward are divided by the response tokens of the step, the others by all its tokens.
    """
    result = {f"timing_s/{phase}": float(value) for phase, value in seconds.items()}
    for phases, tokens in ((RESPONSE_PHASES, response_tokens), (ALL_TOKEN_PHASES, total_tokens)):
        for phase in phases:
            if phase in seconds and tokens:
                result[f"timing_per_token_ms/{phase}"] = 1000.0 * seconds[phase] / tokens
    return result


def training_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds of the step without validation and saving; without "step" it is the sum of the other phases."""
    inside = math.fsum(value for phase, value in seconds.items() if phase not in (*OUTSIDE_PHASES, "step"))
    if "step" not in seconds:
        return inside
    return max(seconds["step"] - math.fsum(seconds.get(phase, 0.0) for phase in OUTSIDE_PHASES), 0.0)


def perf_metrics(
    seconds: Mapping[str, float],
    *,
    total_tokens: int,
    num_rollouts: int,
    num_gpus: int,
    max_memory_allocated_gb: float | None = None,
    max_memory_reserved_gb: float | None = None,
) -> dict[str, float]:
    """perf/*: tokens, seconds and speed of the step, validation and saving left out.

    `total_tokens` (prompts and responses) and `num_rollouts` are sums over all devices; `num_gpus` counts every device
    that trains or generates (1 on a CPU). perf/throughput is tokens per second and device. The memory peaks are the
    caller's, in GiB, and are left out when None; perf/cpu_memory_used_gb is the whole machine's.
    """
    step_seconds = training_seconds(seconds)
    result = {
        "perf/total_num_tokens": float(total_tokens),
        "perf/time_per_step": step_seconds,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB,
    }
    if step_seconds > 0:
        result["perf/throughput"] = total_tokens / (step_seconds * num_gpus)
        result["perf/rollouts_per_s_per_gpu"] = num_rollouts / (step_seconds * num_gpus)
        result["perf/generation_share"] = seconds.get("gen", 0.0) / step_seconds
    for name, value in (("allocated", max_memory_allocated_gb), ("reserved", max_memory_reserved_gb)):
        if value is not None:
            result[f"perf/max_memory_{name}_gb"] = float(value)
    return result


def seqlen_metrics(tokens_per_rank: Sequence[int]) -> dict[str, float]:
    """global_seqlen/{min,max,minmax_diff,mean}: the tokens that each process trains on, i.e. how even the load is."""
    if not tokens_per_rank:
        return {}
    summary = _summary("global_seqlen", tokens_per_rank)
    return {**summary, "global_seqlen/minmax_diff": float(max(tokens_per_rank) - min(tokens_per_rank))}


def validation_metrics(
    scores: Sequence[Mapping[str, float]],
    response_lengths: Sequence[int],
    prompt_lengths: Sequence[int],
    *,
    max_response_length: int,
    max_prompt_length: int,
) -> dict[str, float]:
    """val/reward_score (the mean overall score), val/{key}_reward and val_{response,prompt}_length/*."""
    columns = _columns(scores)
    result = {f"val/{key}_reward": _mean(values) for key, values in columns.items()}
    if "overall" in columns:
        result["val/reward_score"] = _mean(columns["overall"])
    lengths = length_metrics(
        response_lengths,
        prompt_lengths,
        max_response_length=max_response_length,
        max_prompt_length=max_prompt_length,
        prefix="val_",
    )
    return {**result, **lengths}


def answer_metrics(groups: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """Several answers to each held-out row, each group a list of (final answer, overall score).

    val/reward_score_se: standard error of val/reward_score over the rows (that of the rows' means). With n > 1 answers
    to each row: val/mean@n, val/best@n (the best of a row), val/maj@n (the mean score of a row's most frequent answer,
    the first of those where several are).
    """
    groups = [group for group in groups if group]
    if not groups:
        return {}
    means = [_mean([score for _, score in group]) for group in groups]
    result = {}
    if len(groups) > 1:
        result["val/reward_score_se"] = _std(means) / math.sqrt(len(groups) - 1)
    n = max(map(len, groups))
    if n > 1:
        result |= {
            f"val/mean@{n}": _mean(means),
            f"val/best@{n}": _mean([max(score for _, score in group) for group in groups]),
            f"val/maj@{n}": _mean([_majority_score(group) for group in groups]),
        }
    return result


def _majority_score(group: Sequence[tuple[str, float]]) -> float:
    by_answer: dict[str, list[float]] = {}
    for answer, score in group:
        by_answer.setdefault(answer, []).append(score)
    return _mean(max(by_answer.values(), key=len))


def _columns(rows: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each key over the rows that have it: a reward may return a part for some rows only."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            columns.setdefault(key, []).append(float(value))
    return columns


def _summary(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values]))
