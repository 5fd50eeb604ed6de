"""The padded form scores every completion as a forward pass of that sample alone does."""

import dataclasses

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import Config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.model.logprobs import score_completions
from grpo_vlm.rollout.types import Completion, banned_token_ids
from grpo_vlm.training.batch import Padding, blank_image, pad
from tests.tiny import tiny_model


def picture(width, height, seed):
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


ROWS = [
    {"problem": "<image>What is this?", "images": [picture(64, 64, 0)], "answer": "a"},
    {"problem": "No picture here, only a longer question about nothing in particular.", "images": [], "answer": "b"},
    {"problem": "<image>and<image>?", "images": [picture(96, 64, 1), picture(56, 112, 2)], "answer": "c"},
]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def parts(request, tmp_path_factory):
    path = tiny_model(request.param, tmp_path_factory.getbasetemp())
    processor = AutoProcessor.from_pretrained(path)
    data = dataclasses.replace(
        Config().data, prompt_key="problem", min_pixels=3136, max_pixels=50176, max_prompt_length=256
    )
    rows = PromptDataset(ROWS, data, processor)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index in (0, 1, 2, 0):
        length = int(torch.randint(1, 9, (), generator=generator))
        ids = torch.randint(5, 2000, (length,), generator=generator).tolist()
        samples.append((rows[index], Completion(tuple(ids), (0.0,) * length, "length", "", 0)))
    return model, processor, samples


def score(model, processor, samples, temperature=0.7, blank=None):
    padding = Padding(
        pad_id=processor.tokenizer.pad_token_id,
        image_id=model.config.image_token_id,
        device=torch.device("cpu"),
        blank_image=blank,
    )
    batch = pad(samples, padding)
    banned = banned_token_ids(processor, model.config)
    return score_completions(model, batch, temperature=temperature, banned_ids=banned), batch, banned


def test_padded_rows_equal_single_rows(parts):
    model, processor, samples = parts
    together, batch, _ = score(model, processor, samples)
    for row, sample in enumerate(samples):
        alone, _, _ = score(model, processor, [sample])
        length = len(sample[1].token_ids)
        assert batch.mask[row].sum() == length
        torch.testing.assert_close(together.log_probs[row, :length], alone.log_probs[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(together.entropy[row, :length], alone.entropy[0], rtol=0, atol=1e-4)
        assert together.log_probs[row, length:].abs().sum() == 0


def test_single_row_equals_the_plain_forward(parts):
    model, processor, samples = parts
    prompt, completion = samples[2]
    scores, _, banned = score(model, processor, [samples[2]])
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    types = torch.zeros_like(ids)
    types[0, : len(prompt.token_ids)] = (ids[0, : len(prompt.token_ids)] == model.config.image_token_id).int()
    logits = model(
        input_ids=ids,
        mm_token_type_ids=types,
        pixel_values=prompt.pixel_values,
        image_grid_thw=prompt.image_grid_thw,
    ).logits[0, len(prompt.token_ids) - 1 : -1]
    logits = logits / 0.7
    logits[:, banned] = float("-inf")
    distribution = torch.distributions.Categorical(logits=logits)
    targets = torch.tensor(completion.token_ids)
    torch.testing.assert_close(scores.log_probs[0], distribution.log_prob(targets), rtol=0, atol=1e-5)
    probs = logits.softmax(-1)
    expected = -(probs * probs.clamp(min=1e-30).log()).sum(-1)
    torch.testing.assert_close(scores.entropy[0], expected, rtol=0, atol=1e-4)


def test_gradients_of_padded_rows_add_up(parts):
    model, processor, samples = parts

    def gradients(batches):
        model.zero_grad()
        for batch in batches:
            score(model, processor, batch)[0].log_probs.sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together, alone = gradients([samples]), gradients([[sample] for sample in samples])
    assert together.keys() == alone.keys() and any("visual" in name for name in together)
    largest = max(value.abs().max() for value in alone.values())
    for name, value in alone.items():
        assert (together[name] - value).abs().max() <= 1e-5 * largest, name


def test_a_blank_image_runs_the_tower_and_changes_nothing(parts):
    model, processor, samples = parts
    text_only = [samples[1]]
    passes = []
    handle = model.model.visual.register_forward_hook(lambda *_: passes.append(1))
    gradients = []
    for blank in (None, blank_image(model.config)):
        model.zero_grad()
        scores, batch, _ = score(model, processor, text_only, blank=blank)
        scores.log_probs.sum().backward()
        gradients.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()})
        assert scores.log_probs.shape == batch.mask.shape == (1, len(text_only[0][1].token_ids))
    handle.remove()
    assert len(passes) == 1
    plain, with_blank = gradients
    assert all(p.grad is not None for n, p in model.named_parameters() if "visual" in n)
    largest = max(value.abs().max() for value in plain.values())
    for name, value in plain.items():
        assert (with_blank[name] - value).abs().max() <= 1e-6 * largest, name
