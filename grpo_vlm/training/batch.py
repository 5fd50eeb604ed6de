"""Rollouts as tensors: what the samples of one optimizer update on one rank are scored, weighted and compared with.

Shape legend: B samples (this rank's prompts of the update x G), T longest completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.logprobs import PaddedBatch
from grpo_vlm.rollout.types import Completion


@dataclass(frozen=True)
class Group:
    """One prompt, its G completions and their scores (each a dict with "overall").

    index: place of the prompt among those of the rollout step, over all ranks.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[dict[str, float], ...]
    index: int = 0


@dataclass(frozen=True)
class RolloutBatch:
    """This rank's samples of one optimizer update, in the order of `groups`; [B, T] tensors, zero outside `mask`.

    `old_log_probs` is None while the policy has not moved since the rollout: then they equal the current ones.
    """

    groups: tuple[Group, ...]
    mask: Tensor
    sampler_log_probs: Tensor
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))  # [B], the summed reward of a sample
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "RolloutBatch":
        completions = [completion for group in groups for completion in group.completions]
        longest = max((len(completion.token_ids) for completion in completions), default=1)
        mask = torch.zeros(len(completions), longest)
        sampler_log_probs = torch.zeros(len(completions), longest)
        for row, completion in enumerate(completions):
            mask[row, : len(completion.token_ids)] = 1
            sampler_log_probs[row, : len(completion.logprobs)] = torch.tensor(completion.logprobs)
        return cls(tuple(groups), mask, sampler_log_probs)

    def to(self, device: torch.device) -> "RolloutBatch":
        """The same batch with its tensors on `device`."""
        move = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **move)

    @property
    def samples(self) -> list[tuple[Prompt, Completion]]:
        return [(group.prompt, completion) for group in self.groups for completion in group.completions]

    @property
    def group_ids(self) -> list[int]:
        return [number for number, group in enumerate(self.groups) for _ in group.completions]


def split(groups: Sequence[Group], parts: int) -> list[Sequence[Group]]:
    """The groups of each optimizer update: equal parts, in order."""
    size = len(groups) // parts
    return [groups[part * size : (part + 1) * size] for part in range(parts)]


@dataclass(frozen=True)
class Padding:
    """What padded inputs are made with.

    blank_image: pixel values [merge^2, dim] and grid [1, 3] of one empty image, or None. With it, a batch without
    pictures gets a row whose only token is that image and whose scores nobody reads: the vision tower then runs on
    every rank, which ZeRO-3, FSDP and DDP wait for.
    """

    pad_id: int
    image_id: int
    device: torch.device
    blank_image: tuple[Tensor, Tensor] | None = None


def blank_image(config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    """The smallest image that a Qwen-VL model takes, as processed: one image token."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(merge * merge, dim), torch.tensor([[1, merge, merge]])


def pad(samples: Sequence[tuple[Prompt, Completion]], padding: Padding) -> PaddedBatch:
    """Left-pads prompts and right-pads completions; pixel values are concatenated in the order of the rows. On the
    CPU; without samples only the blank image is left."""
    longest_prompt = max((len(prompt.token_ids) for prompt, _ in samples), default=1)
    longest = max((len(completion.token_ids) for _, completion in samples), default=1)
    images = [(p.pixel_values, p.image_grid_thw) for p, _ in samples if p.pixel_values is not None]
    blank = not images and padding.blank_image is not None
    ids = torch.full((len(samples) + blank, longest_prompt + longest), padding.pad_id, dtype=torch.long)
    attention = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(samples):
        tokens = torch.tensor([*prompt.token_ids, *completion.token_ids])
        first = longest_prompt - len(prompt.token_ids)
        ids[row, first : first + len(tokens)] = tokens
        attention[row, first : first + len(tokens)] = 1
    if blank:
        images = [padding.blank_image]
        ids[-1, longest_prompt - 1], attention[-1, longest_prompt - 1] = padding.image_id, 1
    prompt_part = torch.arange(ids.shape[1]) < longest_prompt
    inputs = {
        "input_ids": ids,
        "attention_mask": attention,
        "mm_token_type_ids": ((ids == padding.image_id) & prompt_part & attention.bool()).int(),
    }
    if images:
        pixels, grids = zip(*images, strict=True)
        inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
    return PaddedBatch(
        inputs=inputs,
        targets=inputs["input_ids"][: len(samples), longest_prompt:],
        mask=inputs["attention_mask"][: len(samples), longest_prompt:].float(),
    )


def on_device(batch: PaddedBatch, device: torch.device) -> PaddedBatch:
    """The batch on `device`, without waiting for the copies."""
    inputs = {name: values.to(device, non_blocking=True) for name, values in batch.inputs.items()}
    return PaddedBatch(inputs, batch.targets.to(device), batch.mask.to(device))
