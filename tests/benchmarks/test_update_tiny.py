"""The benchmarks run, on a CPU with the demo model: what they write is there, adds up, and is about the same work."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import measure, memory, models, step, summary, workload
from benchmarks.workload import Workload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """The JSON of one command: ours with both looks into a step, then TRL."""
    out = tmp_path_factory.mktemp("update") / "update.json"
    command = [sys.executable, "benchmarks/update.py", "--device", "cpu", "--model", "demo", "--prompts", "3"]
    command += ["--groups", "2", "--warmup", "1", "--steps", "2", "--trl-steps", "1", "--profile", "--sync-debug"]
    run = subprocess.run(
        [*command, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(out.read_text())


def test_every_number_is_there(written):
    assert written["complete"] and written["gpu"] is None
    for name in ("seconds_ours", "seconds_trl_step", "seconds_trl_wall", "ratio_to_trl_step", "ratio_to_trl_wall"):
        assert written[name] > 0, name
    for name in ("ratio_to_floor", "mfu", "peak_gb_ours", "peak_gb_trl"):
        assert written[name] is None, f"{name}: a CPU has none"
    assert written["command"].startswith("python benchmarks/update.py") and written["versions"]["torch"]
    assert written["timed_steps"] == 2 and written["timed_steps_trl"] == 1
    assert written["ratio_to_trl_wall"] == pytest.approx(written["seconds_trl_wall"] / written["seconds_ours"])


def test_a_step_is_measured_once(written):
    rows = written["raw"]["ours"]["steps"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["wall_s"] >= row["step_s"] >= row["device_s"]["update_actor"] > 0
        assert row["step_s"] >= row["phases_s"]["update_actor"]
    timed = sorted(row["wall_s"] for row in rows[1:3])
    assert written["seconds_ours"] == pytest.approx(sum(timed) / 2)
    assert written["raw"]["ours"]["profile"]["classes"] and "synchronisations" in written["raw"]["ours"]


def test_both_train_on_the_same_rollouts(written):
    ours, trl = (written["raw"][name]["steps"] for name in ("ours", "trl"))
    for mine, theirs in zip(ours, trl, strict=False):
        for name in ("prompt_tokens", "scored_tokens"):
            assert mine[name] == theirs[name] > 0
    assert ours[0]["metrics"]["group/zero_variance_share"] == 0


def test_whole_steps(tmp_path):
    """In this process, with the engine that needs no server."""
    options = argparse.Namespace(
        out=tmp_path / "step.json",
        device="cpu",
        model="demo",
        engine="transformers",
        prompts=2,
        group=2,
        image_tokens=9,
        answer_tokens=3,
        steps=1,
        warmup=1,
        row_tokens=0,
        checkpointing=False,
        server_share=0.3,
        models=tmp_path,
        limit_s=100.0,
        overrides=[],
    )
    result = measure.Result(options.out, numbers={})
    with result.guarded():
        step.measure(options, result)
    found = json.loads(options.out.read_text())
    assert found["complete"] and len(found["steps"]) == 2
    assert sum(found["numbers"]["phases_share"].values()) == pytest.approx(1)
    assert found["numbers"]["rollouts_per_s_per_gpu"] == pytest.approx(4 / found["steps"][1]["wall_s"])
    assert found["numbers"]["phases_s"]["gen"] > 0


def test_a_failure_leaves_the_steps_before_it(tmp_path):
    result = measure.Result(tmp_path / "result.json", part="ours")
    result.values["steps"].append({"step": 1, "wall_s": 2.0})
    with pytest.raises(ZeroDivisionError), result.guarded():
        _ = 1 / 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["steps"] == [{"step": 1, "wall_s": 2.0}]
    assert not found["complete"] and "ZeroDivisionError" in found["error"]


def test_growth_is_counted_after_the_fifth_step():
    rows = [{"step": number, "graphs": graphs} for number, graphs in enumerate((0, 4, 6, 6, 9, 9, 10), start=1)]
    assert summary.growth(rows, "graphs", after=5) == 1
    assert summary.growth(rows[:5], "graphs", after=5) is None


def test_random_models_have_qwens_ids():
    processor = models.build_processor()
    config = models.model_config("3b")
    assert processor.tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id == 151655
    assert processor.tokenizer.eos_token_id == config.text_config.eos_token_id == 151645
    assert len(processor.tokenizer) <= config.text_config.vocab_size == 151936
    text = "What colour is it? 12\n"
    ids = processor.tokenizer(text)["input_ids"]
    assert processor.tokenizer.decode(ids) == text and max(ids) < 4000


def test_the_workload_is_what_it_says():
    work = Workload("tiny", prompts=2, group=3, image_tokens=64, shortest=5, longest=9)
    drawn = workload.answers(work, 1)
    assert [len(ids) for ids in drawn] == [len(ids) for ids in workload.answers(work, 1)]
    assert drawn == workload.answers(work, 1) != workload.answers(work, 2)
    assert len(drawn) == 3 and all(5 <= len(ids) <= 9 for ids in drawn)
    asked = workload.questions(work, 2)[1]
    assert asked == workload.questions(work, 3)[1]
    processor = models.build_processor()
    content = [{"type": "image"}, {"type": "text", "text": asked.text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    length = len(processor.tokenizer(prompt)["input_ids"]) - 1 + work.image_tokens
    assert work.prompt_limit - 60 <= length <= work.prompt_limit


@pytest.mark.slow
def test_plans_are_put_beside_measurements(tmp_path):
    """Full training and LoRA, each in its own process; a CPU has no peak to measure."""
    arguments = ["--device", "cpu", "--models", "demo", "--prompts", "2", "--group", "2", "--row-tokens", "512"]
    memory.main([*arguments, "--warmup", "1", "--steps", "1", "--out", str(tmp_path / "memory.json")])
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["complete"] and [case["lora"] for case in found["cases"]] == [False, True]
    full, lora = found["cases"]
    assert full["planned_gb"]["optimizer states"] > lora["planned_gb"]["optimizer states"] > 0
    assert all(case["measured_update_s"] > 0 and case["measured_peak_gb"] is None for case in found["cases"])
