"""Weights in real CPU servers that have read none: after each transfer the server's log-probs are the trainer's."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from grpo_vlm.config import Config
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import sync
from grpo_vlm.rollout.embedded import TransformersEngine
from grpo_vlm.rollout.probe import SyncProbe
from tests.rollout.helpers import expected_logprobs, perturb, prompts, requests

BOUND = 2e-5


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def parts(request, vllm_engine):
    engine = vllm_engine(request.param)
    return engine, prompts(engine.processor)


@pytest.fixture
def engine(vllm_engine):
    return vllm_engine("qwen2_5_vl")


def load(engine) -> nn.Module:
    return AutoModelForImageTextToText.from_pretrained(engine.settings.model_path, dtype=torch.float32)


def difference(engine, model, rows) -> float:
    """Mean difference of log-probs over a batch with one picture, none, and two."""
    differences = []
    for prompt, completions in zip(rows, engine.generate(requests(rows)), strict=True):
        for completion in completions:
            expected = expected_logprobs(model, prompt, completion, engine.banned_ids)
            differences.append((torch.tensor(completion.logprobs) - expected).abs())
    return float(torch.cat(differences).mean())


def train_step(model, optimizer, row) -> None:
    """One step away from a prompt's own tokens, through the tower."""
    ids = torch.tensor([row.token_ids])
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int(), "labels": ids}
    model.train()(**inputs, pixel_values=row.pixel_values, image_grid_thw=row.image_grid_thw).loss.neg().backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def without(client, *paths):
    """Requests to these routes are not made."""
    client.post = (
        lambda path, *args, **params: None if path in paths else type(client).post(client, path, *args, **params)
    )
    try:
        yield
    finally:
        del client.post


def test_after_each_training_step_the_server_has_the_weights(parts):
    engine, rows = parts
    model = load(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for version in (1, 2, 3):
        towers = [parameter.clone() for name, parameter in model.named_parameters() if "visual" in name]
        train_step(model, optimizer, rows[2])
        moved = [parameter for name, parameter in model.named_parameters() if "visual" in name]
        assert all((old != new).any() for old, new in zip(towers, moved, strict=True))
        if version > 1:
            assert difference(engine, model, rows) > 50 * BOUND  # the server still has the old weights
        metrics = engine.sync(model, version)
        assert difference(engine, model, rows) <= BOUND
        assert metrics["sync/gb"] > 0.005 and metrics["sync/seconds"] > 0


def test_without_the_encoder_reset_old_features_are_used(parts):
    engine, rows = parts
    model = load(engine)
    engine.sync(model, 0)
    assert difference(engine, model, rows) <= BOUND
    perturb(model.base_model.visual, 3)
    with without(engine.client, "/reset_encoder_cache"):
        engine.sync(model, 1)
    assert difference(engine, model, rows) > 50 * BOUND
    engine.sync(model, 2)
    assert difference(engine, model, rows) <= BOUND


def test_a_frozen_tower_is_sent_once_and_its_features_are_kept(engine):
    rows, model = prompts(engine.processor), load(engine)
    model.base_model.visual.requires_grad_(False)
    engine.transfer.forget()
    whole = engine.sync(model, 0)["sync/gb"]
    tower = sum(parameter.nbytes for parameter in model.base_model.visual.parameters()) / 1e9
    perturb(model.base_model.language_model, 5)
    with without(engine.client, "/reset_encoder_cache"):  # it is not asked for
        assert engine.sync(model, 1)["sync/gb"] == pytest.approx(whole - tower)
    assert difference(engine, model, rows) <= BOUND
    engine.transfer.forget()
    assert engine.sync(model, 2)["sync/gb"] == pytest.approx(whole)
    assert difference(engine, model, rows) <= BOUND


def test_parts_that_vllm_fuses_are_sent_together(engine):
    rows, model = prompts(engine.processor), load(engine)
    engine.sync(model, 0)
    model.requires_grad_(False)
    layer = model.base_model.language_model.layers[0]
    for moving in (layer.self_attn.k_proj, layer.mlp.up_proj):
        moving.requires_grad_(True)
        perturb(moving, 6)
    engine.sync(model, 1)
    assert difference(engine, model, rows) <= BOUND


def test_lora_adapters_are_merged_on_the_way(engine):
    from peft import LoraConfig, get_peft_model

    rows, config = prompts(engine.processor), LoraConfig(r=4, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(load(engine), config)
    engine.transfer.forget()
    whole = engine.sync(model, 0)["sync/gb"]
    assert difference(engine, model, rows) <= BOUND
    for part in (parameter for name, parameter in model.named_parameters() if ".lora_" in name):
        nn.init.normal_(part, std=0.1)
    assert difference(engine, model, rows) > 50 * BOUND
    assert engine.sync(model, 1)["sync/gb"] < whole  # the embeddings do not train
    assert difference(engine, model, rows) <= BOUND


def test_several_files_make_one_update(engine, monkeypatch):
    rows, model = prompts(engine.processor), load(engine)
    perturb(model, 7)
    monkeypatch.setattr(sync, "CHUNK_BYTES", 200_000)
    engine.sync(model, 1)
    assert difference(engine, model, rows) <= BOUND


def test_a_missing_weight_is_named(engine, monkeypatch):
    model = load(engine)
    engine.transfer.forget()
    named = sync.weights
    monkeypatch.setattr(sync, "weights", lambda *args: [w for w in named(*args) if "layers.1.mlp.down" not in w.name])
    engine.max_restarts, restarts = engine.restarts, engine.max_restarts
    try:
        with pytest.raises(
            RolloutError, match=r"1 weights did not come from the trainer: .*layers\.1\.mlp\.down_proj"
        ):
            engine.sync(model, 1)
    finally:
        engine.max_restarts = restarts
    monkeypatch.undo()
    engine.sync(model, 2)
    assert difference(engine, model, prompts(engine.processor)) <= BOUND


def test_what_a_broken_transfer_has_left_behind_does_not_enter_the_next(engine, monkeypatch):
    """It ends in the middle of a fused layer: what came of it must not be counted together with what comes next."""
    rows, model = prompts(engine.processor), load(engine)
    engine.sync(model, 0)
    perturb(model, 8)
    monkeypatch.setattr(sync, "CHUNK_BYTES", 1)
    posted = engine.client.post

    def broken(path, body=None, **params):
        if path == "/update_weights" and "stop" in state:
            raise RolloutError("the network broke")
        if path == "/update_weights" and state.pop("count", None) is None:
            state["stop"] = True
        return posted(path, body, **params)

    state: dict = {"count": 1}
    monkeypatch.setattr(engine.client, "post", broken)
    with pytest.raises(RolloutError, match="the network broke"):
        engine.transfer.send(model)
    monkeypatch.undo()
    perturb(model, 9)
    engine.sync(model, 2)
    assert difference(engine, model, rows) <= BOUND


def test_the_probe_stops_a_run_whose_server_has_other_weights(engine):
    rows, model = prompts(engine.processor), load(engine)
    probe = SyncProbe(Config(), engine, engine.accelerator)

    def score(prompt, completion):
        return expected_logprobs(model, prompt, completion, engine.banned_ids)

    assert probe.due(7)  # of a resumed run, the first sync
    engine.sync(model, 1)
    assert 0 <= probe.check(rows[2], score, 7)["sync/probe_diff"] <= BOUND
    assert [step for step in range(1, 101) if probe.due(step)] == [1, 2, 3, 50, 100]
    perturb(model, 10)
    message = (
        r"sync check at step 8, row rows:2: after the file sync .* differ by \S+ on average .* 16 tokens; the tol"
    )
    with pytest.raises(RolloutError, match=message + r"erance is 0\.001 \(float32\)"):
        probe.check(rows[2], score, 8)
    with pytest.raises(RolloutError, match="differ by nan"):
        probe.check(rows[2], lambda *_: [float("nan")] * 16, 8)
    probe.tolerance = 100.0
    probe.check(rows[2], score, 8)
    probe.every = -1
    assert not probe.due(1)
    embedded = TransformersEngine(processor=engine.processor, model=model, accelerator=engine.accelerator)
    assert not SyncProbe(Config(), embedded, engine.accelerator).due(1)
