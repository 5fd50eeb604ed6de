"""Per-token log-probs and entropy of completions: the plain padded form, one row per sample.

Shape legend: B samples, L padded prompt + completion, T padded completion, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024  # positions whose float32 logits exist at one time: 0.6 GB for Qwen's vocabulary


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts padded on the left and completions on the right, so that every row's completion fills the last T
    columns.

    inputs: keyword arguments of the model's forward (input_ids [B, L], attention_mask [B, L], mm_token_type_ids [B,
    L], pixel_values, image_grid_thw).
    The inputs may have rows beyond B, whose outputs are not read.
    targets: LongTensor[B, T], the completion ids, padding included.
    mask: FloatTensor[B, T], 1 at completion tokens.
    """

    inputs: dict[str, Any]
    targets: Tensor
    mask: Tensor


@dataclass(frozen=True)
class TokenScores:
    """log_probs and entropy [B, T] in float32, zero where the batch's mask is zero."""

    log_probs: Tensor
    entropy: Tensor


def score_completions(
    model: nn.Module, batch: PaddedBatch, *, temperature: float, banned_ids: Sequence[int]
) -> TokenScores:
    """Scores the completion tokens of a batch under the distribution that the sampler used.

    Logits are divided by `temperature` (the sampler's; 0 means greedy and is scored at 1) and `banned_ids`, which
    the sampler may not draw, are masked before log_softmax.
    Differentiable; the float32 log-softmax is recomputed in the backward pass, chunk by chunk. Calls `model` itself,
    so wrappers (DDP, DeepSpeed) see one forward.
    """
    b, t = batch.targets.shape
    logits = model(**batch.inputs, use_cache=False, logits_to_keep=t + 1).logits[:b, :-1]  # position i predicts i + 1
    banned = torch.tensor(list(banned_ids), dtype=torch.long, device=logits.device)
    rows = max(1, CHUNK_TOKENS // t)
    parts = [
        checkpoint(
            _score_chunk,
            logits[i : i + rows],
            batch.targets[i : i + rows],
            temperature or 1.0,
            banned,
            use_reentrant=False,
        )
        for i in range(0, b, rows)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return TokenScores(log_probs * batch.mask, entropy * batch.mask)


def _score_chunk(logits: Tensor, targets: Tensor, temperature: float, banned: Tensor) -> tuple[Tensor, Tensor]:
    """[b, T, V] and [b, T] to log-probs [b, T] and entropy [b, T], float32."""
    scaled = (logits.float() / temperature).index_fill(-1, banned, torch.finfo(torch.float32).min)
    log_z = scaled.logsumexp(-1)
    log_probs = scaled.gather(-1, targets[..., None])[..., 0] - log_z
    with torch.no_grad():
        probs = (scaled - log_z[..., None]).exp()
        entropy = log_z - (probs * scaled).sum(-1)
    return log_probs, entropy
