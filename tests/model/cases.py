"""Tiny Qwen2-VL, Qwen2.5-VL and Qwen3-VL models, rows that mix everything a row can hold, and what one sample at a
time scores: the reference of the packed form.

Shape legend: S scored tokens of all completions, in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from grpo_vlm.model.packed import media_positions, prompt_positions
from grpo_vlm.model.packing import IMAGE, VIDEO, Media, PackedRow, PackGroup, build_row

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IMAGE_TOKEN, VIDEO_TOKEN, START, END = 250, 251, 252, 253
BANNED = (7, IMAGE_TOKEN, VIDEO_TOKEN)
TEMPERATURE = 0.7


def tiny(kind: str) -> PreTrainedModel:
    """A model of three text layers and three vision blocks in float32, patches of 4 x 4 pixels; the same each time."""
    text = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 3, "num_heads": 2, "patch_size": 4}
    if kind == "qwen2_vl":
        config_class, model_class = Qwen2VLConfig, Qwen2VLForConditionalGeneration
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    elif kind == "qwen2_5_vl":
        config_class, model_class = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"hidden_size": 32, "intermediate_size": 52, "out_hidden_size": 64, "tokens_per_second": 2}
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}  # windows of 8 x 8 patches; 52 is no multiple of 8
    else:
        config_class, model_class = Qwen3VLConfig, Qwen3VLForConditionalGeneration
        text |= {"head_dim": 16}
        text["rope_parameters"] = text["rope_parameters"] | {"mrope_interleaved": True}
        vision |= {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 64}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    config = config_class(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=kind != "qwen2_vl",
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config).float()
        with torch.no_grad():
            for parameter in model.parameters():  # wide enough for every part to matter, biases and norms included
                noise = torch.randn_like(parameter)
                parameter.copy_(0.15 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return model.train()


@dataclass(frozen=True)
class Question:
    """A prompt with its media in reading order and the completions to score."""

    prompt_ids: list[int]
    media: tuple[Media, ...]
    completions: list[list[int]]


@dataclass
class Draw:
    """Random tokens and pictures from a seed."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    def tokens(self, count: int) -> list[int]:
        return torch.randint(8, 240, (count,), generator=self.generator).tolist()

    def media(self, kind: str, t: int, h: int, w: int, key: str) -> Media:
        pixels = torch.randn(t * h * w, 3 * 2 * 4 * 4, generator=self.generator)
        return Media(key, kind, pixels, torch.tensor([t, h, w]))

    def question(self, model_kind: str, media: Sequence[Media], lengths: Sequence[int], text: int = 5) -> Question:
        ids = self.tokens(text)
        for item in media:
            t, h, w = item.grid.tolist()
            token = IMAGE_TOKEN if item.kind == IMAGE else VIDEO_TOKEN
            frames = t if item.kind == VIDEO and model_kind == "qwen3_vl" else 1  # Qwen3-VL: frames apart, timed
            for _ in range(frames):
                ids += [START] + [token] * (t * h * w // 4 // frames) + [END] + self.tokens(2)
        return Question(ids + self.tokens(2), tuple(media), [self.tokens(length) for length in lengths])


def mixed(kind: str) -> list[Question]:
    """One image (ragged windows); two of different sizes; a video and an image that another group shows too; no image;
    one-token completions; a group of one. The video is wider than long, where transformers' positions of Qwen2.5-VL
    are those of model/positions.py."""
    draw = Draw()
    shared = draw.media(IMAGE, 1, 8, 12, "shared")
    return [
        draw.question(kind, [draw.media(IMAGE, 1, 12, 20, "a")], [3, 1, 5], text=9),
        draw.question(kind, [shared, draw.media(IMAGE, 1, 16, 8, "b")], [4, 2]),
        draw.question(kind, [draw.media(VIDEO, 3, 4, 12, "v"), shared], [6]),
        draw.question(kind, [], [2, 7, 1, 1], text=3),
    ]


def groups(model: nn.Module, questions: Sequence[Question]) -> list[PackGroup]:
    made, first = [], 0
    for question in questions:
        images, videos = ([item.grid for item in question.media if item.kind == kind] for kind in (IMAGE, VIDEO))
        made.append(
            PackGroup(
                prompt_ids=question.prompt_ids,
                prompt_positions=prompt_positions(
                    model,
                    question.prompt_ids,
                    image_grids=torch.stack(images) if images else None,
                    video_grids=torch.stack(videos) if videos else None,
                ),
                completions=question.completions,
                samples=range(first, first + len(question.completions)),
                media=question.media,
                media_positions=media_positions(model.config, question.prompt_ids, question.media),
            )
        )
        first += len(question.completions)
    return made


def packed_row(
    model: nn.Module, questions: Sequence[Question], *, multiple: int = 16, cuts: Sequence[int] = (1,)
) -> PackedRow:
    """One row of all questions. cuts: after how many of a question's completions it goes on in a second document, its
    prompt repeated; by default the first question's after one."""
    made = []
    for group, cut in zip_longest(groups(model, questions), cuts[: len(questions)], fillvalue=0):
        count = len(group.completions)
        made += [group.part(range(cut)), group.part(range(cut, count))] if 0 < cut < count else [group]
    return build_row(made, multiple=multiple)


def single_scores(model: nn.Module, questions: Sequence[Question]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy [S], each sample in a forward pass of its own, with nothing of ours."""
    log_probs, entropies = [], []
    for question in questions:
        for completion in question.completions:
            logits = model(**single_inputs(question, completion), use_cache=False).logits[0]
            logits = logits[len(question.prompt_ids) - 1 : -1] / TEMPERATURE
            logits = logits.index_fill(-1, torch.tensor(BANNED), float("-inf"))
            log_p = logits.log_softmax(-1)
            log_probs.append(log_p.gather(-1, torch.tensor(completion)[:, None])[:, 0])
            entropies.append(-(log_p.exp() * log_p.clamp(min=-1e30)).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def single_inputs(question: Question, completion: Sequence[int]) -> dict[str, Tensor]:
    prompt = torch.tensor(question.prompt_ids)
    ids = torch.tensor([[*question.prompt_ids, *completion]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for kind, name in ((IMAGE, "image"), (VIDEO, "video")):
        media = [item for item in question.media if item.kind == kind]
        if media:
            suffix = "" if kind == IMAGE else "_videos"
            inputs[f"pixel_values{suffix}"] = torch.cat([item.pixels for item in media])
            inputs[f"{name}_grid_thw"] = torch.stack([item.grid for item in media])
    if question.media:
        types = (prompt == IMAGE_TOKEN).int() + 2 * (prompt == VIDEO_TOKEN).int()
        inputs["mm_token_type_ids"] = torch.cat([types, types.new_zeros(len(completion))])[None]
    return inputs


def weighted(log_probs: Tensor, entropy: Tensor, seed: int = 0) -> Tensor:
    """A loss that weighs every token's log-prob and entropy differently."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, len(log_probs), generator=generator)
    return (weights * torch.stack([log_probs, entropy])).sum()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Of every trainable parameter; zeros where the loss does not reach."""
    model.zero_grad()
    loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Every gradient within `tolerance` of the largest entry of any."""
    assert found.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    assert largest > 0.1
    worst = {name: (found[name] - value).abs().max().item() / largest for name, value in expected.items()}
    name = max(worst, key=worst.get)
    assert worst[name] <= tolerance, f"{name}: {worst[name]:.1e} of the largest gradient entry, {largest:.3g}"


def siblings_visible(row: PackedRow) -> PackedRow:
    """A wrong row, in which completions see the ones before them."""
    return replace(row, segment=torch.zeros_like(row.segment))
