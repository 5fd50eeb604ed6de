"""The vLLM engine with real CPU servers: its log-probs are the trainer's, before and after weights move."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForImageTextToText

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.failures import RequestTimedOut, WeightsLost
from grpo_vlm.rollout.wire import WEIGHTS_PATH
from tests.rollout.helpers import expected_logprobs, perturb, prompts, requests

BOUND = 2e-5


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def parts(request, vllm_engine):
    engine = vllm_engine(request.param)
    return engine, prompts(engine.processor)


@pytest.fixture(scope="module")
def engine(vllm_engine):
    engine = vllm_engine("qwen2_5_vl")
    engine.sync(load(engine), 0)
    return engine


def load(engine):
    return AutoModelForImageTextToText.from_pretrained(engine.settings.model_path, dtype=torch.float32)


def largest_difference(engine, model, rows, **sampling):
    batch = requests(rows, **sampling)
    answers = engine.generate(batch)
    worst = 0.0
    for prompt, completions in zip(rows, answers, strict=True):
        assert len(completions) == 3
        for completion in completions:
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            assert not set(completion.token_ids) & set(engine.banned_ids)
            expected = expected_logprobs(model, prompt, completion, engine.banned_ids, batch[0].sampling)
            worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return worst


def test_logprobs_follow_the_weights(parts):
    engine, rows = parts
    model = load(engine)
    engine.sync(model, 0)
    assert largest_difference(engine, model, rows) <= BOUND
    assert largest_difference(engine, model, rows, temperature=0.7) <= BOUND
    for version in (1, 2):
        perturb(model, version)
        assert largest_difference(engine, model, rows) > 100 * BOUND  # the server still has the old weights
        metrics = engine.sync(model, version)
        assert largest_difference(engine, model, rows) <= BOUND
        assert metrics["sync/gb"] > 0.005
    assert engine.generate(requests(rows[:1]))[0][0].version == 2


def test_encoder_cache_is_dropped_when_only_the_tower_moves(parts):
    engine, rows = parts
    model = load(engine)
    engine.sync(model, 0)
    engine.generate(requests(rows))
    perturb(model.base_model.visual, 3)
    engine.sync(model, 1)
    assert largest_difference(engine, model, rows) <= BOUND


def test_same_seed_same_bits_whatever_the_order(parts):
    engine, rows = parts
    engine.sync(load(engine), 0)
    batch = requests(rows)
    first = engine.generate(batch)
    assert engine.generate(batch) == first
    assert engine.generate(batch[::-1])[::-1] == first
    assert [engine.generate([request])[0] for request in batch] == first
    single = requests(rows, n=1)  # a step of one token takes other kernels, but for batch_invariant.py
    assert [engine.generate([request])[0] for request in single] == engine.generate(single)
    assert engine.generate(requests(rows, purpose="val")) != first
    assert len({completion.token_ids for completions in first for completion in completions}) == 12


def test_greedy_and_drawn_prompts_in_one_call(engine):
    rows = prompts(engine.processor)
    drawn, greedy = requests(rows[:2]), requests(rows[2:], n=1, temperature=0)
    expected = engine.generate(drawn), engine.generate(greedy)
    seen = []
    mixed = engine.generate([drawn[0], greedy[0], drawn[1], greedy[1]], seen.append)
    assert ([mixed[0], mixed[2]], [mixed[1], mixed[3]]) == expected
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"repetition_penalty": 1.5, "max_tokens": 20},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "temperature": 0.8},
    ],
    ids=lambda sampling: "-".join(sampling),
)
def test_logprobs_are_of_the_distribution_that_is_sampled(engine, sampling):
    """The transformers engine has its own code for the same filters."""
    engine.sync(load(engine), 0)
    rows = prompts(engine.processor)
    assert largest_difference(engine, load(engine), rows, **sampling) <= BOUND
    plain = engine.generate(requests(rows, max_tokens=sampling.get("max_tokens", 12)))
    assert engine.generate(requests(rows, **sampling)) != plain


def test_a_stop_string_ends_a_completion_and_is_kept(engine):
    row = prompts(engine.processor)[:1]
    free = engine.generate(requests(row, n=1, max_tokens=24))[0][0]
    decode = engine.processor.tokenizer.decode
    text = next(t for t in map(decode, free.token_ids[4:]) if t.isascii() and len(t) > 2)
    stopped = engine.generate(requests(row, n=1, max_tokens=24, stop=("never there", text)))[0][0]
    length = next(end for end in range(1, 25) if text in decode(free.token_ids[:end]))
    assert stopped.token_ids == free.token_ids[:length] and stopped.logprobs == free.logprobs[:length]
    assert stopped.finish_reason == "stop" and stopped.text.endswith(text)
    final = free.token_ids[3]
    ended = engine.generate(requests(row, n=1, stop_token_ids=(final,), ignore_eos=True))[0][0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(final) + 1]


def test_stop_token_ends_a_completion_and_is_kept(engine):
    engine.sync(load(engine), 0)
    row = prompts(engine.processor)[:1]
    free = engine.generate(requests(row, n=1))[0][0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    engine.client.eos_ids = [free.token_ids[5]]
    stopped = engine.generate(requests(row, n=1))[0][0]
    ignored = engine.generate(requests(row, n=1, ignore_eos=True))[0][0]
    engine.client.eos_ids = engine.eos_ids
    end = free.token_ids.index(free.token_ids[5]) + 1
    assert stopped.token_ids == free.token_ids[:end] and stopped.finish_reason == "stop"
    assert ignored.token_ids == free.token_ids


def test_other_placeholders_than_the_pictures_name_the_row(engine):
    prompt = prompts(engine.processor)[0]
    place = prompt.token_ids.index(engine.processor.image_token_id)
    longer = [*prompt.token_ids[:place], engine.processor.image_token_id, *prompt.token_ids[place:]]
    with pytest.raises(RolloutError, match=r"row .*:0: .*400: the prompt has more placeholders .*'image': 1"):
        engine.generate(requests([dataclasses.replace(prompt, token_ids=longer)]))


def test_a_refused_prompt_names_the_row_and_the_reason(engine):
    prompt = prompts(engine.processor)[1]
    long = dataclasses.replace(prompt, token_ids=prompt.token_ids * 40, row_id="train:77")
    with pytest.raises(RolloutError, match=r"row train:77: .*400.*320"):
        engine.generate(requests([long]))
    assert engine.generate(requests([prompt]))  # the server goes on


def test_a_request_that_takes_too_long_names_the_row_and_the_key(engine):
    engine.client.request_timeout_s = 0.001
    try:
        with pytest.raises(RequestTimedOut, match=r"row .*:0: .* 0.001 s \(worker.rollout.request_timeout_s\)"):
            engine.client.generate(requests(prompts(engine.processor)[:1]), 0)
    finally:
        engine.client.request_timeout_s = engine.request_timeout_s


def test_a_server_that_lost_the_weights_does_not_generate(engine):
    """What one does that was started again between sync and generate: it knows of no weights but its folder's."""
    engine.client.post(WEIGHTS_PATH, {"weights": None})
    with pytest.raises(WeightsLost, match=r"other weights than .* version 0: those that it was started with"):
        engine.client.generate(requests(prompts(engine.processor)[:1]), 0)
    engine.sync(load(engine), 0)
    assert engine.client.generate(requests(prompts(engine.processor)[:1]), 0)


def test_a_refused_weight_update_says_what_the_server_said(engine):
    engine.client.post("/start_weight_update")
    with pytest.raises(RolloutError, match="/update_weights"):
        engine.client.post("/update_weights", {"update_info": {"path": "/nowhere/weights.safetensors"}})
    model = load(engine)
    engine.sync(model, 0)
    assert largest_difference(engine, model, prompts(engine.processor)) <= BOUND
