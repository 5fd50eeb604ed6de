"""Kill -9 after a checkpoint, run again: the same end as an unbroken run, to the last bit, and every step on file
once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from tests.tiny import tiny_model
from tests.training.rigs import rows

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


def test_a_killed_run_ends_like_an_unbroken_one(tmp_path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path, root, "unbroken"), check=True, env=env, timeout=240)

    slow = "worker.reward.reward_function_kwargs={wait_s: 1.5}"
    broken = tmp_path / "broken"
    process = subprocess.Popen(command(tmp_path, root, "broken", slow), env=env)
    deadline = time.time() + 200
    # killed when step 3 is on file but only step 2 is saved
    while not (broken / "metrics.jsonl").exists() or steps(broken)[-1] < 3:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (broken / "global_step_2").is_dir() and not (broken / "global_step_4").exists()
    assert steps(broken) == [1, 2, 3]

    subprocess.run(command(tmp_path, root, "broken"), check=True, env=env, timeout=240)
    assert steps(broken) == steps(tmp_path / "unbroken") == [1, 2, 3, 4, 5]
    for step in (4, 5):
        ours = load_file(broken / f"global_step_{step}" / "model" / "model.safetensors")
        theirs = load_file(tmp_path / "unbroken" / f"global_step_{step}" / "model" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first = load_file(broken / "global_step_4" / "model" / "model.safetensors")
    assert any(not torch.equal(first[name], ours[name]) for name in first)  # it was still learning

    again = subprocess.run(command(tmp_path, root, "broken"), env=env, timeout=240, capture_output=True, text=True)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert steps(broken) == [1, 2, 3, 4, 5]
