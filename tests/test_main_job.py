"""The main job with real parts: geometry problems, a vLLM server, two steps; then what is in the run folder."""

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_vlm import Run
from tests.tiny import tiny_model
from tests.training.rigs import hashed_reward

ROOT = Path(__file__).parents[1]
GEO3K = ROOT / "tests" / "data" / "geo3k_40.parquet"
FRESH = """
import sys
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

assert "grpo_vlm" not in sys.modules
processor = AutoProcessor.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1])
messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}]
text = processor.apply_chat_template(messages, add_generation_prompt=True)
inputs = processor(text=[text], images=[Image.new("RGB", (84, 56), "red")], return_tensors="pt")
answer = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, suppress_tokens=[model.config.image_token_id])
assert answer.shape[1] == inputs.input_ids.shape[1] + 5
print("answered", processor.decode(answer[0, -5:]))
"""


def varied(reward_inputs: list[dict]) -> list[dict]:
    """The geometry reward, which a random model never earns, plus a part that differs between answers."""
    graded = runpy.run_path(str(ROOT / "rewards" / "geo3k.py"))["compute_score"](reward_inputs)
    extra = hashed_reward(reward_inputs)
    return [
        {**score, "overall": score["overall"] + more["overall"]} for score, more in zip(graded, extra, strict=True)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two rollout steps of 16 geometry prompts x 4 answers through the vLLM server, one update each."""
    folder = tmp_path_factory.mktemp("geo3k") / "run"
    config = {
        "data.train_files": f"{GEO3K}@train",
        "data.prompt_key": "problem",
        "data.format_prompt": str(ROOT / "configs" / "prompts" / "math.jinja"),
        "data.max_prompt_length": 1024,
        "data.max_response_length": 24,
        "data.rollout_batch_size": 16,
        "data.min_pixels": 3136,
        "worker.actor.global_batch_size": 16,
        "worker.actor.micro_batch_size_per_device_for_update": 8,
        "worker.actor.micro_batch_size_per_device_for_experience": 16,
        "worker.actor.model.model_path": str(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())),
        "worker.actor.model.enable_gradient_checkpointing": True,
        "worker.actor.optim.lr": 1e-3,
        "worker.rollout.n": 4,
        "worker.rollout.enforce_eager": True,
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_penalty": "low_var_kl",
        "trainer.max_steps": 2,
        "trainer.save_checkpoint_path": str(folder),
    }
    result = Run(config, reward=varied).train()
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_steps_on_geometry_problems(finished):
    result, records = finished
    assert [record["step"] for record in records] == [1, 2] and result.steps == 2
    for record in records:
        assert math.isfinite(record["actor/pg_loss"]) and record["actor/grad_norm"] > 0.01
        assert record["rollout/logprob_diff/mean"] <= 2e-5, record
        assert record["response_length/max"] <= 24
    assert records[0]["actor/kl_loss"] == 0.0 and records[1]["actor/kl_loss"] > 1e-6


def test_the_vllm_server_was_used(finished):
    log = (finished[0].folder / "vllm.log").read_text()
    assert "vLLM" in log or "vllm" in log
    assert finished[1][0]["timing_s/gen"] > 0


def test_run_folder(finished):
    folder, records = finished[0].folder, finished[1]
    names = {path.name for path in folder.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "tensorboard", "vllm.log", "report.html"} <= names
    assert {"global_step_2", "checkpoint_tracker.json"} <= names and not any(name.endswith(".tmp") for name in names)
    tracker = json.loads((folder / "checkpoint_tracker.json").read_text())
    assert tracker["last_global_step"] == 2 and tracker["last_actor_path"] == "global_step_2/model"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2 * 16 * 4
    assert {"overall", "format", "accuracy"} <= set(samples[0]["scores"])
    first = [sample for sample in samples if sample["step"] == 1]
    assert len({sample["row_id"] for sample in first}) == 16
    groups = [json.loads(line) for line in (folder / "groups.jsonl").open(encoding="utf-8", newline="\n")]
    assert [group["step"] for group in groups] == [1] * 6 + [2] * 6
    by_answer = {(one["step"], one["row_id"], one["response"]): one for one in samples}
    for group in groups:
        assert len(group["answers"]) == 4 and [role for role, _ in group["question"]][-1] == "user"
        assert (
            all((folder / "pictures" / name).stat().st_size > 100 for name in group["pictures"]) and group["pictures"]
        )
        for answer in group["answers"]:
            sample = by_answer[group["step"], group["row_id"], answer["response"]]
            assert (answer["scores"], answer["advantage"]) == (sample["scores"], sample["advantage"])
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert '"steps":[1,2]' in report and all(group["pictures"][0] in report for group in groups)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    read_back = [event.value for event in events.Scalars("reward/overall")]
    assert read_back == pytest.approx([record["reward/overall"] for record in records])


def test_the_saved_model_answers_in_a_fresh_python(finished):
    command = [sys.executable, "-c", FRESH, str(finished[0].folder / "global_step_2" / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "answered" in done.stdout, done.stderr
