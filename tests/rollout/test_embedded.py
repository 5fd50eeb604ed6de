"""The transformers engine: right log-probs, the same bits again, independent of what else is in the batch."""

import dataclasses

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.rollout import embedded
from grpo_vlm.rollout.embedded import TransformersEngine, draw, keep_likely
from grpo_vlm.rollout.types import Sampling
from tests.rollout.helpers import expected_logprobs, prompts, requests
from tests.tiny import tiny_model


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def parts(request, tmp_path_factory):
    path = tiny_model(request.param, tmp_path_factory.getbasetemp())
    processor = AutoProcessor.from_pretrained(path)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    engine = TransformersEngine(processor=processor, model=model, accelerator=Accelerator(cpu=True))
    engine.start()
    engine.sync(model, 7)
    return engine, model, prompts(processor)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.6), Sampling(repetition_penalty=1.5, min_p=0.1, top_k=20)]
)
def test_logprobs_are_those_of_a_plain_forward_pass(parts, sampling):
    engine, model, rows = parts
    sampling = dataclasses.replace(sampling, n=3, max_tokens=12)
    answers = engine.generate(requests(rows, **dataclasses.asdict(sampling)))
    for prompt, completions in zip(rows, answers, strict=True):
        assert len(completions) == 3
        for completion in completions:
            expected = expected_logprobs(model, prompt, completion, engine.banned_ids, sampling)
            assert (torch.tensor(completion.logprobs) - expected).abs().max() < 2e-5
            assert completion.version == 7
            assert not set(completion.token_ids) & set(engine.banned_ids)


def test_same_requests_give_the_same_bits_and_order_does_not_matter(parts):
    engine, _, rows = parts
    first = engine.generate(requests(rows))
    assert engine.generate(requests(rows)) == first
    backwards = engine.generate(requests(rows[::-1]))[::-1]
    alone = [engine.generate([request])[0] for request in requests(rows)]
    for others in (backwards, alone):
        for mine, theirs in zip(first, others, strict=True):
            assert [c.token_ids for c in mine] == [c.token_ids for c in theirs]
    assert len({c.token_ids for completions in first for c in completions}) == 12  # no two streams are alike
    assert engine.generate(requests(rows, purpose="val")) != first


def test_chunks_do_not_change_completions(parts, monkeypatch):
    engine, _, rows = parts
    whole = engine.generate(requests(rows))
    seen = []
    monkeypatch.setattr(embedded, "CHUNK_TOKENS", 400)
    parted = engine.generate(requests(rows), seen.append)
    assert len(seen) > 1 and seen[-1] == len(rows)
    assert [[c.token_ids for c in row] for row in parted] == [[c.token_ids for c in row] for row in whole]


def test_greedy_takes_the_likeliest_allowed_token(parts):
    engine, model, rows = parts
    for prompt, (completion,) in zip(rows, engine.generate(requests(rows, n=1, temperature=0)), strict=True):
        expected = expected_logprobs(model, prompt, completion, engine.banned_ids, Sampling(temperature=0))
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 2e-5
        again = engine.generate(requests([prompt], purpose="other", n=1, temperature=0))[0][0]
        assert again.token_ids == completion.token_ids


def test_training_state_is_restored(parts):
    engine, model, rows = parts
    model.train()
    model.gradient_checkpointing_enable()
    visual = model.base_model.visual.eval()
    engine.generate(requests(rows[:1], n=1, max_tokens=2))
    assert model.training and not visual.training and model.is_gradient_checkpointing
    model.gradient_checkpointing_disable()


def test_stop_token_ends_a_completion_and_is_kept(parts):
    engine, _, rows = parts
    free = engine.generate(requests(rows[:1], n=1, max_tokens=12))[0][0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    position = 5
    final = free.token_ids[position]
    engine.eos_ids, before = [final], engine.eos_ids
    stopped = engine.generate(requests(rows[:1], n=1, max_tokens=12))[0][0]
    ignored = engine.generate(requests(rows[:1], n=1, max_tokens=12, ignore_eos=True))[0][0]
    engine.eos_ids = before
    end = free.token_ids.index(final) + 1
    assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == "stop"
    assert ignored.token_ids == free.token_ids


def test_stop_strings_and_ids_end_a_completion_and_are_kept(parts):
    engine, _, rows = parts
    free = engine.generate(requests(rows[:1], n=1, max_tokens=24))[0][0]
    decode = engine.tokenizer.decode
    text = next(t for t in map(decode, free.token_ids[4:]) if t.isascii() and len(t) > 2)
    stopped = engine.generate(requests(rows[:1], n=1, max_tokens=24, stop=("never there", text)))[0][0]
    length = next(end for end in range(1, 25) if text in decode(free.token_ids[:end]))
    assert stopped.token_ids == free.token_ids[:length] and stopped.finish_reason == "stop"
    final = free.token_ids[3]
    ended = engine.generate(requests(rows[:1], n=1, stop_token_ids=(final,), ignore_eos=True))[0][0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(final) + 1]


def test_a_penalty_holds_for_the_prompt_and_what_came_before(parts):
    engine, _, rows = parts
    for completion in engine.generate(requests(rows[:2], n=1, max_tokens=30, repetition_penalty=1e9, temperature=0)):
        assert len(set(completion[0].token_ids)) == 30


def test_draw_follows_the_distribution():
    logits = torch.tensor([[0.1, 2.0, -1.0, 5.0, 1.0]])
    allowed = torch.tensor([0.1, 2.0, -1.0, float("-inf"), 1.0]) / 0.7
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs = draw(logits.repeat(20_000, 1), uniforms, Sampling(temperature=0.7), [3])
    shares = torch.bincount(tokens, minlength=5) / 20_000
    assert torch.allclose(shares, allowed.softmax(0), atol=2e-4)
    assert torch.allclose(logprobs, allowed.log_softmax(0)[tokens])


def test_top_k_top_p_and_min_p_keep_the_likeliest():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()[:, [2, 0, 3, 1]]
    assert torch.isfinite(keep_likely(scores, 2, 1.0)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(keep_likely(scores, -1, 0.75)).tolist() == [[False, True, False, True]]
    assert torch.isfinite(keep_likely(scores, -1, 0.81)).tolist() == [[True, True, False, True]]
    assert torch.isfinite(keep_likely(scores, -1, 0.1)).tolist() == [[False, True, False, False]]
    assert torch.isfinite(keep_likely(scores, -1, 1.0, 0.4)).tolist() == [[False, True, False, True]]
