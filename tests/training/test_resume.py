"""A run that is killed, or stopped by a scheduler's signal, and run again: the same end as an unbroken run, to the
last bit, and every step on file once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from grpo_vlm.report import checkpoint_steps
from tests.tiny import tiny_model
from tests.training.rigs import rows
from tests.training.saved import files

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
SLOW = "worker.reward.reward_function_kwargs={wait_s: 1.5}"
ROOT = Path(__file__).parents[2]
REWARD = """
import hashlib, time

def score(reward_inputs, wait_s=0.0):
    time.sleep(wait_s)
    digests = [hashlib.blake2b(item["response"].encode(), digest_size=2).digest() for item in reward_inputs]
    return [{"overall": int.from_bytes(digest, "big") / 65535} for digest in digests]
"""


def command(place: Path, root: Path, run: str, *overrides: str) -> list[str]:
    for number, row in enumerate(made := rows(12)):
        for index, picture in enumerate(row["images"]):
            picture.save(place / f"{number}-{index}.png")
        row["images"] = [f"{number}-{index}.png" for index in range(len(row["images"]))]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (place / "reward.py").write_text(REWARD)
    config = {
        "data": {
            "train_files": str(place / "rows.jsonl"),
            "image_dir": str(place),
            "prompt_key": "problem",
            "min_pixels": 3136,
            "max_pixels": 50176,
            "max_prompt_length": 256,
            "max_response_length": 8,
            "rollout_batch_size": 4,
        },
        "algorithm": {"disable_kl": True},
        "worker": {
            "actor": {
                "global_batch_size": 2,
                "micro_batch_size_per_device_for_update": 4,
                "micro_batch_size_per_device_for_experience": 4,
                "model": {"model_path": str(tiny_model("qwen2_5_vl", root)), "enable_gradient_checkpointing": False},
                "optim": {"lr": 1e-3, "lr_scheduler_type": "cosine", "lr_warmup_steps": 1},
            },
            "rollout": {"name": "transformers", "n": 4},
            "reward": {"reward_function": f"{place / 'reward.py'}:score"},
        },
        "trainer": {"max_steps": 5, "save_freq": 2, "logger": ["file"], "save_checkpoint_path": str(place / run)},
    }
    (place / "config.yaml").write_text(yaml.safe_dump(config))
    return [sys.executable, str(ROOT / "train.py"), "--config", str(place / "config.yaml"), *overrides]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """The folder of a run to the end."""
    place, root = tmp_path_factory.mktemp("unbroken"), tmp_path_factory.getbasetemp()
    subprocess.run(command(place, root, "run"), check=True, env=ENV, timeout=240)
    return place / "run"


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGUSR1, signal.SIGKILL))]
)
def test_a_stopped_run_ends_like_an_unbroken_one(tmp_path, tmp_path_factory, unbroken, number):
    root, broken = tmp_path_factory.getbasetemp(), tmp_path / "broken"
    process = subprocess.Popen(command(tmp_path, root, "broken", SLOW), env=ENV)
    deadline = time.time() + 200
    while not (broken / "metrics.jsonl").exists() or steps(broken)[-1] < 3:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    time.sleep(0.7)  # step 4 waits for its rewards: step 3 is on file but only step 2 is saved
    began = time.time()
    process.send_signal(number)
    code = process.wait(60)
    if number == signal.SIGKILL:
        assert checkpoint_steps(broken) == [2] and steps(broken) == [1, 2, 3]
    else:
        assert code == 0 and time.time() - began < 20
        assert checkpoint_steps(broken) == [2, 3] and steps(broken) == [1, 2, 3]

    subprocess.run(command(tmp_path, root, "broken"), check=True, env=ENV, timeout=240)
    assert steps(broken) == steps(unbroken) == [1, 2, 3, 4, 5]
    for step in (4, 5):
        assert files(broken, step) == files(unbroken, step)
    assert files(broken, 4)["model/model.safetensors"] != files(broken, 5)["model/model.safetensors"]
    assert (broken / "samples.jsonl").read_text() == (unbroken / "samples.jsonl").read_text()

    if number == signal.SIGTERM:
        again = subprocess.run(command(tmp_path, root, "broken"), env=ENV, timeout=240, capture_output=True, text=True)
        assert again.returncode == 0 and "nothing to do" in again.stdout
        assert steps(broken) == [1, 2, 3, 4, 5]
