"""The policy losses per completion token [B, T], before averaging. `LOSSES` names them; `losses.policy_loss` calls
them.

A surrogate takes the terms of a micro-batch and the settings, and returns the loss per token and indicators per token
whose means are logged. Rows are whole samples, so that a mean over a sequence needs nothing from elsewhere.
Throughout, l is the log ratio of the policy to the old one, r = exp(l), A the advantage and sg() stops the gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """One micro-batch, all [B, T]. log_ratio is clamped to [-20, 20]. weights: importance weights of the sampler or
    None; selected: the tokens that a covariance loss treats otherwise, or None."""

    log_ratio: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    weights: Tensor | None = None
    selected: Tensor | None = None

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[B, T] -> [B, 1], over the completion tokens of each sample."""
        return (values * self.mask).sum(-1, keepdim=True) / self.mask.sum(-1, keepdim=True).clamp(min=1)

    def by_sign(self, not_negative: float, negative: float) -> Tensor:
        """[B, T]: one of the numbers by the sign of the advantage."""
        numbers = self.advantages.new_full((), not_negative), self.advantages.new_full((), negative)
        return torch.where(self.advantages >= 0, *numbers)


@dataclass(frozen=True)
class Settings:
    """The numbers of the losses. clip_ratio_dual None: no dual clip, and no truncation in dppo_*."""

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_dual: float | None
    tau_positive: float
    tau_negative: float
    kl_cov_coef: float
    vespo_k_positive: float
    vespo_lambda_positive: float
    vespo_k_negative: float
    vespo_lambda_negative: float


Surrogate = Callable[[Terms, Settings], tuple[Tensor, dict[str, Tensor]]]


def _clipped(log_ratio: Tensor, settings: Settings) -> Tensor:
    """r clipped to [1 - low, 1 + high]; a low of 1 or more leaves the lower side open."""
    low = math.log(1.0 - settings.clip_ratio_low) if settings.clip_ratio_low < 1.0 else -math.inf
    return log_ratio.clamp(low, math.log(1.0 + settings.clip_ratio_high)).exp()


def _clip(log_ratio: Tensor, terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate on any log ratio, clipped once more from above for negative advantages."""
    advantages, ratio = terms.advantages, log_ratio.exp()
    plain_loss, clipped_loss = -advantages * ratio, -advantages * _clipped(log_ratio, settings)
    loss = upper = torch.maximum(plain_loss, clipped_loss)
    bounded = torch.zeros_like(upper, dtype=torch.bool)
    if settings.clip_ratio_dual is not None:
        bound = -advantages * settings.clip_ratio_dual
        bounded = (upper > bound) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(upper, bound), upper)
    indicators = {"pg_clipfrac_higher": plain_loss < clipped_loss, "pg_clipfrac_lower": bounded}
    return loss, indicators


def clip(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)): PPO, arXiv 1707.06347; for A < 0 at most -A dual: dual clip, arXiv
    1912.09729. GRPO, DAPO (arXiv 2503.14476) and Dr.GRPO (arXiv 2503.20783) differ in how it is averaged."""
    return _clip(terms.log_ratio, terms, settings)


def gspo(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """`clip` with the mean of l over the sequence in place of l: GSPO, arXiv 2507.18071, eq. 5. LUSPO (arXiv
    2602.05261) is its sum over the tokens instead of their mean."""
    return _clip(terms.sequence_mean(terms.log_ratio).expand_as(terms.mask), terms, settings)


def gspo_token(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """`gspo` in value, with each token's gradient weighted by its own advantage: GSPO-token, same paper, eq. 14."""
    of_sequence = terms.sequence_mean(terms.log_ratio).detach()
    return _clip(of_sequence + (terms.log_probs - terms.log_probs.detach()), terms, settings)


def cispo(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p sg(clip(r, 1 - low, 1 + high)): CISPO, arXiv 2506.13585."""
    ratio = terms.log_ratio.detach().exp()
    clipped = _clipped(terms.log_ratio.detach(), settings)
    indicators = {"pg_clipfrac_higher": ratio > clipped, "pg_clipfrac_lower": ratio < clipped}
    return -terms.advantages * terms.log_probs * clipped, indicators


def sapo(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A: SAPO, arXiv 2511.20347."""
    tau = terms.by_sign(settings.tau_positive, settings.tau_negative)
    return -terms.advantages * (4.0 / tau) * torch.sigmoid(tau * (terms.log_ratio.exp() - 1.0)), {}


def gpg(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p, without a ratio: GPG, arXiv 2504.02546."""
    return -terms.advantages * terms.log_probs, {}


def geo_mean(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A exp(mean of l, each l clipped to [-low, high] on the side that A would push it past), A and the result one
    value per sequence: GMPO, arXiv 2507.20673. Importance weights enter by their geometric mean, as in verl."""
    sign, log_ratio = terms.advantages.sign(), terms.log_ratio
    inside = log_ratio.clamp(-settings.clip_ratio_low, settings.clip_ratio_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * inside)
    loss = -terms.sequence_mean(terms.advantages) * terms.sequence_mean(pessimistic).exp()
    if terms.weights is not None:
        loss = loss * terms.sequence_mean((terms.weights + 1e-10).log()).exp()
    clipped = log_ratio != inside
    indicators = {"pg_clipfrac_higher": clipped & (sign > 0), "pg_clipfrac_lower": clipped & (sign < 0)}
    return loss.expand_as(terms.mask), indicators


def clip_cov(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (no dual clip), 0 at the selected tokens: Clip-Cov, arXiv 2505.22617."""
    upper = torch.maximum(
        -terms.advantages * terms.log_ratio.exp(), -terms.advantages * _clipped(terms.log_ratio, settings)
    )
    return torch.where(terms.selected, 0.0, upper), {"cov_selected": terms.selected}


def kl_cov(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r, and coef |l| on top at the selected tokens: KL-Cov, arXiv 2505.22617."""
    penalty = torch.where(terms.selected, settings.kl_cov_coef * terms.log_ratio.abs(), 0.0)
    return -terms.advantages * terms.log_ratio.exp() + penalty, {"cov_selected": terms.selected}


def dppo_tv(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p sg(r) where the token's probability p has not moved past the old one by more than high (A > 0, upwards)
    or low (otherwise, downwards), else 0; r truncated at clip_ratio_dual: DPPO with the binary total variation, arXiv
    2602.04879."""
    moved = terms.log_probs.detach().exp() - terms.old_log_probs.exp()
    up = moved <= settings.clip_ratio_high
    down = moved >= -settings.clip_ratio_low
    return _trust_region(terms, settings, torch.where(terms.advantages > 0, up, down))


def dppo_kl(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """`dppo_tv` with the KL of the two-outcome distribution {this token, any other} as the distance, bounded on the
    side that A pushes to: DPPO with the binary KL, the same paper."""
    log_probs, old_log_probs = terms.log_probs.detach(), terms.old_log_probs
    p, old = log_probs.exp(), old_log_probs.exp()
    distance = old * (old_log_probs - log_probs) + (1 - old) * ((1 - old + 1e-8) / (1 - p + 1e-8)).log()
    up = (distance <= settings.clip_ratio_high) | (p <= old)
    down = (distance <= settings.clip_ratio_low) | (p >= old)
    return _trust_region(terms, settings, torch.where(terms.advantages > 0, up, down))


def _trust_region(terms: Terms, settings: Settings, inside: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = terms.log_ratio.detach().exp()
    truncated = ratio if settings.clip_ratio_dual is None else ratio.clamp(max=settings.clip_ratio_dual)
    loss = -terms.advantages * truncated * terms.log_probs * inside
    return loss, {"pg_clipfrac_higher": ~inside, "pg_clipfrac_lower": (ratio > truncated) & inside}


def vespo(terms: Terms, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p sg(phi(w)), phi(w) = exp(lambda) w^k exp(-lambda w), k and lambda by the sign of A, w the ratio of the
    whole sequence, importance weights included: VESPO, arXiv 2602.10693, in TRL's form."""
    lowest = math.log(1e-8)
    log_w = (terms.log_ratio.detach() * terms.mask).sum(-1, keepdim=True)
    if terms.weights is not None:
        log_w = log_w + (terms.weights.log().clamp(lowest, 20.0) * terms.mask).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, 20.0)
    power = terms.by_sign(settings.vespo_k_positive, settings.vespo_k_negative)
    decay = terms.by_sign(settings.vespo_lambda_positive, settings.vespo_lambda_negative)
    phi = (decay + power * log_w - decay * log_w.exp()).exp()
    return -phi * terms.advantages * terms.log_probs, {"vespo_phi": phi}


LOSSES: dict[str, Surrogate] = {
    "default": clip,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "sapo": sapo,
    "dr_grpo": clip,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "luspo": gspo,
    "vespo": vespo,
}

# These take the importance weights into their own ratio; all others are multiplied by them token by token.
WEIGHS_ITSELF = frozenset({"geo_mean", "vespo"})
