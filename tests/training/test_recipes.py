"""Every recipe of configs/recipes trains: two steps of a tiny model with the embedded engine."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_vlm import Run
from tests.tiny import tiny_model
from tests.training.rigs import rows

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs/recipes").glob("*.yaml"))
SMALL = {
    "data.min_pixels": 3136,
    "data.max_pixels": 50176,
    "data.max_prompt_length": 512,
    "data.max_response_length": 8,
    "data.rollout_batch_size": 4,
    "data.mini_rollout_batch_size": 4,
    "worker.actor.global_batch_size": 2,  # two updates, so that ratios differ from 1
    "worker.actor.max_token_len_per_gpu": "null",
    "worker.actor.model.enable_gradient_checkpointing": False,
    "worker.actor.optim.lr": 1e-3,
    "worker.rollout.name": "transformers",
    "worker.rollout.n": 4,
    "worker.rollout.enforce_eager": True,
    "trainer.max_steps": 2,
    "trainer.val_freq": -1,
    "trainer.save_freq": -1,
    "trainer.val_before_train": False,
    "trainer.val_generations_to_log": 0,
    "trainer.max_try_make_batch": 50,
    "trainer.logger": "[file]",
}


# In a file of its own, so that the reward's workers import nothing heavy.
REWARD = """
import hashlib


def scored(reward_inputs):
    digests = [hashlib.blake2b(item["response"].encode(), digest_size=2).digest() for item in reward_inputs]
    numbers = [int.from_bytes(digest, "big") / 65535 for digest in digests]
    return [{"overall": number, "accuracy": float(number > 0.5)} for number in numbers]
"""


@pytest.mark.parametrize("name", RECIPES)
def test_two_steps_of_each_recipe(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "reward.py").write_text(REWARD)
    values = SMALL | {
        "worker.actor.model.model_path": tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()),
        "worker.reward.reward_function": f"{tmp_path / 'reward.py'}:scored",
        "trainer.save_checkpoint_path": tmp_path / "run",
    }
    run = Run(
        ROOT / f"configs/recipes/{name}.yaml",
        [f"{key}={value}" for key, value in values.items()],
        train_rows=rows(12),
        val_rows=rows(2),
    )
    assert run.train().steps == 2
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["step"] > 0]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        assert math.isfinite(record["actor/pg_loss"]) and record["actor/grad_norm"] > 0
    with_kl = not run.config.algorithm.disable_kl
    in_loss = with_kl and run.config.algorithm.use_kl_loss
    for record in steps:
        assert ("actor/kl_loss" in record) == in_loss
        assert ("actor/kl_penalty" in record) == (with_kl and not in_loss)
    start = load_file(Path(run.config.worker.actor.model.model_path) / "model.safetensors")
    end = load_file(tmp_path / "run/global_step_2/model/model.safetensors")
    moved = [not torch.equal(start[key], end[key]) for key in start]
    assert sum(moved) > 0.9 * len(moved)
