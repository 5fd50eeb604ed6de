"""A server on the trainer's GPU: weights arrive through CUDA IPC, sleep drops them, nothing leaks, the second start is
quick. bf16 rounds coarsely, so a right transfer is told from a wrong one by much smaller differences of log-probs."""

import time

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from benchmarks.models import write_model
from grpo_vlm.config import load_config
from grpo_vlm.rollout.sync_packed import IPCSync
from grpo_vlm.rollout.vllm_engine import VLLMEngine
from tests.rollout.helpers import perturb, prompts, requests

pytestmark = pytest.mark.gpu
LEAK_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model("tiny", folder, "cuda")
    return folder


def load(path):
    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).cuda()


def make_engine(path, run_dir):
    items = [f"worker.actor.model.model_path={path}", "worker.rollout.gpu_memory_utilization=0.2"]
    return VLLMEngine(
        load_config(None, [*items, "data.max_prompt_length=256", "data.max_response_length=64"]),
        processor=AutoProcessor.from_pretrained(path),
        model=load(path),
        accelerator=Accelerator(),
        run_dir=run_dir,
    )


@pytest.fixture(scope="module")
def engine(path, tmp_path_factory):
    made = make_engine(path, tmp_path_factory.mktemp("run"))
    made.start()
    yield made
    made.close()


@torch.no_grad()
def difference(engine, model, rows) -> float:
    """Mean difference of log-probs between server and trainer."""
    found = []
    for prompt, completions in zip(rows, engine.generate(requests(rows)), strict=True):
        for completion in completions:
            ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]], device="cuda")
            inputs = {"input_ids": ids, "mm_token_type_ids": (ids == model.config.image_token_id).int()}
            if prompt.pixel_values is not None:
                pixels = prompt.pixel_values.cuda()
                inputs |= {"pixel_values": pixels, "image_grid_thw": prompt.image_grid_thw.cuda()}
            logits = model.eval()(**inputs).logits[0, len(prompt.token_ids) - 1 : -1].float()
            logits[:, engine.banned_ids] = float("-inf")
            ours = logits.log_softmax(-1).gather(-1, ids[0, len(prompt.token_ids) :, None])[:, 0].cpu()
            found.append((torch.tensor(completion.logprobs) - ours).abs())
    return float(torch.cat(found).mean())


def moved(model, seed):
    perturb(model.cpu(), seed)
    return model.cuda()


def test_weights_of_every_step_arrive(engine, path):
    assert isinstance(engine.transfer, IPCSync)
    rows, model = prompts(engine.processor), load(path)
    engine.sync(model, 0)
    for version in (1, 2, 3):
        model = moved(model, version)
        stale = difference(engine, model, rows)
        engine.sync(model, version)
        assert difference(engine, model, rows) < stale / 5


def test_old_features_of_pictures_are_dropped(engine, path):
    rows, model = prompts(engine.processor), load(path)
    engine.sync(model, 0)
    difference(engine, model, rows)
    moved(model.base_model.visual, 4)
    stale = difference(engine, model, rows)
    engine.sync(model, 1)
    assert difference(engine, model, rows) < stale / 5


def test_a_server_that_slept_is_given_all_weights_again(engine, path):
    rows, model = prompts(engine.processor), moved(load(path), 5)
    model.base_model.visual.requires_grad_(False)
    engine.release()  # what other tests have sent does not count
    whole, right = engine.sync(model, 0)["sync/gb"], difference(engine, model, rows)
    awake = torch.cuda.mem_get_info()[0]
    engine.release()
    assert torch.cuda.mem_get_info()[0] > awake + 2**30
    assert engine.sync(model, 0)["sync/gb"] == whole
    assert difference(engine, model, rows) < right * 2 + 1e-3
    engine.release()
    assert difference(engine, model, rows) < right * 2 + 1e-3  # `generate` wakes it


def test_a_server_that_wakes_finds_room_that_the_trainer_only_keeps_at_hand(engine, path):
    model = load(path)
    engine.sync(model, 0)
    engine.release()
    torch.empty(int(0.95 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")  # freed, and kept at hand
    engine.sync(model, 1)
    assert engine.metrics()["rollout/restarts"] == 0


def test_transfers_leave_no_memory_behind(engine, path):
    model = load(path)
    engine.sync(model, 0)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    for version in range(6):
        engine.sync(model, version)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - LEAK_BYTES


def test_the_second_start_of_a_model_finds_the_compile_cache(engine, path, tmp_path):
    """`engine` was the first, or the second of this machine."""
    engine.release()
    second = make_engine(path, tmp_path)
    began = time.perf_counter()
    try:
        second.start()
    finally:
        second.close()
    print(f"second start: {time.perf_counter() - began:.1f} s")
    log = (tmp_path / "vllm.log").read_text()
    assert "Directly load" in log or "torch.compile took" not in log
