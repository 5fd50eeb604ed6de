"""Importance weights for the gap between the trainer's log-probs and the sampler's.

Completions are drawn by an engine whose arithmetic differs from the trainer's, so that the policy that made them is
not quite the one that is called old. Truncated importance sampling weights each token by p_old / p_sampler, cut off
above. Weights of a sequence are taken from the mean of its log ratios, not the sum: a product over hundreds of tokens
leaves the range of any useful bound.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_vlm.algorithms.ranks import ALONE, Ranks

LEVELS = ("token", "sequence")
MODES = ("truncate", "mask")


@dataclass(frozen=True)
class Correction:
    """weights [B, T], zero outside the mask, without gradient. metrics: scalars of the whole update, the same on all
    ranks."""

    weights: Tensor
    metrics: dict[str, Tensor]


@torch.no_grad()
def correction(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    low: float = 0.0,
    high: float = 2.0,
    ranks: Ranks = ALONE,
) -> Correction:
    """Importance weights p_old / p_sampler [B, T] of the samples of an update on this rank.

    Args:
        level: `token`, or `sequence` for exp(mean over its tokens of log p_old - log p_sampler) at each of its tokens.
        mode: `truncate` clamps a weight to [low, high]; `mask` sets one outside to zero.
        low, high: the bounds; low 0 leaves the lower side open.

    Metrics, means over completion tokens: weight/mean and weight/max of the weights in use, weight/high and weight/low
    (share above and below the bounds), weight/ess (effective share of the samples, (sum w)^2 / (n sum w^2)),
    weight/kl (mean of r - 1 - log r, r = p_old / p_sampler of a token: KL(sampler || old)).

    Raises:
        KeyError: unknown level or mode.
    """
    if level not in LEVELS or mode not in MODES:
        raise KeyError(f"level {level!r}, mode {mode!r}; known: {', '.join(LEVELS)}; {', '.join(MODES)}")
    mask = response_mask.double()
    of_token = (torch.where(mask > 0, old_log_probs - sampler_log_probs, 0.0)).double()
    log_weights = of_token
    if level == "sequence":
        lengths = mask.sum(-1, keepdim=True).clamp(min=1)
        log_weights = (of_token.sum(-1, keepdim=True) / lengths).expand_as(mask)
    raw = log_weights.clamp(-20.0, 20.0).exp()
    above, below = raw > high, raw < low
    used = raw.clamp(low, high) if mode == "truncate" else raw.masked_fill(above | below, 0.0)
    used = used * mask
    safe = of_token.clamp(-20.0, 20.0)
    divergence = safe.exp() - 1.0 - safe
    columns = [mask, used, used.square(), above * mask, below * mask, divergence * mask]
    tokens, total, squares, high_sum, low_sum, kl_sum = ranks.sum(torch.stack([column.sum() for column in columns]))
    tokens = tokens.clamp(min=1)
    largest = ranks.gather(used.max().reshape(1) if used.numel() else tokens.new_zeros(1)).max()
    metrics = {
        "weight/mean": total / tokens,
        "weight/max": largest,
        "weight/high": high_sum / tokens,
        "weight/low": low_sum / tokens,
        "weight/ess": total.square() / (tokens * squares).clamp(min=1e-12),
        "weight/kl": kl_sum / tokens,
    }
    return Correction(used.to(old_log_probs), metrics)
