"""The forms in which a model scores completions: packed rows (each prompt and each picture once per group), or the
plain padded batch of one row per sample, for families that the packed form does not know and for comparison.

Both cut the samples of one optimizer update into rows, a row being what one forward and backward pass takes, and
score a row. Old, reference and current log-probs are computed on the same rows.

Shape legend: B samples of the update, b samples of a row, t longest completion of the row, S scored tokens of the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_vlm.config import Config
from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.cost import Mode, ModelShape, row_bytes, row_seconds
from grpo_vlm.model.load import vision_tower
from grpo_vlm.model.logprobs import Outlook, PaddedBatch, outlook_of_completions, score_completions
from grpo_vlm.model.packed import form, media_positions, plain_head, positions_of, prepare
from grpo_vlm.model.packing import (
    IMAGE,
    VIDEO,
    Load,
    Media,
    PackedRow,
    PackGroup,
    blank_group,
    build_row,
    load_of,
    pack,
)
from grpo_vlm.model.vision import FeatureCache
from grpo_vlm.training.batch import Group, Padding, RolloutBatch, on_device, pad

ROW_MULTIPLE = 128  # block of the shared-prefix attention on an accelerator


@dataclass(frozen=True)
class Scores:
    """Log-probs and entropy [b, t] in float32 of the samples [b] of a row (numbers in the update), zero outside
    `mask`; with a reference the divergence from it as well."""

    samples: Tensor
    mask: Tensor
    log_probs: Tensor
    entropy: Tensor
    divergence: Tensor | None = None


@dataclass(frozen=True)
class Work:
    """What rows ask of the device: tokens in them, tokens computed (padding included), and the predicted bytes of the
    largest beyond weights, gradients and optimizer states; None where there is no prediction."""

    tokens: int
    processed: int
    largest_bytes: float | None


class Scorer(Protocol):
    """One of the two forms. compiles: whether its forward gains from compiled layers."""

    compiles: bool

    def forget(self) -> None:
        """Drops what it keeps between the passes over one rollout batch."""

    def seconds(self, group: Group) -> float:
        """Predicted time of a group's forward and backward pass."""

    def rows(self, batch: RolloutBatch, groups: Sequence[int]) -> list[Any]:
        """The rows of the groups with these numbers, on the CPU."""

    def work(self, rows: Sequence[Any]) -> Work:
        """What these rows ask of the device."""

    def blank(self) -> Any:
        """A row without samples that runs every module, for a rank with fewer rows than the others."""

    def score(self, model: nn.Module, row: Any, reference: Outlook | None = None) -> Scores:
        """One forward pass through `model` itself, so that its wrappers (DDP, DeepSpeed, FSDP) see it. reference:
        another model's `outlook` of the row."""

    def outlook(self, model: nn.Module, row: Any) -> Outlook:
        """The next-token distributions of `model` at the row's completion tokens; one forward pass."""


def make_scorer(
    config: Config, model: PreTrainedModel, *, banned_ids: Sequence[int], padding: Padding, sharded: bool
) -> Scorer:
    """The packed form, or the plain one where `worker.actor.padding_free` is false or the model's family needs it.
    sharded: whether ranks hold parts of the weights, so that all of them must run every module."""
    if config.worker.actor.padding_free and form(model.config)[0] == "packed":
        return PackedScorer(config, model, banned_ids=banned_ids, padding=padding, sharded=sharded)
    padding = replace(padding, video_id=model.config.video_token_id, positions=partial(positions_of, model))
    return PlainScorer(config, banned_ids=banned_ids, padding=padding)


def row_tokens(config: Config) -> int:
    """The token budget of a row: `max_token_len_per_gpu`, else what the micro-batch of padded samples would hold."""
    actor, data = config.worker.actor, config.data
    longest = data.max_prompt_length + data.max_response_length
    return actor.max_token_len_per_gpu or actor.micro_batch_size_per_device_for_update * longest


class PackedScorer:
    """Rows filled with whole groups up to a token budget."""

    compiles = True

    def __init__(
        self,
        config: Config,
        model: PreTrainedModel,
        *,
        banned_ids: Sequence[int],
        padding: Padding,
        sharded: bool = False,
    ):
        self.model, self.padding, self.banned_ids = model, padding, list(banned_ids)
        self.temperature = config.worker.rollout.temperature
        self.max_tokens = row_tokens(config)
        actor = config.worker.actor
        self.max_samples = None if actor.dynamic_batching else actor.micro_batch_size_per_device_for_update
        self.multiple = 1 if padding.device.type == "cpu" else ROW_MULTIPLE
        frozen = not any(parameter.requires_grad for parameter in vision_tower(model).parameters())
        vision = "forward" if frozen else "train"
        checkpointing = actor.model.enable_gradient_checkpointing
        self.mode = Mode(vision=vision, adapters=actor.model.lora.rank > 0, checkpointing=checkpointing)
        self.row_seconds = row_seconds(model.config, padding.device, self.mode)
        self.shape = ModelShape.of(model.config)
        self.fused = actor.use_torch_compile
        self.features = FeatureCache() if frozen and not sharded else None
        blank = padding.blank_image
        merge_size = model.config.vision_config.spatial_merge_size
        media = None if blank is None else Media("blank", "image", blank[0], blank[1][0], merge_size)
        self.nothing = blank_group(media, padding.pad_id if blank is None else padding.image_id)
        self.blank_group = None if blank is None else self.nothing

    def forget(self) -> None:
        """See Scorer: the features of a frozen tower."""
        if self.features is not None:
            self.features = FeatureCache()

    def seconds(self, group: Group) -> float:
        """See Scorer."""
        load = load_of([self._group(group.prompt, group.completions, range(len(group.completions)))])
        return self.row_seconds(load) - self.row_seconds(Load())

    def rows(self, batch: RolloutBatch, groups: Sequence[int]) -> list[PackedRow]:
        """See Scorer."""
        first, packed = 0, []
        for number, group in enumerate(batch.groups):
            last = first + len(group.completions)
            if number in groups:
                packed.append(self._group(group.prompt, group.completions, range(first, last)))
            first = last
        return pack(
            packed,
            max_tokens=self.max_tokens,
            max_samples=self.max_samples,
            multiple=self.multiple,
            cost=self.row_seconds,
            pad_id=self.padding.pad_id,
            blank=self.blank_group,
        )

    def _group(self, prompt: Prompt, completions: Sequence[Any], samples: Sequence[int]) -> PackGroup:
        media = prompt_media(prompt, self.model.config.vision_config.spatial_merge_size)
        return PackGroup(
            prompt_ids=prompt.token_ids,
            prompt_positions=positions_of(self.model, prompt),
            completions=[completion.token_ids for completion in completions],
            samples=samples,
            media=media,
            media_positions=media_positions(self.model.config, prompt.token_ids, media),
            name=prompt.row_id,
        )

    def work(self, rows: Sequence[PackedRow]) -> Work:
        """See Scorer."""
        largest = None
        if self.shape is not None:
            width = 4 if self.padding.device.type == "cpu" else 2
            largest = max(row_bytes(self.shape, row.load, self.mode, fused=self.fused, width=width) for row in rows)
        return Work(sum(row.real_tokens for row in rows), sum(len(row.ids) for row in rows), largest)

    def blank(self) -> PackedRow:
        """See Scorer."""
        return build_row([self.nothing], multiple=self.multiple, pad_id=self.padding.pad_id)

    def score(self, model: nn.Module, row: PackedRow, reference: Outlook | None = None) -> Scores:
        """See Scorer."""
        prepared = prepare(row, self.model.config, self.padding.device, self.model.dtype)
        row = prepared.row
        scored = model(
            packed=prepared,
            temperature=self.temperature,
            banned_ids=self.banned_ids,
            features=self.features,
            reference=reference,
        )
        return Scores(
            samples=row.samples,
            mask=row.padded(torch.ones_like(scored.log_probs)),
            log_probs=row.padded(scored.log_probs),
            entropy=row.padded(scored.entropy),
            divergence=None if reference is None else row.padded(scored.divergence),
        )

    def outlook(self, model: nn.Module, row: PackedRow) -> Outlook:
        """See Scorer."""
        prepared = prepare(row, self.model.config, self.padding.device, self.model.dtype)
        states = model(packed=prepared, features=self.features, states_only=True)
        return Outlook(states, plain_head(extract_model_from_parallel(model)))


def prompt_media(prompt: Prompt, merge_size: int) -> tuple[Media, ...]:
    """The pictures of a prompt, then its videos, in the order of their marks."""
    grids = () if prompt.image_grid_thw is None else prompt.image_grid_thw
    parts = zip(prompt.image_keys, prompt.pixels, grids, strict=True)
    pictures = [Media(key, IMAGE, pixels, grid, merge_size) for key, pixels, grid in parts]
    return (*pictures, *(Media(clip.key, VIDEO, clip.pixels, clip.grid, merge_size) for clip in prompt.videos))


@dataclass(frozen=True)
class _PlainRow:
    samples: Tensor
    batch: PaddedBatch


class PlainScorer:
    """Consecutive samples, `micro_batch_size_per_device_for_update` at a time, padded to the longest of them."""

    compiles = False

    def forget(self) -> None:
        """See Scorer: nothing is kept."""

    def seconds(self, group: Group) -> float:
        """See Scorer; in tokens, as every one of them is computed."""
        return float(sum(len(group.prompt.token_ids) + len(c.token_ids) for c in group.completions))

    def __init__(self, config: Config, *, banned_ids: Sequence[int], padding: Padding):
        self.padding, self.banned_ids = padding, list(banned_ids)
        self.temperature = config.worker.rollout.temperature
        self.size = config.worker.actor.micro_batch_size_per_device_for_update

    def rows(self, batch: RolloutBatch, groups: Sequence[int]) -> list[_PlainRow]:
        """See Scorer."""
        wanted, samples = set(groups), batch.samples
        numbers = [row for row, group in enumerate(batch.group_ids) if group in wanted]
        parts = [numbers[first : first + self.size] for first in range(0, len(numbers), self.size)]
        return [_PlainRow(torch.tensor(part), pad([samples[row] for row in part], self.padding)) for part in parts]

    def work(self, rows: Sequence[_PlainRow]) -> Work:
        """See Scorer."""
        masks = [row.batch.inputs["attention_mask"] for row in rows]
        return Work(sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks), None)

    def blank(self) -> _PlainRow:
        """See Scorer."""
        return _PlainRow(torch.empty(0, dtype=torch.long), pad([], self.padding))

    def score(self, model: nn.Module, row: _PlainRow, reference: Outlook | None = None) -> Scores:
        """See Scorer."""
        batch = on_device(row.batch, self.padding.device)
        options = {"temperature": self.temperature, "banned_ids": self.banned_ids, "reference": reference}
        scored = score_completions(model, batch, **options)
        samples = row.samples.to(self.padding.device)
        return Scores(samples, batch.mask, scored.log_probs, scored.entropy, scored.divergence)

    def outlook(self, model: nn.Module, row: _PlainRow) -> Outlook:
        """See Scorer."""
        return outlook_of_completions(model, on_device(row.batch, self.padding.device))
