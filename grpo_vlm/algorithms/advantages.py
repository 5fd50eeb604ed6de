"""Advantage estimators: token-level rewards [B, T] in, advantages [B, T] out.

`estimate` is the only entry; an estimator is a function of a sample's summed reward and of its group.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

EPSILON = 1e-6  # keeps the division finite for a group without variance, as EasyR1 and verl do


def group_index(group_ids: Sequence[Hashable]) -> Tensor:
    """Numbers the groups in order of first appearance: LongTensor[B]."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=torch.long)


def grpo(scores: Tensor, groups: Tensor, *, normalize_std: bool = True) -> Tensor:
    """(reward - group mean) / (group std + 1e-6), std unbiased: GRPO, arXiv 2402.03300, eq. 3.

    `normalize_std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783). A group of one keeps its raw score
    (mean 0, std 1), as verl does. Computed in float64, in which the mean of equal rewards is exact: such a group's
    advantages are exactly zero.
    `scores` [B] and `groups` [B] (group numbers from 0) give [B] in float64.
    """
    scores = scores.double()
    count = torch.bincount(groups).to(scores)
    mean = torch.zeros_like(count).index_add(0, groups, scores) / count
    mean = torch.where(count > 1, mean, torch.zeros_like(mean))
    centred = scores - mean[groups]
    if not normalize_std:
        return centred
    variance = torch.zeros_like(count).index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)
    std = torch.where(count > 1, variance.sqrt(), torch.ones_like(variance))
    return centred / (std[groups] + EPSILON)


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"grpo": grpo}


def estimate(
    name: str, token_level_rewards: Tensor, response_mask: Tensor, group_ids: Sequence[Hashable], **options
) -> Tensor:
    """Advantages [B, T], zero outside `response_mask`.

    Args:
        name: key of `ESTIMATORS`.
        token_level_rewards: [B, T]; a sample's reward is their sum (the score at the last token, less a KL penalty
        per token where that is used).
        response_mask: [B, T], 1 at completion tokens.
        group_ids: B hashable ids; samples of one prompt share theirs.
        options: the estimator's own keywords.

    Raises:
        KeyError: unknown name.
    """
    scores = (token_level_rewards * response_mask).sum(-1)
    groups = group_index(group_ids).to(scores.device)
    return ESTIMATORS[name](scores, groups, **options)[:, None].to(response_mask) * response_mask
