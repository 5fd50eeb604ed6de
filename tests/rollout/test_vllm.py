"""The vLLM engine with real CPU servers: its log-probs are the trainer's, before and after weights move."""

import base64
import dataclasses
import io

import pytest
import requests as http
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import png_data_url
from tests.rollout.helpers import expected_logprobs, perturb, picture, prompts, requests

BOUND = 2e-5


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def parts(request, vllm_engine):
    engine = vllm_engine(request.param)
    return engine, prompts(engine.processor)


@pytest.fixture(scope="module")
def engine(vllm_engine):
    return vllm_engine("qwen2_5_vl")


def load(engine):
    return AutoModelForImageTextToText.from_pretrained(engine.settings.model_path, dtype=torch.float32)


def largest_difference(engine, model, rows, temperature=1.0):
    answers = engine.generate(requests(rows, temperature=temperature))
    worst = 0.0
    for prompt, completions in zip(rows, answers, strict=True):
        assert len(completions) == 3
        for completion in completions:
            assert len(completion.logprobs) == len(completion.token_ids) > 0
            assert not set(completion.token_ids) & set(engine.banned_ids)
            expected = expected_logprobs(model, prompt, completion, engine.banned_ids, temperature)
            worst = max(worst, float((torch.tensor(completion.logprobs) - expected).abs().max()))
    return worst


def same(mine, theirs):
    """Equal tokens and, up to rounding, log-probs: vLLM's CPU kernels round differently for a batch of one or two
    rows, and how many rows a step has depends on when the requests arrive."""
    pairs = [pair for row in zip(mine, theirs, strict=True) for pair in zip(*row, strict=True)]
    return all(a.token_ids == b.token_ids and a.logprobs == pytest.approx(b.logprobs, abs=BOUND) for a, b in pairs)


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


def test_same_seed_same_completions_whatever_the_order(parts):
    engine, rows = parts
    engine.sync(load(engine), 0)
    batch = requests(rows)
    first = engine.generate(batch)
    backwards = engine.generate(batch[::-1])[::-1]
    alone = [engine.generate([request])[0] for request in batch]
    assert same(backwards, first) and same(alone, first)
    assert engine.generate(requests(rows, purpose="val")) != first
    assert len({completion.token_ids for completions in first for completion in completions}) == 12


def test_greedy_and_drawn_prompts_in_one_call(engine):
    rows = prompts(engine.processor)
    drawn, greedy = requests(rows[:2]), requests(rows[2:], n=1, temperature=0)
    expected = engine.generate(drawn), engine.generate(greedy)
    seen = []
    mixed = engine.generate([drawn[0], greedy[0], drawn[1], greedy[1]], seen.append)
    assert same([mixed[0], mixed[2]], expected[0]) and same([mixed[1], mixed[3]], expected[1])
    assert seen == [1, 2, 3, 4]


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


def test_other_prompt_ids_than_the_trainers_name_the_row(engine):
    prompt = prompts(engine.processor)[0]
    longer = dataclasses.replace(prompt, token_ids=[*prompt.token_ids, 1])
    with pytest.raises(RolloutError, match=rf"row .*:0: .*{len(prompt.token_ids)} tokens .*{len(longer.token_ids)}"):
        engine.generate(requests([longer]))


def test_a_refused_prompt_names_the_row_and_the_reason(engine):
    prompt = prompts(engine.processor)[1]
    long = dataclasses.replace(prompt, messages=[{"role": "user", "content": "word " * 600}], row_id="train:77")
    with pytest.raises(RolloutError, match=r"row train:77: .*400.*320"):
        engine.generate(requests([long]))
    assert engine.generate(requests([prompt]))  # the server goes on


def test_a_request_that_takes_too_long_names_the_row_and_the_key(engine):
    engine.client.request_timeout_s = 0.001
    try:
        with pytest.raises(RolloutError, match=r"row .*:0: no answer .*0.001 s \(worker.rollout.request_timeout_s\)"):
            engine.generate(requests(prompts(engine.processor)[:1]))
    finally:
        engine.client.request_timeout_s = engine.request_timeout_s


def test_every_route_but_health_wants_the_key_and_the_log_has_none(engine):
    server = engine.server
    assert http.get(f"{server.url}/health", timeout=10).status_code == 200
    for path in ("/v1/chat/completions", "/update_weights", "/collective_rpc", "/start_weight_update"):
        assert http.post(server.url + path, json={}, timeout=10).status_code == 401
        wrong = {"Authorization": "Bearer wrong"}
        assert http.post(server.url + path, json={}, headers=wrong, timeout=10).status_code == 401
    log = server.log_path.read_text()
    assert "Starting vLLM server" in log and server.api_key not in log and "base64" not in log


def test_a_refused_weight_update_says_what_the_server_said(engine):
    engine.client.post("/start_weight_update")
    with pytest.raises(RolloutError, match="/update_weights"):
        engine.client.post("/update_weights", {"update_info": {"path": "/nowhere/weights.safetensors"}})
    model = load(engine)
    engine.sync(model, 0)
    assert largest_difference(engine, model, prompts(engine.processor)) <= BOUND


def test_pictures_travel_without_loss():
    image = picture(30, 20, 1)
    header, _, data = png_data_url(image).partition(",")
    assert header == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(data))).tobytes() == image.tobytes()
