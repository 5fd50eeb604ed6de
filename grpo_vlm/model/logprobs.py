"""Per-token log-probs and entropy of completions under the distribution that the sampler used.

`score_tokens` is the head of the packed form: hidden states in, scores out, logits never held for more than a chunk;
`divergence` likewise gives the KL over the whole vocabulary from another model.
`score_completions` is the plain padded form, one row per sample: the reference that the packed form is tested against
and the fallback for a model that it does not know.

Shape legend: S scored tokens, H hidden size, V vocabulary, B samples, L padded prompt + completion, T padded
completion.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from grpo_vlm.algorithms import kl

CHUNK_TOKENS = 2048  # tokens whose logits exist at one time: 0.6 GB in bfloat16 with Qwen's vocabulary
CHUNK_ROWS = 32768  # rows of the weight's gradient that a chunk adds to at one time: 0.3 GB
CPU_CHUNK_LOGITS = 2**20  # logits at one time on a CPU: they stay in its caches
FULL_CHUNK_TOKENS = 256  # tokens of which both models' distributions exist at one time: 1 GB in float32
PADDED_CHUNK_TOKENS = 1024  # the same for the float32 copy that the padded form makes: 0.6 GB
MASKED = -6e4  # logit of a banned token: its exp is zero, and every dtype holds it


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
    """log_probs, entropy and divergence [B, T] in float32, zero where the batch's mask is zero; no divergence (None)
    where no reference was given."""

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Outlook:
    """What a model's next-token distributions at the scored tokens are made of: head(states [S, H]) are the logits
    [S, V]. Constants: nothing is differentiated in them."""

    states: Tensor
    head: nn.Module


def outlook_of_completions(model: nn.Module, batch: PaddedBatch) -> Outlook:
    """Of the S = B x T completion tokens of a padded batch, padding included."""
    return Outlook(_logits(model, batch).flatten(0, 1), nn.Identity())


def _logits(model: nn.Module, batch: PaddedBatch) -> Tensor:
    """[B, T, V]; position i predicts i + 1."""
    b, t = batch.targets.shape
    return model(**batch.inputs, use_cache=False, logits_to_keep=t + 1).logits[:b, :-1]


def score_completions(
    model: nn.Module,
    batch: PaddedBatch,
    *,
    temperature: float,
    banned_ids: Sequence[int],
    reference: Outlook | None = None,
) -> TokenScores:
    """Scores the completion tokens of a padded batch. reference: of another model on the same batch.

    Logits are divided by `temperature` (the sampler's; 0 means greedy and is scored at 1) and `banned_ids`, which
    the sampler may not draw, are masked before log_softmax.
    Differentiable; the float32 log-softmax is recomputed in the backward pass, chunk by chunk. Calls `model` itself,
    so wrappers (DDP, DeepSpeed) see one forward.
    """
    b, t = batch.targets.shape
    logits = _logits(model, batch)
    banned = index_of(banned_ids, logits.device)
    rows = max(1, PADDED_CHUNK_TOKENS // max(t, 1))
    parts = [
        checkpoint(
            _masked_scores,
            logits[i : i + rows].flatten(0, 1),
            batch.targets[i : i + rows].flatten(),
            banned,
            1 / (temperature or 1.0),
            use_reentrant=False,
        )
        for i in range(0, b, rows)
    ]
    log_probs, entropy = (torch.cat(column).view(b, t) for column in zip(*parts, strict=True))
    apart = None
    if reference is not None:
        own = Outlook(logits.flatten(0, 1), nn.Identity())
        apart = divergence(own, reference, temperature=temperature, banned_ids=banned_ids).view(b, t) * batch.mask
    return TokenScores(log_probs * batch.mask, entropy * batch.mask, apart)


def divergence(
    policy: Outlook,
    reference: Outlook,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    chunk_tokens: int = FULL_CHUNK_TOKENS,
) -> Tensor:
    """KL(policy || reference) [S] over the whole vocabulary, float32 or better, of two models on the same tokens;
    differentiable in the policy's states and head. `temperature` and `banned_ids` as in `score_completions`."""
    states = policy.states
    banned, inverse = index_of(banned_ids, states.device), 1 / (temperature or 1.0)

    def logits(of: Outlook, part: slice) -> Tensor:
        made = of.head(of.states[part])
        return made.to(_accumulation(made.dtype)).index_fill(1, banned, MASKED) * inverse

    return kl.full_in_chunks(partial(logits, policy), partial(logits, reference), len(states), chunk_tokens)


def score_tokens(
    hidden: Tensor,
    head: nn.Module,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    banned_ids: Sequence[int] = (),
    chunk_tokens: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [S], float32, of `targets` [S] after the hidden states [S, H]; both differentiable.

    A plain linear head goes through `ChunkedHead`, called as a module where it is a `ScoringHead`. Any other (one with
    a LoRA adapter) is called once per chunk, under checkpointing. `temperature` and `banned_ids` as in
    `score_completions`.
    """
    kind = hidden.device.type
    if chunk_tokens is None:
        in_cache = max(1, CPU_CHUNK_LOGITS // head.out_features)
        chunk_tokens = min(CHUNK_TOKENS, in_cache) if kind == "cpu" else CHUNK_TOKENS
    inverse = 1 / (temperature or 1.0)
    banned = index_of(banned_ids, hidden.device)
    if isinstance(head, ScoringHead):
        return head(hidden, scoring=(targets, banned, inverse, chunk_tokens))
    if type(head) is nn.Linear and head.bias is None:
        return _chunked(hidden, head.weight, targets, banned, inverse, chunk_tokens)
    parts = [
        checkpoint(
            lambda states, ids: _masked_scores(head(states), ids, banned, inverse),
            hidden[part],
            targets[part],
            use_reentrant=False,
        )
        for part in _chunks(len(targets), chunk_tokens)
    ]
    log_probs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_probs, entropy


def _chunked(
    hidden: Tensor, weight: Tensor, targets: Tensor, banned: Tensor, inverse_temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return ChunkedHead.apply(hidden, weight, targets, banned, inverse_temperature, chunk_tokens, dtype)


class ScoringHead(nn.Linear):
    """A head without bias that can also score, within one call: FSDP gathers a module's weight when it is called and
    divides it again afterwards, and knows nothing of a weight that is used without a call."""

    def forward(self, hidden: Tensor, scoring: tuple[Tensor, Tensor, float, int] | None = None) -> Any:
        """Logits; with `scoring` (targets, banned, inverse temperature, tokens of a chunk) log-probs and entropy."""
        return super().forward(hidden) if scoring is None else _chunked(hidden, self.weight, *scoring)


class ChunkedHead(torch.autograd.Function):
    """hidden [S, H], weight [V, H] -> log-probs [S], entropy [S]; logits of `chunk_tokens` tokens at a time, made
    again in the backward pass. The products are computed in `dtype`, the weight's gradient is summed in float32.

    With x = logits / temperature, p = softmax(x): d log p_t / dx = onehot_t - p, dEntropy / dx = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        banned: Tensor,
        inverse_temperature: float,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        scores = _compiled(_scores) if hidden.is_cuda else _scores
        out = torch.empty(2, len(targets), dtype=_accumulation(dtype), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            for part in _chunks(len(targets), chunk_tokens):
                logits = (hidden[part].to(dtype) @ head.t()).index_fill_(1, banned, MASKED)
                out[0, part], out[1, part] = scores(logits, targets[part], inverse_temperature)
                del logits  # before the next chunk's are made
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, banned, out)
        ctx.settings = inverse_temperature, chunk_tokens, dtype
        return out[0].clone(), out[1].clone()

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, banned, out = ctx.saved_tensors
        inverse_temperature, chunk_tokens, dtype = ctx.settings
        slope = _compiled(_slope) if hidden.is_cuda else _slope
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(len(targets), dtype=_accumulation(dtype), device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=_accumulation(dtype), device=weight.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = weight.to(dtype)
            for part in _chunks(len(targets), chunk_tokens):
                states = hidden[part].to(dtype)
                logits = (states @ head.t()).index_fill_(1, banned, MASKED)
                grads = grad_log_probs[part], None if grad_entropy is None else grad_entropy[part]
                grad_logits, at_target = slope(logits, *out[:, part], *grads, inverse_temperature)
                grad_logits.scatter_(1, targets[part][:, None], at_target[:, None])
                grad_logits.index_fill_(1, banned, 0.0)  # a banned target's logit is a constant
                del logits
                grad_hidden[part] = grad_logits @ head
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits.t(), states)
                del grad_logits
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


def index_of(ids: Sequence[int], device: torch.device) -> Tensor:
    """int64 ids on `device`; the same tensor for the same ids, so that a device is waited for once."""
    return _index_of(tuple(ids), device)


@lru_cache(maxsize=16)
def _index_of(ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=device)


def _chunks(count: int, size: int) -> Iterator[slice]:
    """Slices of at most `size`, about equally long, so that compiled code does not meet a last one of a single token;
    one empty slice where there is nothing, so that the head always runs."""
    size = max(1, -(-count // max(1, -(-count // size))))
    return (slice(first, min(first + size, count)) for first in range(0, max(count, 1), size))


def _accumulation(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _masked_scores(
    logits: Tensor, targets: Tensor, banned: Tensor, inverse_temperature: float
) -> tuple[Tensor, Tensor]:
    return _scores(logits.index_fill(1, banned, MASKED), targets, inverse_temperature)


def _scores(logits: Tensor, targets: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor]:
    """[s, V] and [s] to log-probs and entropy [s]."""
    log_p = _log_softmax(logits, inverse_temperature)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _slope(
    logits: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
    inverse_temperature: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of the logits [s, V], in their dtype, from the scores [s] and their gradients; and what belongs at
    the target of each row instead [s]: written in afterwards, which spares a one-hot matrix."""
    log_p = _log_softmax(logits, inverse_temperature)
    factor = -grad_log_probs[:, None]
    if grad_entropy is not None:
        factor = factor - grad_entropy[:, None] * (log_p + entropy[:, None])
        at_target = grad_log_probs - log_probs.exp() * (grad_log_probs + grad_entropy * (log_probs + entropy))
    else:
        at_target = grad_log_probs * -log_probs.expm1()
    slope = log_p.exp() * (factor * inverse_temperature)
    return slope.to(logits.dtype), (at_target * inverse_temperature).to(logits.dtype)


def _log_softmax(logits: Tensor, inverse_temperature: float) -> Tensor:
    logits = logits.to(_accumulation(logits.dtype))
    return (logits if inverse_temperature == 1 else logits * inverse_temperature).log_softmax(-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in total's dtype; the product itself too where the device can."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        for rows in _chunks(len(total), CHUNK_ROWS):
            total[rows] += torch.mm(left[rows], right, out_dtype=total.dtype)
    else:
        total += left @ right
