"""Shared-prefix attention of a packed row: a prompt is seen by all completions of its group, a completion by itself.

Registered with transformers under the name ATTENTION, so that no model file is patched: a BlockMask (FlexAttention, on
CUDA) comes as the `attention_mask`, which transformers hands through; DocumentMasks (SDPA, anywhere else) come as the
keyword `documents`. A call with neither is transformers' own sdpa, so that generation and the plain padded form work
on the same model.

Shape legend: N packed tokens, n tokens of a document, R runs (a prompt, a completion, the padding), H heads, D head
size.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_vlm.model.packing import move

ATTENTION = "grpo_vlm_packed"
BLOCK = 128  # tokens along each side of a FlexAttention block
# FlexAttention's backward gives each key-value head and key block one program that walks all queries which see it.
# With few heads the prompt's programs are the tail of the kernel: below this count, keys and values are repeated to
# all heads first, which is exact. 0 never repeats.
REPEAT_KV_HEADS_BELOW = 8
FLEX_OPTIONS: dict[str, Any] | None = None  # kernel_options of FlexAttention, for benchmarks


@dataclass(frozen=True, eq=False)
class Runs:
    """A row cut at each change of document or segment; int64 [R] on the CPU.

    Token q of run r sees [prompt_start[r], prompt_end[r]) and [start[r], q]; a prompt's own prompt range is empty.
    """

    start: Tensor
    end: Tensor
    prompt_start: Tensor
    prompt_end: Tensor

    @classmethod
    def of(cls, document: Tensor, segment: Tensor) -> "Runs":
        """From [N] document numbers (-1 at padding) and segments (0 prompt, i + 1 completion i), prompts first."""
        document, segment = document.cpu(), segment.cpu()
        changes = (document[1:] != document[:-1]) | (segment[1:] != segment[:-1])
        start = torch.cat([torch.zeros(1, dtype=torch.long), changes.nonzero()[:, 0] + 1])
        end = torch.cat([start[1:], torch.tensor([len(document)])])
        is_prompt = segment[start] == 0
        prompt = torch.where(is_prompt, torch.arange(len(start)), 0).cummax(0).values
        assert bool((document[start[prompt]] == document[start]).all()), "a document must begin with its prompt"
        prompt_start = torch.where(is_prompt, 0, start[prompt])
        return cls(start, end, prompt_start, torch.where(is_prompt, 0, end[prompt]))

    def lengths(self) -> Tensor:
        return self.end - self.start


@dataclass(frozen=True, eq=False)
class DocumentMasks:
    """One additive mask [1, 1, n, n] (0 or -inf) per document of a row, in order; they cover the row."""

    lengths: tuple[int, ...]
    masks: tuple[Tensor, ...]

    @classmethod
    def of(cls, document: Tensor, segment: Tensor, device: torch.device | str = "cpu") -> "DocumentMasks":
        lengths = torch.unique_consecutive(document.cpu(), return_counts=True)[1].tolist()
        masks = []
        for part in segment.cpu().split(lengths):
            hidden = torch.full((len(part), len(part)), float("-inf")).triu_(1)
            hidden.masked_fill_((part[None] != 0) & (part[None] != part[:, None]), float("-inf"))
            masks.append(hidden[None, None].to(device, non_blocking=True))
        return cls(tuple(lengths), tuple(masks))


def attention_arguments(document: Tensor, segment: Tensor, device: torch.device | str) -> dict[str, Any]:
    """What the text model is given for a row's attention: a BlockMask on CUDA, DocumentMasks elsewhere."""
    if torch.device(device).type == "cuda":
        return {"attention_mask": block_mask(document, segment, device)}
    return {"documents": DocumentMasks.of(document, segment, device)}


def block_mask(document: Tensor, segment: Tensor, device: torch.device | str) -> BlockMask:
    """FlexAttention's mask of a row, worked out on the CPU from the row's runs; equal to `create_block_mask`'s,
    without its pass over N x N pairs and without waiting for the device.

    Visible pairs are counted per block: a block with all its pairs is full (the kernel does not mask it), one with
    some is partial.
    """
    runs = Runs.of(document, segment)
    n = len(document)
    counts = _visible_pairs(runs, n)
    full = counts == BLOCK * BLOCK
    partial = (counts > 0) & ~full
    blocks = (*_ordered(partial), *_ordered(full), *_ordered(partial.T), *_ordered(full.T))
    lengths = runs.lengths()
    per_token = (
        values.int().repeat_interleave(lengths) for values in (runs.start, runs.prompt_start, runs.prompt_end)
    )
    moved = [move(values, device) for values in (*blocks, *per_token)]
    kv_count, kv, full_kv_count, full_kv, q_count, q, full_q_count, full_q, own, first, last = moved

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return ((key >= own[query]) & (key <= query)) | ((key >= first[query]) & (key < last[query]))

    return BlockMask(
        seq_lengths=(n, n),
        kv_num_blocks=kv_count,
        kv_indices=kv,
        full_kv_num_blocks=full_kv_count,
        full_kv_indices=full_kv,
        q_num_blocks=q_count,
        q_indices=q,
        full_q_num_blocks=full_q_count,
        full_q_indices=full_q,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _visible_pairs(runs: Runs, n: int) -> Tensor:
    """[blocks, blocks] visible (query, key) pairs of each block, from the overlaps of runs with blocks. Exact."""
    edges = torch.arange(0, n + BLOCK, BLOCK)[: -(-n // BLOCK) + 1]

    def overlaps(start: Tensor, end: Tensor) -> Tensor:  # [R, blocks] tokens of [start, end) in each block
        left = torch.maximum(start[:, None], edges[None, :-1])
        right = torch.minimum(end[:, None], edges[None, 1:])
        return (right - left).clamp(min=0)

    own = overlaps(runs.start, runs.end)
    prompt = overlaps(runs.prompt_start, runs.prompt_end)
    triangles = (own * (own + 1) // 2).sum(0).diag()  # a run's pairs within one block
    pairs = own.double().T @ torch.cat([own, prompt], dim=1).double()  # far below 2**53: exact
    within, to_prompt = pairs.long().chunk(2, dim=1)
    return within.tril(-1) + triangles + to_prompt


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [rows, columns] to BlockMask's int32 counts [1, 1, rows] and column numbers [1, 1, rows, columns]."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None].contiguous()


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    documents: DocumentMasks | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, H or fewer, N, D] to [1, N, H, D]."""
    if isinstance(attention_mask, BlockMask):
        return _flex(query, key, value, attention_mask, scaling), None
    if documents is not None:
        return _by_document(query, key, value, documents, scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float | None) -> Tensor:
    heads, kv_heads = query.shape[1], key.shape[1]
    if kv_heads < min(heads, REPEAT_KV_HEADS_BELOW):
        key, value = (_repeat(states, heads // kv_heads) for states in (key, value))
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast the rotation left them in float32
    # inside a compiled layer it is part of that graph; FlexAttention cannot run compiled on a CPU with gradients
    attend = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
    states = attend(
        query,
        key,
        value,
        block_mask=mask,
        scale=scaling,
        enable_gqa=key.shape[1] != heads,
        kernel_options=FLEX_OPTIONS,
    )
    return states.transpose(1, 2).contiguous()


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def _by_document(query: Tensor, key: Tensor, value: Tensor, documents: DocumentMasks, scaling: float | None) -> Tensor:
    """Documents do not see each other, so each takes an SDPA call of its own: n^2 pairs each instead of N^2."""
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = _repeat(key, repeats), _repeat(value, repeats)
    parts = (states.split(documents.lengths, dim=2) for states in (query, key, value))
    outputs = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype), scale=scaling).transpose(1, 2)
        for q, k, v, mask in zip(*parts, documents.masks, strict=True)
    ]
    return torch.cat(outputs, dim=1)


def _repeat(states: Tensor, times: int) -> Tensor:
    """[1, K, N, D] to [1, K * times, N, D], each head `times` in a row."""
    batch, heads, n, size = states.shape
    return states[:, :, None].expand(batch, heads, times, n, size).reshape(batch, heads * times, n, size)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
