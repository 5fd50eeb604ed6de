"""Rollouts as tensors: what the samples of one optimizer update on one rank are scored, weighted and compared with.

Shape legend: B samples (this rank's prompts of the update x G), T longest completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.logprobs import PaddedBatch
from grpo_vlm.rollout.types import Completion


@dataclass(frozen=True)
class Group:
    """One prompt, its G completions and their scores (each a dict with "overall", or None: not scored).

    index: place of the prompt among those of the rollout step, over all ranks.
    counted: for each completion whether the loss counts it; empty: all of them.
    baseline: score of the prompt's greedy answer, where the estimator asks for it.
    stale: made by earlier weights than the step's.
    rewards [G], advantages [G, t]: given by Credit; a reward is the score, less the KL penalty where that is in it.
    returns [G, t]: likewise, None where they are the advantages.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    scores: tuple[dict[str, float] | None, ...]
    index: int = 0
    counted: tuple[bool, ...] = ()
    baseline: float | None = None
    stale: bool = False
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class RolloutBatch:
    """This rank's samples of one optimizer update, in the order of `groups`; [B, T] tensors, zero outside `tokens`.

    tokens: 1 at every completion token. mask: those of the samples that the loss counts. fresh [B]: 0 for samples of
    earlier weights than the step's.
    `old_log_probs` is None where no pass was made for them: then they equal the current ones.
    weights: importance weights against the sampler, None for none. selected: the tokens that clip_cov or kl_cov chose.
    """

    groups: tuple[Group, ...]
    tokens: Tensor
    mask: Tensor
    fresh: Tensor
    sampler_log_probs: Tensor
    rewards: Tensor  # [B]
    advantages: Tensor
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    weights: Tensor | None = None
    selected: Tensor | None = None

    @classmethod
    def of(cls, groups: Sequence[Group]) -> "RolloutBatch":
        completions = [completion for group in groups for completion in group.completions]
        longest = max([1, *(len(completion.token_ids) for completion in completions)])
        tokens, sampler_log_probs = torch.zeros(len(completions), longest), torch.zeros(len(completions), longest)
        for row, completion in enumerate(completions):
            tokens[row, : len(completion.token_ids)] = 1
            sampler_log_probs[row, : len(completion.logprobs)] = torch.tensor(completion.logprobs)
        counted = [flag for group in groups for flag in group.counted or [True] * len(group.completions)]
        return cls(
            groups=tuple(groups),
            tokens=tokens,
            mask=tokens * torch.tensor(counted, dtype=tokens.dtype)[:, None],
            fresh=torch.tensor([float(not group.stale) for group in groups for _ in group.completions]),
            sampler_log_probs=sampler_log_probs,
            rewards=torch.cat([_given(group.rewards, group) for group in groups] or [torch.empty(0)]),
            advantages=_stacked([group.advantages for group in groups], tokens, groups),
        )

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

    def cut(self, values: Tensor) -> list[Tensor]:
        """[B, T] as one [G, t] for each group, on the CPU."""
        parts = values.cpu().split([len(group.completions) for group in self.groups])
        return [
            part[:, : max(len(completion.token_ids) for completion in group.completions)]
            for part, group in zip(parts, self.groups, strict=True)
        ]


def _given(rewards: Tensor | None, group: Group) -> Tensor:
    return torch.zeros(len(group.completions)) if rewards is None else rewards


def _stacked(parts: Sequence[Tensor | None], like: Tensor, groups: Sequence[Group]) -> Tensor:
    """One [G, t] a group, None for zeros, as [B, T]."""
    result, first = torch.zeros_like(like), 0
    for part, group in zip(parts, groups, strict=True):
        if part is not None:
            result[first : first + len(part), : part.shape[1]] = part
        first += len(group.completions)
    return result


def split(groups: Sequence[Group], update_size: int, parts: int) -> list[list[Group]]:
    """The groups of each optimizer update: `update_size` places in a row, over all ranks."""
    return [[group for group in groups if group.index // update_size == part] for part in range(parts)]


@dataclass(frozen=True)
class Padding:
    """What padded inputs are made with.

    blank_image: pixel values [merge^2, dim] and grid [1, 3] of one empty image, or None. With it, a batch without
    pictures gets a row whose only token is that image and whose scores nobody reads: the vision tower then runs on
    every rank, which ZeRO-3, FSDP and DDP wait for.
    video_id: the placeholder of videos (-1: no token). positions: gives a prompt's M-RoPE positions [3, P];
    needed for videos.
    """

    pad_id: int
    image_id: int
    device: torch.device
    blank_image: tuple[Tensor, Tensor] | None = None
    video_id: int = -1
    positions: Callable[[Prompt], Tensor] | None = None


def blank_image(config: PretrainedConfig) -> tuple[Tensor, Tensor]:
    """The smallest image that a Qwen-VL model takes, as processed: one image token."""
    vision = config.vision_config
    merge = vision.spatial_merge_size
    dim = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return torch.zeros(merge * merge, dim), torch.tensor([[1, merge, merge]])


def pad(samples: Sequence[tuple[Prompt, Completion]], padding: Padding) -> PaddedBatch:
    """Left-pads prompts and right-pads completions; pixel values are concatenated in the order of the rows. On the
    CPU; without samples only the blank image is left. Videos need `padding.positions`."""
    longest_prompt = max((len(prompt.token_ids) for prompt, _ in samples), default=1)
    longest = max([1, *(len(completion.token_ids) for _, completion in samples)])
    images = [(p.pixel_values, p.image_grid_thw) for p, _ in samples if p.pixel_values is not None]
    clips = [clip for prompt, _ in samples for clip in prompt.videos]
    blank = not images and not clips and padding.blank_image is not None
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
    targets = ids[: len(samples), longest_prompt:].clone()
    # The model would look for the media of placeholders in an answer, which the sampler never draws, but a user's may.
    ids.masked_fill_(((ids == padding.image_id) | (ids == padding.video_id)) & ~prompt_part, padding.pad_id)
    types = (ids == padding.image_id).int() + 2 * (ids == padding.video_id).int()
    inputs = {
        "input_ids": ids,
        "attention_mask": attention,
        "mm_token_type_ids": types * (prompt_part & attention.bool()),
    }
    if images:
        pixels, grids = zip(*images, strict=True)
        inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids)}
    if clips:
        inputs["pixel_values_videos"] = torch.cat([clip.pixels for clip in clips])
        inputs["video_grid_thw"] = torch.stack([clip.grid for clip in clips])
        inputs["position_ids"] = _positions(samples, padding, longest_prompt, longest)
    return PaddedBatch(
        inputs=inputs,
        targets=targets,
        mask=inputs["attention_mask"][: len(samples), longest_prompt:].float(),
    )


def _positions(
    samples: Sequence[tuple[Prompt, Completion]], padding: Padding, longest_prompt: int, longest: int
) -> Tensor:
    """[3, B, L] in the layout of `pad`: a prompt's own, and on from the largest of them; 1 before the prompt."""
    rows = []
    for prompt, _ in samples:
        own = padding.positions(prompt)
        after = own.max() + 1 + torch.arange(longest)
        rows.append(torch.cat([own.new_ones(3, longest_prompt - own.shape[1]), own, after.expand(3, -1)], dim=1))
    return torch.stack(rows, dim=1)


def on_device(batch: PaddedBatch, device: torch.device) -> PaddedBatch:
    """The batch on `device`, without waiting for the copies."""
    inputs = {name: values.to(device, non_blocking=True) for name, values in batch.inputs.items()}
    return PaddedBatch(inputs, batch.targets.to(device), batch.mask.to(device))
