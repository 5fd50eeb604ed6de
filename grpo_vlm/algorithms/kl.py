"""Per-token estimators of KL(policy || reference) from the log-probs of the sampled tokens, after John Schulman's
note "Approximating KL divergence"."""

from collections.abc import Callable

import torch
from torch import Tensor


def k1(difference: Tensor) -> Tensor:
    return difference


def absolute(difference: Tensor) -> Tensor:
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d, with d clamped to 20 and the value to 10 as EasyR1 and verl do."""
    negative = (-difference).clamp(-20.0, 20.0)
    return (negative.exp() - negative - 1).clamp(-10.0, 10.0)


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"kl": k1, "abs": absolute, "mse": k2, "low_var_kl": k3}


def estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL per token in float32 (float64 stays), same shape as the inputs [B, T]; differentiable in `log_probs`.
    KeyError for an unknown name."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return ESTIMATORS[name](log_probs.to(dtype) - ref_log_probs.to(dtype))
