"""Real CPU servers of other kinds than the trainer's own: one that runs already, one that is given adapters alone."""

import dataclasses
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import Config, load_config
from grpo_vlm.rollout.probe import SyncProbe
from grpo_vlm.rollout.server import choose_port
from grpo_vlm.rollout.vllm_engine import VLLMEngine
from tests.rollout.helpers import perturb, prompts
from tests.rollout.test_sync_live import BOUND, difference
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
KEY = "a key of twenty letters"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())


def settings(path):
    items = (f"actor.model.model_path={path}", "rollout.cpu_kv_cache_gb=0.5")
    return [*(f"worker.{item}" for item in items), "data.max_prompt_length=256", "data.max_response_length=64"]


def engine_of(path, run_dir, *items):
    return VLLMEngine(
        load_config(None, [*settings(path), *items]),
        processor=AutoProcessor.from_pretrained(path),
        model=load(path),
        accelerator=Accelerator(cpu=True),
        run_dir=run_dir,
    )


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)


def serve(path, port, log):
    """A user's own server."""
    command = [sys.executable, "-m", "grpo_vlm.rollout.serve", "--log", str(log), *settings(path)]
    return subprocess.Popen(
        [*command, f"worker.rollout.port={port}"], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )


def external(url):
    return ["placement=external", f"base_url={url}"]


@pytest.fixture
def own_server(path, tmp_path, monkeypatch):
    """An engine of a server that its user starts, and what starts it (again)."""
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", KEY)
    port, log, running = choose_port(None), tmp_path / "server.log", []

    def start():
        while running:
            end(running.pop())
        running.append(serve(path, port, log))
        engine.server and engine.server.start()  # until it answers

    items = external(f"http://127.0.0.1:{port}")
    engine = engine_of(path, tmp_path / "run", *(f"worker.rollout.{item}" for item in items))
    start()
    yield engine, start
    engine.close()
    end(running.pop())


def end(server):
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=20)


def test_a_server_that_its_user_starts_again_is_given_all_weights_again(path, own_server):
    """Before a rollout, before a sync, and in the middle of one: completions are those of the trainer's weights all
    the same, those that do not train included, and a probe looks at each new server."""
    engine, start_again = own_server
    said = []
    engine.warn = said.append
    engine.start()
    probe = SyncProbe(Config(), engine, engine.accelerator)
    rows, model = prompts(engine.processor), load(path)
    perturb(model, 1)  # so that the model's folder is of no help
    model.model.visual.requires_grad_(False)
    model.lm_head.requires_grad_(False)

    whole = engine.sync(model, 1)["sync/gb"]
    assert engine.sync(model, 2)["sync/gb"] < whole and not said
    probe.checked = engine.servers
    start_again()
    assert difference(engine, model, rows) <= BOUND
    assert engine.metrics()["rollout/restarts"] == 1 and "holds other weights" in said[0] and probe.due(90)

    said.clear()
    probe.checked = engine.servers
    start_again()
    assert engine.sync(model, 3)["sync/gb"] == whole
    assert difference(engine, model, rows) <= BOUND
    assert engine.metrics()["rollout/restarts"] == 1 and "does not hold the weights" in said[0] and probe.due(90)

    said.clear()
    probe.checked = engine.servers
    finish = engine.transfer._finish
    engine.transfer._finish = lambda chosen: (start_again(), setattr(engine.transfer, "_finish", finish))
    engine.sync(model, 4)
    assert difference(engine, model, rows) <= BOUND
    assert engine.metrics()["rollout/restarts"] == 1 and "holds other weights" in said[0] and probe.due(90)


def test_another_run_waits_until_the_answers_are_made(path, own_server):
    """Two runs at one server, which is meant for one: no answer is made with the other run's weights."""
    engine, _ = own_server
    other = engine_of(path, engine.run_dir, *(f"worker.rollout.{item}" for item in external(engine.rollout.base_url)))
    engine.warn = other.warn = lambda text: None
    engine.max_restarts = other.max_restarts = 20  # each time that it finds the other's weights counts as one
    engine.start()
    other.start()
    rows = prompts(engine.processor)
    models = [load(path), load(path)]
    for seed, model in enumerate(models):
        perturb(model, seed)
    for version in range(2):
        engine.sync(models[0], version)
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(difference, engine, models[0], rows * 4)
            other.sync(models[1], version)
            assert difference(other, models[1], rows) <= BOUND and found.result() <= BOUND


def test_a_server_that_runs_already_is_used_and_left_running(path, tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", KEY)
    port, log = choose_port(None), tmp_path / "server.log"
    server = serve(path, port, log)
    items = ["worker.rollout.placement=external", f"worker.rollout.base_url=http://127.0.0.1:{port}"]
    engine = engine_of(path, tmp_path / "run", *items)
    try:
        engine.start()  # waits for it
        rows, model = prompts(engine.processor), load(path)
        for version in (1, 2):
            perturb(model, version)
            engine.sync(model, version)
            assert difference(engine, model, rows) <= BOUND
        engine.close()
        assert server.poll() is None and not (tmp_path / "run" / "vllm.log").exists()
        assert requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).status_code == 401
        assert KEY not in log.read_text()
    finally:
        server.send_signal(signal.SIGTERM)
        said, _ = server.communicate(timeout=20)
    assert server.returncode == 0 and f"ready at http://127.0.0.1:{port}" in said and KEY not in said


def test_the_server_computes_with_the_adapter_of_the_last_sync(path, tmp_path):
    model = get_peft_model(load(path), LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))
    engine = engine_of(path, tmp_path)
    engine.settings = dataclasses.replace(engine.settings, lora_rank=4)  # the configuration has no adapters yet
    try:
        engine.start()
        rows = prompts(engine.processor)
        for version in (1, 2):
            for name, parameter in model.named_parameters():
                if ".lora_" in name:  # the tower has some, too
                    nn.init.normal_(parameter, std=0.1)
            metrics = engine.sync(model, version)
            assert difference(engine, model, rows) <= BOUND
            assert metrics["sync/gb"] < 1e-3 and engine.transfer.backend == "adapter"
    finally:
        engine.close()
