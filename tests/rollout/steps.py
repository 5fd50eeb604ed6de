"""Rollout steps that are the same in every process: step k has its own weights and its own requests."""

import dataclasses
import json
import sys
from pathlib import Path

import psutil
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import load_config
from grpo_vlm.rollout.types import Request, Sampling, request_seed
from grpo_vlm.rollout.vllm_engine import VLLMEngine
from tests.rollout.helpers import perturb, prompts

SHORT, LONG = 4, 160  # tokens: the short answers are there while the server works on the long ones


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype="float32")


def make_engine(path, run_dir, model, *, accelerator=None, **rollout):
    """An engine that is not started. rollout: keys of worker.rollout."""
    items = [f"worker.rollout.{name}={value}" for name, value in rollout.items()]
    config = load_config(
        None,
        [
            f"worker.actor.model.model_path={path}",
            "data.max_prompt_length=160",
            f"data.max_response_length={LONG}",
            "worker.rollout.cpu_kv_cache_gb=0.5",
            *items,
        ],
    )
    return VLLMEngine(
        config,
        processor=AutoProcessor.from_pretrained(path),
        model=model,
        accelerator=accelerator or Accelerator(cpu=True),
        run_dir=Path(run_dir),
        warn=lambda text: print(text, file=sys.stderr, flush=True),
    )


def set_weights(model, path, step):
    """The weights that step `step` samples with."""
    model.load_state_dict(load(path).state_dict())
    perturb(model, step)


def step_requests(processor, step):
    """Four prompts with no, one and two pictures; two are answered quickly and two slowly."""
    rows = prompts(processor)
    return [
        Request(row, Sampling(n=2, max_tokens=tokens, ignore_eos=True), request_seed(0, step, row.row_id, "train"))
        for row, tokens in zip(rows, (SHORT, LONG, SHORT, LONG), strict=True)
    ]


def server_processes(guard_pid):
    """The guard of a server and all processes below it: API process, engine, ..."""
    guard = psutil.Process(guard_pid)
    return [guard, *guard.children(recursive=True)]


def api_process(guard_pid):
    (api,) = psutil.Process(guard_pid).children()
    return api


def engine_process(guard_pid):
    (engine,) = [p for p in server_processes(guard_pid) if p.name().startswith("VLLM::Engine")]
    return engine


def gone(processes):
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def plain(completions):
    """Completions as JSON gives them back, every bit included."""
    return json.loads(json.dumps([[[c.token_ids, c.logprobs, c.version] for c in row] for row in completions]))


def too_long(request):
    """The request with a prompt that no context of these tests can hold."""
    ids = list(request.prompt.token_ids)
    prompt = dataclasses.replace(request.prompt, token_ids=ids + ids[-1:] * 400, row_id="train:77")
    return dataclasses.replace(request, prompt=prompt)
