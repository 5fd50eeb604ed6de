"""Validation: the answers to the held-out rows under their own sampling settings, scored by the same reward."""

import math
from collections.abc import Callable, Sequence

from grpo_vlm.data.rows import Prompt
from grpo_vlm.report.record import Sample
from grpo_vlm.rollout.types import Sampling
from grpo_vlm.training.batch import Group
from grpo_vlm.training.collect import Collector


def validate(
    collector: Collector,
    build: Callable[[Sequence[int]], list[Prompt]],
    sampling: Sampling,
    *,
    count: int,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[Group]:
    """Generates and scores this rank's share of the `count` rows (every `world_size`-th), `batch_size` prompts at a
    time over all ranks; -1 takes them all at once. `build` makes the prompts of some rows.

    The seeds do not depend on the step, so that two validations differ by the weights alone.
    """
    mine = range(rank, count, world_size)
    largest_share = math.ceil(count / world_size)
    size = largest_share if batch_size < 1 else max(1, batch_size // world_size)
    groups: list[Group] = []
    for first in range(0, largest_share, size):  # as many rounds on every rank: the engine's calls are collective
        places = mine[first : first + size]
        prompts = build(places)
        completions = collector.generate(prompts, sampling, step=0, purpose="val")
        groups += collector.score(prompts, completions, places)
    return groups


def to_samples(
    collector: Collector, groups: Sequence[Group], *, step: int, split: str, advantages: Sequence[float] | None = None
) -> list[Sample]:
    """The groups as lines of samples.jsonl. `advantages` has one value per completion, in order."""
    pairs = [
        (group, completion, score)
        for group in groups
        for completion, score in zip(group.completions, group.scores, strict=True)
    ]
    return [
        Sample(
            step=step,
            split=split,
            row_id=group.prompt.row_id,
            prompt=group.prompt.text,
            response=collector.text(completion),
            ground_truth=group.prompt.ground_truth,
            scores=dict(score or {}),
            advantage=None if advantages is None else advantages[index],
            response_length=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )
        for index, (group, completion, score) in enumerate(pairs)
    ]
