"""The vision tower of a packed row: each distinct image and video once, all of them in one pass.

Attention within frames and windows is one call for all of them: torch's varlen kernel on CUDA, batches of equally long
segments elsewhere. Whatever depends on the pictures' sizes is worked out on the CPU beforehand (VisionPlan), so that
the tower never waits for the device. transformers hands segment bounds over, instead of looping over windows, to any
attention function whose name contains "flash".

Shape legend: M distinct images or videos, N patches, F merged features, H heads, D head size, W segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PretrainedConfig
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from grpo_vlm.model.packing import MediaBatch, move

VISION_ATTENTION = "grpo_vlm_flash_varlen"
MLP_MULTIPLE = 64  # an MLP width that is no multiple of 8 makes cuBLAS take kernels of an older architecture


# ---------------------------------------------------------------- attention


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive runs of patches that attend within themselves.

    bounds: int32 [W + 1], the first patch of each run and the end. longest: patches of the longest.
    sizes: (count, length) of the runs by length. order: int64 [N], the patches arranged that way, and back; None where
    all runs have one length.
    """

    bounds: Tensor
    longest: int
    sizes: tuple[tuple[int, int], ...]
    order: Tensor | None
    back: Tensor | None

    @classmethod
    def of(cls, bounds: Tensor) -> "Segments":
        lengths = (bounds[1:] - bounds[:-1]).long()
        distinct, counts = lengths.unique(return_counts=True)
        sizes = tuple(zip(counts.tolist(), distinct.tolist(), strict=True))
        if len(sizes) == 1:
            return cls(bounds, int(distinct[-1]), sizes, None, None)
        order = lengths.repeat_interleave(lengths).argsort(stable=True)
        return cls(bounds, int(distinct[-1]), sizes, order, order.argsort())

    def moved(self, bounds: Tensor, device: torch.device | str) -> "Segments":
        """The same segments on `device`, where `bounds` are already."""
        if self.order is None:
            return replace(self, bounds=bounds)
        return replace(self, bounds=bounds, order=move(self.order, device), back=move(self.back, device))


def vision_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    segments: Sequence[Segments] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query, key, value [1, H, N, D] to [1, N, H, D]; patches attend within the
    bounds `cu_seq_lens_q` [W + 1]. segments: what is known of such bounds already."""
    states = tuple(part[0].transpose(0, 1) for part in (query, key, value))
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        query, key, value = (part.contiguous() for part in states)
        bounds = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
        return varlen_attn(query, key, value, *bounds, scale=scaling)[None], None
    known = (part for part in segments if part.bounds is cu_seq_lens_q)
    return _by_length(*states, next(known, None) or Segments.of(cu_seq_lens_q), scaling)[None], None


def _by_length(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scaling: float | None) -> Tensor:
    """[N, H, D] each: one SDPA call per distinct segment length."""
    states = (query, key, value)
    if segments.order is not None:
        states = tuple(part.index_select(0, segments.order) for part in states)
    splits = [part.split([count * length for count, length in segments.sizes]) for part in states]
    outputs = []
    for (count, length), *parts in zip(segments.sizes, *splits, strict=True):
        batch = (part.unflatten(0, (count, length)).transpose(1, 2) for part in parts)
        outputs.append(F.scaled_dot_product_attention(*batch, scale=scaling).transpose(1, 2).flatten(0, 1))
    together = torch.cat(outputs)
    return together if segments.back is None else together.index_select(0, segments.back)


# ---------------------------------------------------------------- the tower


@dataclass(frozen=True, eq=False)
class VisionPlan:
    """What the tower needs to know of M pictures, as keyword arguments of its forward."""

    grid: Tensor
    arguments: dict[str, Any]

    @classmethod
    def of(cls, config: PretrainedConfig, grid: Tensor, device: torch.device | str) -> "VisionPlan":
        """config: the vision configuration; grid: int64 [M, 3] on the CPU."""
        merge = config.spatial_merge_size
        frames = Segments.of(get_vision_cu_seqlens(grid))
        segments = [frames]
        tensors = {"position_ids": get_vision_position_ids(grid, merge), "cu_seqlens": frames.bounds}
        lengths = {"max_seqlen": frames.longest}
        if config.model_type.startswith("qwen2_5_vl"):
            index, bounds = get_vision_window_index(grid, merge, config.window_size, config.patch_size)
            segments.append(Segments.of(bounds))
            tensors |= {"window_index": index, "cu_window_seqlens": bounds}
            lengths |= {"max_window_seqlen": segments[-1].longest}
        if config.model_type.startswith("qwen3_vl"):
            side = int(config.num_position_embeddings**0.5)
            tensors["interp_indices"], tensors["interp_weights"] = get_vision_interpolation_indices_and_weights(
                grid, side, align_corners=True, spatial_merge_size=merge
            )
        arguments = lengths | {name: move(values, device) for name, values in tensors.items()}
        if torch.device(device).type != "cuda":
            names = ("cu_seqlens", "cu_window_seqlens")[: len(segments)]
            arguments["segments"] = tuple(
                part.moved(arguments[name], device) for name, part in zip(names, segments, strict=True)
            )
        return cls(grid, arguments)


class Features(NamedTuple):
    """merged: [F, text hidden size], one per placeholder. deepstack: the same for each of Qwen3-VL's first layers."""

    merged: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def flat(self) -> tuple[Tensor, ...]:
        return (self.merged, *self.deepstack)


class FeatureCache:
    """The features of a frozen tower, kept for one rollout batch: its old, reference and update passes reuse them.

    Only for a tower without trainable parameters that no rank shards: ranks differ in what they have cached, and a
    sharded tower must run on all of them.
    """

    def __init__(self) -> None:
        self._features: dict[tuple[str, str], Features] = {}

    def __len__(self) -> int:
        return len(self._features)

    def missing(self, items: Sequence[tuple[str, str]]) -> list[int]:
        """Numbers of the (kind, key) items that are not here."""
        return [number for number, item in enumerate(items) if item not in self._features]

    def put(self, item: tuple[str, str], features: Features) -> None:
        self._features[item] = features

    def get(self, items: Sequence[tuple[str, str]]) -> Features:
        parts = [self._features[item] for item in items]
        deepstack = zip(*(part.deepstack for part in parts), strict=True)
        return Features(torch.cat([part.merged for part in parts]), tuple(torch.cat(layer) for layer in deepstack))


def encode(
    tower: nn.Module, media: Sequence[MediaBatch], plan: VisionPlan | None = None, cache: FeatureCache | None = None
) -> Features:
    """Features of all items of `media`, batch after batch, in one pass of the tower; with a cache, of the items that
    it lacks. plan: of all items together, made here when None.

    Raises ValueError for a cache with a trainable tower.
    """
    frozen = not any(parameter.requires_grad for parameter in tower.parameters())
    if cache is None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            return _run(tower, torch.cat([batch.pixels for batch in media]), _grids(media), plan)
    if not frozen:
        raise ValueError("a FeatureCache holds features of a frozen vision tower, and this one trains; pass no cache")
    items = [(batch.kind, key) for batch in media for key in batch.keys]
    missing = cache.missing(items)
    if missing:
        grids = _grids(media)
        pixels = [part for batch in media for part in batch.pixels.split(batch.grid.prod(-1).tolist())]
        with torch.no_grad():
            made = _run(tower, torch.cat([pixels[number] for number in missing]), grids[missing], None)
        sizes = (grids[missing].prod(-1) // tower.spatial_merge_size**2).tolist()
        parts = zip(*(layer.split(sizes) for layer in made.flat()), strict=True)
        for number, (merged, *deepstack) in zip(missing, parts, strict=True):
            cache.put(items[number], Features(merged, tuple(deepstack)))
    return cache.get(items)


def _run(tower: nn.Module, pixels: Tensor, grid: Tensor, plan: VisionPlan | None) -> Features:
    if plan is None:
        plan = VisionPlan.of(tower.config, grid, pixels.device)
    output = tower(pixels.to(tower.dtype), grid_thw=grid, return_dict=True, **plan.arguments)
    return Features(output.pooler_output, tuple(output.get("deepstack_features") or ()))


def _grids(media: Sequence[MediaBatch]) -> Tensor:
    return torch.cat([batch.grid for batch in media])


# ---------------------------------------------------------------- MLP width


def pad_mlp_width(tower: nn.Module) -> int:
    """Makes gated MLPs of a width that is no multiple of 8 (Qwen2.5-VL: 3420) compute at a multiple of MLP_MULTIPLE.

    The weights are padded with zeros in each forward, which is exact; parameters and checkpoints keep their shapes.
    For unsharded weights without adapters. Returns how many MLPs it changed.
    """
    changed = 0
    for block in tower.blocks:
        layers = dict(block.mlp.named_children())
        gated = all(type(layers.get(name)) is nn.Linear for name in ("gate_proj", "up_proj", "down_proj"))
        if gated and layers["down_proj"].in_features % 8:
            block.mlp.forward = MethodType(_padded_mlp, block.mlp)
            changed += 1
    return changed


def _padded_mlp(mlp: nn.Module, states: Tensor) -> Tensor:
    extra = -mlp.down_proj.in_features % MLP_MULTIPLE

    def wider(linear: nn.Linear) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias, (0, extra))
        return F.linear(states, F.pad(linear.weight, (0, 0, 0, extra)), bias)

    product = mlp.act_fn(wider(mlp.gate_proj)) * wider(mlp.up_proj)
    return F.linear(product, F.pad(mlp.down_proj.weight, (0, extra)), mlp.down_proj.bias)


AttentionInterface.register(VISION_ATTENTION, vision_attention)
