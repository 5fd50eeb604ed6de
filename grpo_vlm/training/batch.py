"""Rollouts of one rank as padded tensors, and the micro-batches that are read out of them.

Shape legend: B samples of this rank (its prompts x G), T longest completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.logprobs import PaddedBatch
from grpo_vlm.rollout.types import Completion


@dataclass(frozen=True)
class Group:
    """One prompt, its G completions and their scores (each a dict with "overall")."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[dict[str, float], ...]


@dataclass(frozen=True)
class RolloutBatch:
    """All samples of this rank for one rollout step, in the order of `groups`; [B, T] tensors, zero outside `mask`.

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
        longest = max(len(completion.token_ids) for completion in completions)
        mask = torch.zeros(len(completions), longest)
        sampler_log_probs = torch.zeros(len(completions), longest)
        for row, completion in enumerate(completions):
            mask[row, : len(completion.token_ids)] = 1
            sampler_log_probs[row, : len(completion.logprobs)] = torch.tensor(completion.logprobs)
        return cls(tuple(groups), mask, sampler_log_probs)

    @property
    def samples(self) -> list[tuple[Prompt, Completion]]:
        return [(group.prompt, completion) for group in self.groups for completion in group.completions]

    @property
    def group_ids(self) -> list[int]:
        return [number for number, group in enumerate(self.groups) for _ in group.completions]

    def minibatches(self, count: int) -> list["RolloutBatch"]:
        """Splits whole groups, in order, into `count` equal parts: one optimizer update each."""
        size = len(self.groups) // count
        parts, first = [], 0
        for part in range(count):
            groups = self.groups[part * size : (part + 1) * size]
            last = first + sum(len(group.completions) for group in groups)
            parts.append(self._rows(groups, slice(first, last)))
            first = last
        return parts

    def _rows(self, groups: Sequence[Group], rows: slice) -> "RolloutBatch":
        """The same batch with only these rows, cut to their longest completion."""
        longest = int(self.mask[rows].sum(-1).max())
        cut = lambda values: None if values is None else values[rows, :longest]  # noqa: E731
        return replace(
            self,
            groups=tuple(groups),
            mask=cut(self.mask),
            sampler_log_probs=cut(self.sampler_log_probs),
            rewards=self.rewards[rows],
            advantages=cut(self.advantages) if self.advantages.numel() else self.advantages,
            old_log_probs=cut(self.old_log_probs),
            ref_log_probs=cut(self.ref_log_probs),
        )


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


def micro_batches(rollouts: RolloutBatch, size: int, padding: Padding) -> Iterator[tuple[slice, PaddedBatch]]:
    """Consecutive samples, `size` at a time: the rows they take in `rollouts`, and the model's inputs, whose T is that
    of the longest completion among them.
    """
    samples = rollouts.samples
    for first in range(0, len(samples), size):
        rows = slice(first, min(first + size, len(samples)))
        yield rows, pad(samples[rows], padding)


def pad(samples: Sequence[tuple[Prompt, Completion]], padding: Padding) -> PaddedBatch:
    """Left-pads prompts and right-pads completions; pixel values are concatenated in the order of the rows."""
    longest_prompt = max(len(prompt.token_ids) for prompt, _ in samples)
    longest = max(len(completion.token_ids) for _, completion in samples)
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
    inputs = {name: values.to(padding.device, non_blocking=True) for name, values in inputs.items()}
    return PaddedBatch(
        inputs=inputs,
        targets=inputs["input_ids"][: len(samples), longest_prompt:],
        mask=inputs["attention_mask"][: len(samples), longest_prompt:].float(),
    )
