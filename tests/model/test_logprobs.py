"""The padded form scores every completion as a forward pass of that sample alone does; the chunked head scores hidden
states as a softmax over whole logits does."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import Config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.model import logprobs
from grpo_vlm.model.logprobs import ChunkedHead, index_of, score_completions, score_tokens
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


# ---------------------------------------------------------------- the chunked head

BANNED = (3, 4)


def head_parts(tokens=7, hidden=5, vocabulary=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    head = nn.Linear(hidden, vocabulary, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(vocabulary, hidden, generator=generator))
    targets = torch.randint(5, vocabulary, (tokens,), generator=generator)
    return states, head, targets, torch.randn(2, tokens, generator=generator).to(dtype)


def whole(states, head, targets, temperature):
    logits = (head(states) / temperature).index_fill(-1, torch.tensor(BANNED), float("-inf"))
    distribution = torch.distributions.Categorical(logits=logits)
    probs = distribution.probs
    return distribution.log_prob(targets), -(probs * probs.clamp(min=1e-40).log()).sum(-1)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_head_equals_a_softmax_over_all_logits(chunk, temperature):
    states, head, targets, weights = head_parts()
    gradients = []
    for scores in (
        score_tokens(states, head, targets, temperature=temperature, banned_ids=BANNED, chunk_tokens=chunk),
        whole(states, head, targets, temperature or 1.0),
    ):
        loss = (weights * torch.stack(scores)).sum()
        gradients.append((*scores, *torch.autograd.grad(loss, (states, head.weight))))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_banned_target_leaves_the_gradient_of_the_others_alone():
    """No sampler draws one; an answer that a user wrote may hold one."""
    states, head, targets, _ = head_parts()
    targets[2] = BANNED[0]
    gradients = []
    for scores in (
        score_tokens(states, head, targets, banned_ids=BANNED, chunk_tokens=3),
        logprobs._masked_scores(head(states), targets, index_of(BANNED, states.device), 1.0),
    ):
        gradients.append(torch.autograd.grad(scores[0].sum(), (states, head.weight)))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_heads_gradients_are_those_of_its_values():
    states, head, targets, _ = head_parts(dtype=torch.float64)
    banned = index_of(BANNED, torch.device("cpu"))

    def apply(states, weight):
        return ChunkedHead.apply(states, weight, targets, banned, 1 / 0.7, 3, torch.float64)

    assert torch.autograd.gradcheck(apply, (states, head.weight))
    assert torch.autograd.gradcheck(lambda *parts: apply(*parts)[0], (states, head.weight))  # log-probs alone
    assert torch.autograd.gradcheck(lambda *parts: apply(*parts)[1], (states, head.weight))


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    seen = []
    log_softmax = logprobs._log_softmax
    monkeypatch.setattr(
        logprobs, "_log_softmax", lambda x, scale: seen.append(tuple(x.shape)) or log_softmax(x, scale)
    )
    states, head, targets, _ = head_parts(tokens=10)
    log_probs, _ = score_tokens(states, head, targets, chunk_tokens=4)
    log_probs.sum().backward()
    assert seen == [(4, 11), (4, 11), (2, 11)] * 2


def test_the_weights_gradient_is_summed_in_float32():
    """Many bfloat16 chunks, each too small to move a bfloat16 sum."""
    states, head, targets, _ = head_parts(tokens=2048, dtype=torch.bfloat16)
    states, targets = states[:1].expand(2048, -1).detach(), targets[:1].expand(2048)
    gradients = []
    for chunk in (1, 2048):
        head.weight.grad = None
        score_tokens(states, head, targets, chunk_tokens=chunk)[0].sum().backward()
        gradients.append(head.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0.01, atol=0.01 * gradients[1].abs().max().item())


def test_under_autocast_the_head_computes_in_bfloat16_and_keeps_float32_gradients():
    states, head, targets, weights = head_parts()
    with torch.autocast("cpu", torch.bfloat16):
        scores = score_tokens(states, head, targets, banned_ids=BANNED)
    (weights * torch.stack(scores)).sum().backward()
    exact = whole(states, head, targets, 1.0)
    assert {part.dtype for part in (*scores, states.grad, head.weight.grad)} == {torch.float32}
    assert 1e-5 < (scores[0] - exact[0]).abs().max() < 0.05


def test_a_head_with_an_adapter_is_called_itself():
    states, head, targets, weights = head_parts()
    config = LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    adapted = inject_adapter_in_model(config, nn.ModuleDict({"head": head}))["head"]
    trained = [adapted.lora_A["default"].weight, adapted.lora_B["default"].weight, states]
    results = []
    for scores in (
        score_tokens(states, adapted, targets, temperature=0.7, banned_ids=BANNED, chunk_tokens=3),
        whole(states, adapted, targets, 0.7),
    ):
        results.append((*scores, *torch.autograd.grad((weights * torch.stack(scores)).sum(), trained)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_nothing_to_score_still_reaches_the_head():
    states, head, targets, _ = head_parts()
    log_probs, entropy = score_tokens(states[:0], head, targets[:0])
    assert log_probs.shape == entropy.shape == (0,)
    log_probs.sum().backward()
    assert not head.weight.grad.any() and not states.grad.any()
