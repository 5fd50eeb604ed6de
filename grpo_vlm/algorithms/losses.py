"""Policy losses over completion tokens, with global denominators.

A micro-batch passes the token and sequence counts of the whole update (all micro-batches, all ranks); the sum of the
micro-batch losses is then the loss of the update, however it was split.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole update: completion tokens and sequences over all micro-batches and ranks."""

    tokens: float
    sequences: float

    @classmethod
    def of(cls, response_mask: Tensor) -> "Denominators":
        return cls(tokens=float(response_mask.sum()), sequences=float(response_mask.shape[0]))


def average(values: Tensor, response_mask: Tensor, mode: str, whole: Denominators) -> Tensor:
    """Reduces [B, T] to this micro-batch's share of the update's average.

    `token`: sum over tokens / all tokens. `seq`: mean over a sequence's tokens, then over all sequences. Eps 1e-8 as
    EasyR1.
    """
    masked = values * response_mask
    if mode == "token":
        return masked.sum() / (whole.tokens + 1e-8)
    if mode == "seq":
        return (masked.sum(-1) / (response_mask.sum(-1) + 1e-8)).sum() / whole.sequences
    raise KeyError(f"loss_avg_mode {mode!r}; known: token, seq")


def dual_clip(
    log_ratio: Tensor, advantages: Tensor, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate, clipped once more from above for negative advantages (dual clip, arXiv 1912.09729).

    Returns the loss per token [B, T] and the indicators of both clips [B, T].
    """
    ratio = log_ratio.exp()
    low = math.log(1.0 - clip_ratio_low) if clip_ratio_low < 1.0 else -math.inf
    high = math.log(1.0 + clip_ratio_high)
    clipped = log_ratio.clamp(low, high).exp()
    plain_loss, clipped_loss = -advantages * ratio, -advantages * clipped
    upper = torch.maximum(plain_loss, clipped_loss)
    bound = -advantages * clip_ratio_dual
    loss = torch.where(advantages < 0, torch.minimum(upper, bound), upper)
    indicators = {
        "pg_clipfrac_higher": (plain_loss < clipped_loss).to(ratio.dtype),
        "pg_clipfrac_lower": ((upper > bound) & (advantages < 0)).to(ratio.dtype),
    }
    return loss, indicators


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {"default": dual_clip}


def policy_loss(
    loss_type: str,
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float,
    loss_avg_mode: str = "token",
    whole: Denominators | None = None,
    watched: Denominators | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch and its metrics, all [B, T] inputs, scalars out.

    `log_ratio` is clamped to [-20, 20] before exponentiation. Metrics are shares of token means over the update, so
    that they add up over micro-batches like the
    loss: ppo_kl (mean old - new), entropy_loss (mean -log p of the sampled tokens, EasyR1's name),
    pg_clipfrac_higher, pg_clipfrac_lower.
    `whole` defaults to this micro-batch's own counts, `watched`, the sizes that the metrics are means over, to `whole`
    (they differ where groups without a gradient are left out).

    Raises:
        KeyError: unknown loss_type or loss_avg_mode.
    """
    whole = whole or Denominators.of(response_mask)
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    per_token, indicators = LOSSES[loss_type](
        log_ratio,
        advantages,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_dual=clip_ratio_dual,
    )
    loss = average(per_token, response_mask, loss_avg_mode, whole)
    per_token_metrics = {"ppo_kl": -log_ratio, "entropy_loss": -log_probs, **indicators}
    with torch.no_grad():
        metrics = {
            name: average(values, response_mask, "token", watched or whole)
            for name, values in per_token_metrics.items()
        }
    return loss, metrics
