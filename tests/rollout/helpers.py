"""Prompts for the engine tests, and log-probs by a plain forward pass of one sample at a time."""

import dataclasses

import torch
from PIL import Image

from grpo_vlm.config import Config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.rollout.embedded import keep_likely
from grpo_vlm.rollout.types import Completion, Request, Sampling, request_seed

PLAIN = Sampling()


def picture(width: int, height: int, seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8).numpy())


def prompts(processor) -> list[Prompt]:
    """One picture, no picture, two pictures, one picture again."""
    rows = [
        {"problem": "<image>What is this?", "images": [picture(64, 64, 0)], "answer": "a"},
        {"problem": "No picture here, only a longer question about nothing.", "images": [], "answer": "b"},
        {"problem": "<image>and<image>?", "images": [picture(96, 64, 1), picture(56, 112, 2)], "answer": "c"},
        {"problem": "Look: <image> and say why.", "images": [picture(128, 96, 3)], "answer": "d"},
    ]
    data = dataclasses.replace(
        Config().data, prompt_key="problem", min_pixels=3136, max_pixels=50176, max_prompt_length=256
    )
    dataset = PromptDataset(rows, data, processor)
    return [dataset[index] for index in range(len(rows))]


def requests(prompts: list[Prompt], purpose: str = "train", **sampling) -> list[Request]:
    settings = Sampling(**{"n": 3, "max_tokens": 12} | sampling)
    return [Request(prompt, settings, request_seed(0, 1, prompt.row_id, purpose)) for prompt in prompts]


@torch.no_grad()
def expected_logprobs(model, prompt: Prompt, completion: Completion, banned: list[int], sampling: Sampling = PLAIN):
    """float32 [tokens], of the distribution that `sampling` draws from; without padding, cache or batching."""
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
    if prompt.pixel_values is not None:
        inputs |= {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    first = len(prompt.token_ids)
    logits = model.eval()(**inputs).logits[0, first - 1 : -1]
    logits[:, banned] = float("-inf")
    for row, scores in enumerate(logits if sampling.repetition_penalty != 1 else ()):
        known = ids[0, : first + row].unique()
        penalty = torch.where(scores[known] > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        scores[known] = scores[known] * penalty
    if sampling.temperature > 0:
        logits = keep_likely(logits / sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def perturb(model, seed: int) -> None:
    """Moves every weight, those of the vision tower too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.03)
