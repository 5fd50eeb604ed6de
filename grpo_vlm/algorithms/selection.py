"""The tokens that clip_cov and kl_cov treat otherwise: those whose log-prob and advantage vary together most.

arXiv 2505.22617. Both choose over the whole update, all micro-batches and ranks: `select` is called once per update
with the log-probs of a pass without gradient, and its result is cut into micro-batches like every other tensor. verl
chooses within a micro-batch, so that its choice depends on the split.

Shape legend: B samples of the update on this rank, T longest completion.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_vlm.algorithms.ranks import ALONE, Ranks

SELECTING = frozenset({"clip_cov", "kl_cov"})  # loss types that `select` is needed for


def select(
    loss_type: str,
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    sample_keys: Sequence[int],
    seed: int,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    kl_cov_ratio: float = 2e-4,
    ranks: Ranks = ALONE,
) -> Tensor:
    """BoolTensor[B, T], the selected tokens of this rank.

    cov = (A - mean A) (log p - mean log p), the means over all completion tokens of the update. clip_cov draws
    clip_cov_ratio of the tokens at random from those with clip_cov_lb < cov < clip_cov_ub that PPO's clip does not act
    on; kl_cov takes the kl_cov_ratio of the tokens with the largest cov. Both take at least one token where there is
    one.

    sample_keys: B integers that tell the samples of the update apart and do not depend on the rank or the order; with
    `seed` they make the draw, and break ties. seed: another number for each update.

    Raises:
        KeyError: a loss type that selects nothing.
    """
    if loss_type not in SELECTING:
        raise KeyError(f"loss_type {loss_type!r} selects no tokens; those that do: {', '.join(sorted(SELECTING))}")
    candidates = response_mask > 0
    covariance, tokens = _covariance(log_probs, advantages, candidates, ranks)
    draw = _draw(sample_keys, response_mask, seed)
    if loss_type == "kl_cov":
        return _largest(covariance, draw, candidates, max(int(kl_cov_ratio * tokens), 1), ranks)
    ratio = (log_probs - old_log_probs).exp()
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high) > -advantages * ratio
    candidates = candidates & ~clipped & (covariance > clip_cov_lb) & (covariance < clip_cov_ub)
    return _largest(torch.zeros_like(draw), draw, candidates, max(int(clip_cov_ratio * tokens), 1), ranks)


def _covariance(log_probs: Tensor, advantages: Tensor, candidates: Tensor, ranks: Ranks) -> tuple[Tensor, float]:
    """[B, T] in float64, and the number of completion tokens of the update."""
    log_probs, advantages, mask = log_probs.double(), advantages.double(), candidates.double()
    sums = ranks.sum(torch.stack([mask.sum(), (advantages * mask).sum(), (log_probs * mask).sum()]))
    tokens = sums[0].clamp(min=1)
    return (advantages - sums[1] / tokens) * (log_probs - sums[2] / tokens), float(sums[0])


def _draw(sample_keys: Sequence[int], response_mask: Tensor, seed: int) -> Tensor:
    """A uniform random number for each token [B, T], float64, from the sample's key, the seed and the token's place
    alone: a generator's first T numbers are the same for any T."""
    numbers = torch.empty(response_mask.shape, dtype=torch.float64)
    for row, key in zip(numbers, sample_keys, strict=True):
        mixed = (seed * 0x9E3779B97F4A7C15 + key * 0xC2B2AE3D27D4EB4F) % 2**63
        row.uniform_(generator=torch.Generator().manual_seed(mixed))
    return numbers.to(response_mask.device)


def _largest(values: Tensor, draw: Tensor, candidates: Tensor, count: int, ranks: Ranks) -> Tensor:
    """The `count` candidates with the largest (value, draw) over all ranks: BoolTensor[B, T]."""
    pairs = _sorted(torch.stack([values[candidates], draw[candidates]], -1))[:count]
    missing = pairs.new_full((count - len(pairs), 2), -torch.inf)  # ranks gather tensors of one shape
    value, tie = _sorted(ranks.gather(torch.cat([pairs, missing])))[count - 1]
    return candidates & ((values > value) | ((values == value) & (draw >= tie)))


def _sorted(pairs: Tensor) -> Tensor:
    """[N, 2], the largest first column first, then the largest second."""
    pairs = pairs[pairs[:, 1].argsort(descending=True)]
    return pairs[pairs[:, 0].argsort(descending=True, stable=True)]
