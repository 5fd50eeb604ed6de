"""Which groups and samples of a rollout batch are trained on: pure decisions on scores and flags.

Online filtering is DAPO's (arXiv 2503.14476): groups that are too easy or too hard for the policy are replaced by new
ones. The caller asks on all ranks with its own groups and adds up what is kept.
"""

from collections.abc import Sequence

from torch import Tensor

Scores = Sequence[float | None]  # of one group's samples; None where a sample was not scored


def keep(group_scores: Sequence[Scores], low: float, high: float) -> list[bool]:
    """For each group whether low < mean < high, both bounds excluded as in EasyR1; samples without a score are left
    out of the mean, and a group without any is not kept."""
    means = [sum(scores) / len(scores) if scores else None for scores in map(_scored, group_scores)]
    return [mean is not None and low < mean < high for mean in means]


def keep_varied(group_scores: Sequence[Scores]) -> list[bool]:
    """For each group whether its scores differ, so that it has a gradient (verl's filter_groups). A group of one
    sample is kept, a group without any score is not."""
    return [len(scored) > 0 and (len(scores) == 1 or len(set(scored)) > 1) for scores, scored in _pairs(group_scores)]


def without(response_mask: Tensor, flagged: Tensor) -> Tensor:
    """`response_mask` [B, T] with the rows of flagged samples [B] emptied: they stay in their group's statistics and
    leave the loss and its denominators. Masks truncated completions (DAPO's overlong filtering)."""
    return response_mask * ~flagged[:, None]


def _scored(scores: Scores) -> list[float]:
    return [score for score in scores if score is not None]


def _pairs(group_scores: Sequence[Scores]) -> list[tuple[Scores, list[float]]]:
    return [(scores, _scored(scores)) for scores in group_scores]
