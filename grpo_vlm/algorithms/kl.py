"""Estimators of KL(policy || reference), and the course of its coefficient.

From the log-probs of the sampled tokens: `estimate`, after John Schulman's note "Approximating KL divergence". Over
the whole vocabulary: `full`, for a caller that holds the logits of a chunk of tokens, and `full_in_chunks`.

Shape legend: B samples, T completion tokens, S scored tokens, s tokens of one chunk, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def k1(difference: Tensor) -> Tensor:
    """d = log p - log p_ref: unbiased in value, without expected gradient."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """d^2 / 2: its gradient is that of the KL."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(-d) - 1 + d, with d clamped to 20 and the value to 10 as EasyR1 and verl do. Unlike theirs it keeps its
    digits where d is small."""
    negative = (-difference).clamp(-20.0, 20.0)
    return (negative.expm1() - negative).clamp(-10.0, 10.0)


def straight_through(value: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The value of this estimator with the gradient of k2 (verl's names with a plus)."""

    def combined(difference: Tensor) -> Tensor:
        slope = k2(difference)
        return value(difference).detach() + (slope - slope.detach())

    return combined


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": k1,
    "abs": absolute,
    "mse": k2,
    "low_var_kl": k3,
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": straight_through(k1),
    "k3+": straight_through(k3),
}


def estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """KL per token in float32 (float64 stays), same shape as the inputs [B, T]; differentiable in `log_probs`.

    Raises:
        KeyError: unknown name; `full` too, which needs the logits: see `full_in_chunks`.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return ESTIMATORS[name](log_probs.to(dtype) - ref_log_probs.to(dtype))


def full(log_softmax: Tensor, ref_log_softmax: Tensor) -> Tensor:
    """sum_v p_v (log p_v - log p_ref_v): [s, V] and [s, V] to [s]. A token of probability zero adds nothing."""
    probabilities = log_softmax.exp()
    terms = probabilities * (log_softmax - ref_log_softmax)
    return torch.where(probabilities > 0, terms, 0.0).sum(-1)


def full_in_chunks(
    logits: Callable[[slice], Tensor], ref_logits: Callable[[slice], Tensor], tokens: int, chunk_tokens: int
) -> Tensor:
    """`full` [S] of all tokens, float32 or better, holding the logits of `chunk_tokens` at a time: they are made again
    in the backward pass.

    `logits(part)` and `ref_logits(part)` give the logits [s, V] of a slice of the S tokens, divided by the sampling
    temperature; the reference's get no gradient.
    """

    def of_chunk(part: slice) -> Tensor:
        policy, reference = logits(part), ref_logits(part).detach()
        dtype = torch.promote_types(policy.dtype, torch.float32)
        return full(policy.to(dtype).log_softmax(-1), reference.to(dtype).log_softmax(-1))

    parts = [slice(first, min(first + chunk_tokens, tokens)) for first in range(0, max(tokens, 1), chunk_tokens)]
    return torch.cat([checkpoint(of_chunk, part, use_reentrant=False) for part in parts])


@dataclass
class FixedKL:
    """A coefficient that stays."""

    coef: float

    def update(self, divergence: float, samples: int) -> None:
        """Takes note of a rollout step; changes nothing."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """The configured coefficient stays: a resumed run may have been given another."""


@dataclass
class AdaptiveKL:
    """A coefficient that is steered so that the KL nears `target` (arXiv 1909.08593, section 2.2).

    horizon: samples over which a relative error of 1 would double the coefficient. start: the configured coefficient.
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        self.start = self.coef

    def update(self, divergence: float, samples: int) -> None:
        """coef *= 1 + clip(divergence / target - 1, -0.2, 0.2) * samples / horizon.

        divergence: the KL per token, averaged over each sample's tokens, then over the samples of the rollout step.
        samples: their number, over all ranks.
        """
        error = min(max(divergence / self.target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef, "start": self.start}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Goes on where the state was taken, unless another coefficient has been configured since."""
        if state.get("start") == self.start:
            self.coef = state["coef"]


def controller(kind: str, *, coef: float, target: float, horizon: float) -> FixedKL | AdaptiveKL:
    """The controller that `kl_type` names. KeyError for an unknown kind."""
    kinds = {"fixed": lambda: FixedKL(coef), "adaptive": lambda: AdaptiveKL(coef, target, horizon)}
    return kinds[kind]()
