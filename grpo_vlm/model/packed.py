"""The packed forward: `model(packed=row)` scores a row of prompts with their completions through the model's own call.

`enable_packing` gives a model a forward that takes `packed=` beside everything it took before, so that the wrappers
around it (DDP, DeepSpeed, FSDP, PEFT, autocast) see an ordinary call, and generation and the plain padded form go on
working.

Shape legend: N packed tokens, P prompt tokens, S scored tokens, K placeholder tokens, F vision features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.attention import ATTENTION, attention_arguments
from grpo_vlm.model.logprobs import Outlook, ScoringHead, divergence, score_tokens
from grpo_vlm.model.packing import IMAGE, VIDEO, Media, PackedRow
from grpo_vlm.model.positions import OWN_FAMILIES, video_positions
from grpo_vlm.model.vision import VISION_ATTENTION, FeatureCache, VisionPlan, encode, pad_mlp_width

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model types whose parts this file calls by name


class RowScores(NamedTuple):
    """log_probs and entropy [S] of a row's targets, float32, both differentiable. (A named tuple, because the hooks of
    DeepSpeed and FSDP look for tensors in tuples.)"""

    log_probs: Tensor
    entropy: Tensor


class ComparedScores(NamedTuple):
    """RowScores with the divergence [S] from a reference, likewise."""

    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor


@dataclass(frozen=True, eq=False)
class PreparedRow:
    """A row on the model's device with what its forward needs, worked out on the CPU; made once, scored many times.

    attention: keyword arguments of the text model. vision: of all media of the row. positions [K] and features [K]:
    as in MediaBatch, over the batches of the row together.
    """

    row: PackedRow
    attention: dict[str, Any]
    vision: VisionPlan | None
    positions: Tensor | None
    features: Tensor | None


# ---------------------------------------------------------------- which models


def form(config: PretrainedConfig) -> tuple[str, str]:
    """("packed", "") for a model that `enable_packing` takes, else ("plain", the reason)."""
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        return "plain", f"the packed form knows {known}; {config.model_type} is scored one padded row per sample"
    text = config.get_text_config()
    if "sliding_attention" in (text.to_dict().get("layer_types") or ()):
        return "plain", "the packed form has no sliding-window attention, which this model's text layers use"
    if text.attention_dropout:
        return "plain", f"the packed form has no attention dropout, and attention_dropout is {text.attention_dropout}"
    return "packed", ""


def enable_packing(model: nn.Module) -> None:
    """Makes `model(packed=row, temperature=..., banned_ids=..., features=...)` return RowScores, in place.

    packed: a PackedRow (on the CPU: it is prepared here) or a PreparedRow. temperature, banned_ids and reference as in
    `score_completions`; with a reference the call returns ComparedScores, with `states_only` the hidden states [S, H]
    that predict the targets. features: a FeatureCache, for a frozen tower. Every other call is the model's own.
    The model keeps its class name and configuration, so that checkpoints do not know of it; a deep copy keeps the
    packed forward. Raises ValueError where `form` says "plain".
    """
    base = base_model(model)
    kind, reason = form(base.config)
    if kind != "packed":
        raise ValueError(f"{type(base).__name__} cannot be packed: {reason}")
    if not isinstance(base, _Packed):
        base.__class__ = _packed_class(type(base))
    if type(base.lm_head) is nn.Linear and base.lm_head.bias is None:
        base.lm_head.__class__ = ScoringHead
    base.model.language_model.config._attn_implementation = ATTENTION
    base.model.visual.config._attn_implementation = VISION_ATTENTION


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside PEFT's."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


class _Packed:
    """Marks the classes that `_packed_class` makes."""


@cache
def _packed_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """A subclass of the same name (save_pretrained writes it) whose forward also takes `packed`."""

    @wraps(base.forward)
    def forward(
        self: PreTrainedModel,
        *args: Any,
        packed: PackedRow | PreparedRow | None = None,
        temperature: float = 1.0,
        banned_ids: Sequence[int] = (),
        features: FeatureCache | None = None,
        reference: Outlook | None = None,
        states_only: bool = False,
        **kwargs: Any,
    ) -> Any:
        if packed is None:
            return base.forward(self, *args, **kwargs)
        if isinstance(packed, PackedRow):
            packed = prepare(packed, self.config, self.device)
        states = _states(self, packed, features)
        return states if states_only else _score(self, packed.row, states, temperature, banned_ids, reference)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Packed, base), {"forward": forward, **names})


# ---------------------------------------------------------------- one row


def prepare(
    row: PackedRow, config: PretrainedConfig, device: torch.device | str, dtype: torch.dtype | None = None
) -> PreparedRow:
    """Works out masks and the vision tower's indices on the CPU and sends the row to `device` without waiting; pixels
    in `dtype`. config: the model's."""
    attention = attention_arguments(row.document, row.segment, device)
    vision = None
    features, first = [], 0
    if row.media:
        grid = torch.cat([batch.grid for batch in row.media])
        vision = VisionPlan.of(config.vision_config, grid, device)
    row = row.to(device, dtype)
    for batch in row.media:
        features.append(batch.features + first)
        first += int(batch.grid.prod(-1).sum()) // config.vision_config.spatial_merge_size**2
    return PreparedRow(
        row=row,
        attention=attention,
        vision=vision,
        positions=torch.cat([batch.positions for batch in row.media]) if features else None,
        features=torch.cat(features) if features else None,
    )


def _states(model: PreTrainedModel, packed: PreparedRow, cache: FeatureCache | None) -> Tensor:
    """[S, H], what the head makes the targets' distributions of."""
    row, inner = packed.row, model.model
    embeddings = inner.get_input_embeddings()(row.ids[None])
    arguments = packed.attention
    if row.media:
        encoded = encode(inner.visual, row.media, packed.vision, cache)
        placed = (layer.index_select(0, packed.features).to(embeddings.dtype)[None] for layer in encoded.flat())
        merged, *deepstack = placed
        if deepstack:
            # The text model adds these at the positions of a bool mask, and finding those would wait for the device.
            # An index of the whole row with zeros elsewhere adds the same.
            blank = torch.zeros_like(embeddings)
            layers = [blank.index_copy(1, packed.positions, layer) for layer in deepstack]
            whole = torch.zeros(1, dtype=torch.long, device=embeddings.device)
            arguments = arguments | {"visual_pos_masks": whole, "deepstack_visual_embeds": layers}
        embeddings = embeddings.index_copy(1, packed.positions, merged)
    states = inner.language_model(
        inputs_embeds=embeddings, position_ids=row.position_ids[:, None], use_cache=False, **arguments
    ).last_hidden_state[0]
    return states.index_select(0, row.predicted)


def _score(
    model: PreTrainedModel,
    row: PackedRow,
    states: Tensor,
    temperature: float,
    banned_ids: Sequence[int],
    reference: Outlook | None,
) -> RowScores | ComparedScores:
    options = {"temperature": temperature, "banned_ids": banned_ids}
    scores = score_tokens(states, model.lm_head, row.targets, **options)
    if reference is None:
        return RowScores(*scores)
    return ComparedScores(*scores, divergence(Outlook(states, model.lm_head), reference, **options))


def plain_head(model: nn.Module) -> nn.Module:
    """The head of a model, without an adapter of its own."""
    head = base_model(model).lm_head
    return head.get_base_layer() if isinstance(head, BaseTunerLayer) else head


# ---------------------------------------------------------------- prompts


def prompt_positions(
    model: nn.Module,
    prompt_ids: Sequence[int],
    *,
    image_grids: Tensor | None = None,
    video_grids: Tensor | None = None,
    seconds_per_grid: Sequence[float] | None = None,
) -> Tensor:
    """int64 [3, P], the prompt's M-RoPE positions on the CPU: as the model's own `get_rope_index` makes them, but for
    videos of the families that positions.py knows better.

    image_grids, video_grids: int64 [items, 3]. seconds_per_grid: time between a video's grid steps (Qwen2.5-VL).
    """
    base = base_model(model)
    ids = torch.as_tensor(prompt_ids, dtype=torch.long)
    if image_grids is None and video_grids is None:
        return torch.arange(len(ids)).repeat(3, 1)
    if video_grids is not None and base.config.model_type in OWN_FAMILIES:
        return video_positions(
            base.config,
            ids.tolist(),
            image_grids=image_grids,
            video_grids=video_grids,
            seconds_per_grid=seconds_per_grid,
        )
    types = (ids == base.config.image_token_id).int() + 2 * (ids == base.config.video_token_id).int()
    positions, _ = base.model.get_rope_index(
        ids[None], mm_token_type_ids=types[None], image_grid_thw=image_grids, video_grid_thw=video_grids
    )
    return positions[:, 0]


def positions_of(model: nn.Module, prompt: Prompt) -> Tensor:
    """int64 [3, P], the prompt's M-RoPE positions."""
    return prompt_positions(
        model,
        prompt.token_ids,
        image_grids=prompt.image_grid_thw,
        video_grids=prompt.video_grid_thw,
        seconds_per_grid=[clip.seconds_per_grid for clip in prompt.videos],
    )


def media_positions(config: PretrainedConfig, prompt_ids: Sequence[int], media: Sequence[Media]) -> tuple[Tensor, ...]:
    """For each of `media`, in reading order, int64 prompt positions of its placeholders.

    Raises ValueError when the prompt has more or fewer placeholders than the media make features.
    """
    ids = torch.as_tensor(prompt_ids, dtype=torch.long)
    tokens = {IMAGE: config.image_token_id, VIDEO: config.video_token_id}
    places = {}
    for kind, token in tokens.items():
        found = (ids == token).nonzero()[:, 0]
        sizes = [item.features for item in media if item.kind == kind]
        if len(found) != sum(sizes):
            raise ValueError(
                f"the prompt has {len(found)} {kind} placeholders (token {token}) for {sum(sizes)} features of its"
                f" {len(sizes)} {kind}s; expand it at the size that the {kind}s were processed at"
            )
        places[kind] = iter(found.split(sizes))
    return tuple(next(places[item.kind]) for item in media)


# ---------------------------------------------------------------- compilation


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Compiles every text layer and vision block in place and widens the vision MLP where that helps; for CUDA and
    weights that no rank shards. options: of torch.compile.

    Row lengths differ, so shapes are dynamic from the second one on; dynamo's limits are raised for the handful of
    variants (with and without gradients, windows and full frames, text layers with and without images).
    """
    inner = base_model(model).model
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    torch._dynamo.config.accumulated_recompile_limit = max(torch._dynamo.config.accumulated_recompile_limit, 1024)
    pad_mlp_width(inner.visual)
    for layer in (*inner.language_model.layers, *inner.visual.blocks):
        layer.compile(**options)
