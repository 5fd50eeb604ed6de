"""Policy losses over completion tokens, with global denominators.

A micro-batch passes the token and sequence counts of the whole update (all micro-batches, all ranks); the sum of the
micro-batch losses is then the loss of the update, however it was split or packed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_vlm.algorithms.surrogates import LOSSES, WEIGHS_ITSELF, Settings, Terms

AVERAGES = ("token", "seq", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

# Loss types whose definition says how they are averaged, TRL's names among them: what each is here.
FIXED_AVERAGES = {
    "grpo": ("default", "seq"),
    "bnpo": ("default", "token"),
    "dapo": ("default", "token"),
    "dr_grpo": ("dr_grpo", "seq-mean-token-sum-norm"),
    "luspo": ("luspo", "seq-mean-token-sum"),
}

# What TRL 1.16 means by each of its loss types. Its bnpo divides by the tokens of a micro-batch, here by those of the
# update, so that the result does not depend on the split.
TRL_LOSSES = {**FIXED_AVERAGES, "cispo": ("cispo", "token"), "sapo": ("sapo", "seq"), "vespo": ("vespo", "token")}


def resolve_loss(name: str, avg_mode: str | None = None) -> tuple[str, str]:
    """The key of `LOSSES` and the averaging that a loss type stands for.

    `avg_mode` None means that none was asked for: the one that the loss type implies, else `token` (EasyR1's default).
    TRL's `sapo` is averaged by `seq`; for a configuration in TRL's names take `TRL_LOSSES`.

    Raises:
        KeyError: unknown name.
        ValueError: the loss type implies another averaging than `avg_mode`.
    """
    if name not in FIXED_AVERAGES:
        if name not in LOSSES:
            raise KeyError(f"loss_type {name!r}; known: {', '.join(sorted({*LOSSES, *FIXED_AVERAGES}))}")
        return name, avg_mode or "token"
    loss_type, implied = FIXED_AVERAGES[name]
    if avg_mode is not None and avg_mode != implied:
        raise ValueError(
            f"loss_type {name!r} is averaged by {implied!r}, not by {avg_mode!r}: leave loss_avg_mode out, or take "
            f"loss_type {'gspo' if name == 'luspo' else 'default'!r} with that loss_avg_mode"
        )
    return loss_type, implied


@dataclass(frozen=True)
class Denominators:
    """Sizes of the whole update: completion tokens and sequences over all micro-batches and ranks.

    Sequences whose tokens are all masked do not count. longest: max_response_length, the constant that
    `seq-mean-token-sum-norm` divides each sequence's sum by.
    """

    tokens: float
    sequences: float
    longest: float | None = None

    @classmethod
    def of(cls, response_mask: Tensor) -> "Denominators":
        lengths = response_mask.sum(-1)
        return cls(float(lengths.sum()), float((lengths > 0).sum()), float(response_mask.shape[-1]))


def average(values: Tensor, response_mask: Tensor, mode: str, whole: Denominators) -> Tensor:
    """Reduces [B, T] to this micro-batch's share of the update's average.

    `token`: sum over tokens / all tokens. `seq` and its other name `seq-mean-token-mean`: mean over a sequence's
    tokens, then over all sequences. `seq-mean-token-sum`: sum over a sequence's tokens, then the mean over all
    sequences; `seq-mean-token-sum-norm`: the same, divided by `whole.longest` (Dr.GRPO).

    Raises:
        KeyError: unknown mode.
        ValueError: `seq-mean-token-sum-norm` without `whole.longest`.
    """
    if mode not in AVERAGES:
        raise KeyError(f"loss_avg_mode {mode!r}; known: {', '.join(AVERAGES)}")
    of_sequence = (values * response_mask).sum(-1)
    if mode == "token":
        return of_sequence.sum() / max(whole.tokens, 1.0)
    if mode in ("seq", "seq-mean-token-mean"):
        of_sequence = of_sequence / response_mask.sum(-1).clamp(min=1)
    share = of_sequence.sum() / max(whole.sequences, 1.0)
    if mode != "seq-mean-token-sum-norm":
        return share
    if whole.longest is None:
        raise ValueError("loss_avg_mode seq-mean-token-sum-norm divides by Denominators.longest, which is None")
    return share / whole.longest


def policy_loss(
    loss_type: str,
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_dual: float | None,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    kl_cov_coef: float = 1.0,
    vespo_k_positive: float = 2.0,
    vespo_lambda_positive: float = 3.0,
    vespo_k_negative: float = 3.0,
    vespo_lambda_negative: float = 2.0,
    loss_avg_mode: str = "token",
    whole: Denominators | None = None,
    watched: Denominators | None = None,
    weights: Tensor | None = None,
    selected: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch and its metrics, all [B, T] inputs, scalars out. Rows are whole samples.

    The log ratio is clamped to [-20, 20] before exponentiation.

    Args:
        loss_type: key of `LOSSES`, where the formulas are; `resolve_loss` gives it for TRL's names.
        clip_ratio_dual: bound of the dual clip, or None for none; dppo_*: where the ratio is truncated.
        whole: sizes of the update; this micro-batch's own by default.
        watched: sizes that the metrics are means over; `whole` by default (they differ where groups without a
        gradient are left out).
        weights: importance weights of the sampler [B, T], constants: the loss of each token is multiplied by them.
        selected: BoolTensor[B, T] from `selection.select`, for clip_cov and kl_cov.

    Metrics are shares of means over the update, so that they add up over micro-batches like the loss: ppo_kl (mean old
    - new), entropy_loss (mean -log p of the sampled tokens, averaged as the loss is; EasyR1's name), and by loss type
    pg_clipfrac_higher, pg_clipfrac_lower, cov_selected, vespo_phi.

    Raises:
        KeyError: unknown loss_type or loss_avg_mode.
        ValueError: clip_cov or kl_cov without `selected`.
    """
    whole = whole or Denominators.of(response_mask)
    watched = watched or whole
    if loss_type in ("clip_cov", "kl_cov") and selected is None:
        raise ValueError(f"loss_type {loss_type} needs the tokens that selection.select chose over the whole update")
    settings = Settings(
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_dual=clip_ratio_dual,
        tau_positive=tau_positive,
        tau_negative=tau_negative,
        kl_cov_coef=kl_cov_coef,
        vespo_k_positive=vespo_k_positive,
        vespo_lambda_positive=vespo_lambda_positive,
        vespo_k_negative=vespo_k_negative,
        vespo_lambda_negative=vespo_lambda_negative,
    )
    log_ratio = (log_probs - old_log_probs).clamp(-20.0, 20.0)
    terms = Terms(log_ratio, log_probs, old_log_probs, advantages, response_mask, weights, selected)
    per_token, indicators = LOSSES[loss_type](terms, settings)
    if weights is not None and loss_type not in WEIGHS_ITSELF:
        per_token = per_token * weights
    loss = average(per_token, response_mask, loss_avg_mode, whole)
    with torch.no_grad():
        per_token_metrics = {"ppo_kl": -log_ratio, **indicators}
        metrics = {
            name: average(values, response_mask, "token", watched) for name, values in per_token_metrics.items()
        }
        # a sum over a sequence is no mean: these averages of the loss are not those of a metric
        mode = "token" if loss_avg_mode.startswith("seq-mean-token-sum") else loss_avg_mode
        metrics["entropy_loss"] = average(-log_probs, response_mask, mode, watched)
    return loss, metrics
