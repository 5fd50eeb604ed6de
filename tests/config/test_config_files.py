"""The shipped configurations pass every check and say what they are said to say."""

from pathlib import Path

import pytest

from grpo_vlm.config import Config, load_and_check, sampling_values, updates_per_step
from grpo_vlm.config.check import get

ROOT = Path(__file__).parents[2]
GEO3K = {
    "geo3k_qwen2_5_vl_3b": "Qwen/Qwen2.5-VL-3B-Instruct",
    "geo3k_qwen2_5_vl_7b": "Qwen/Qwen2.5-VL-7B-Instruct",
    "geo3k_qwen3_vl_4b": "Qwen/Qwen3-VL-4B-Instruct",
    "geo3k_qwen3_vl_8b": "Qwen/Qwen3-VL-8B-Instruct",
}
DEFAULT = {  # the base's values of what the recipes set
    "algorithm.adv_estimator": "grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": True,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.kl_coef": 0.01,
    "algorithm.online_filtering": False,
    "worker.actor.loss_type": "default",
    "worker.actor.loss_avg_mode": None,
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.3,
}
NO_KL = {"algorithm.disable_kl": True, "algorithm.use_kl_loss": False}
RECIPES = {
    "grpo": {},
    "dapo": {
        **NO_KL,
        "algorithm.online_filtering": True,
        "worker.actor.loss_avg_mode": "token",
        "worker.actor.clip_ratio_high": 0.28,
    },
    "gspo": {
        **NO_KL,
        "worker.actor.loss_type": "gspo",
        "worker.actor.loss_avg_mode": "seq",
        "worker.actor.clip_ratio_low": 3e-4,
        "worker.actor.clip_ratio_high": 4e-4,
    },
    "cispo": {
        **NO_KL,
        "worker.actor.loss_type": "cispo",
        "worker.actor.loss_avg_mode": "token",
        "worker.actor.clip_ratio_low": 1.0,
        "worker.actor.clip_ratio_high": 4.0,
    },
    "sapo": {
        **NO_KL,
        "worker.actor.loss_type": "sapo",
        "worker.actor.loss_avg_mode": "seq",
    },
    "dr_grpo": {
        "algorithm.norm_adv_by_std_in_grpo": False,
        **NO_KL,
        "worker.actor.loss_type": "dr_grpo",
        "worker.actor.loss_avg_mode": "seq-mean-token-sum-norm",
        "worker.actor.clip_ratio_high": 0.2,
    },
    "rloo": {
        "algorithm.adv_estimator": "rloo",
        "algorithm.use_kl_loss": False,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_coef": 1e-3,
        "worker.actor.clip_ratio_high": 0.2,
    },
    "reinforce_plus_plus": {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_loss": False,
        "algorithm.kl_penalty": "kl",
        "worker.actor.clip_ratio_high": 0.2,
    },
}


def read(name: str, **launch: int) -> Config:
    config, notices = load_and_check(ROOT / f"configs/{name}.yaml", **launch)
    assert notices == []
    return config


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", GEO3K)
def test_geo3k_has_easyr1s_example_values(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read(name, world_size=world_size)
    actor = config.worker.actor
    assert actor.model.model_path == GEO3K[name]
    assert (config.data.train_files, config.data.val_files) == ("hiyouga/geometry3k@train", "hiyouga/geometry3k@test")
    assert (config.data.rollout_batch_size, actor.global_batch_size, config.worker.rollout.n) == (512, 128, 5)
    assert updates_per_step(config) == 4
    assert (config.algorithm.use_kl_loss, config.algorithm.kl_penalty, config.algorithm.kl_coef) == (
        True,
        "low_var_kl",
        0.01,
    )
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_dual) == (0.2, 0.3, 3.0)
    val = sampling_values(config, validation=True)
    assert (val["temperature"], val["top_p"], val["n"], val["max_tokens"]) == (0.6, 0.95, 1, 2048)


@pytest.mark.parametrize("world_size", [1, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes_change_what_they_say(name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = read(f"recipes/{name}", world_size=world_size)
    assert {key: get(config, key) for key in DEFAULT} == DEFAULT | RECIPES[name]
    assert config.trainer.experiment_name == f"geo3k_{name}"
    assert config.worker.actor.model.model_path == GEO3K["geo3k_qwen2_5_vl_3b"]


def test_all_recipes_are_tested() -> None:
    assert sorted(path.stem for path in (ROOT / "configs/recipes").glob("*.yaml")) == sorted(RECIPES)


def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`make train` makes the data; here empty files stand for it, and the rest is the repository's own."""
    for name in ("configs", "rewards", "grpo_vlm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data/easyvqa").mkdir(parents=True)
    for name in ("train", "test"):
        (tmp_path / f"data/easyvqa/{name}.parquet").touch()
    monkeypatch.chdir(tmp_path)
    config = read("demo")
    assert (config.data.rollout_batch_size, config.worker.rollout.n, config.trainer.max_steps) == (64, 8, 50)
    assert updates_per_step(config) == 1
    assert config.algorithm.disable_kl
    assert (config.worker.actor.optim.lr, config.worker.actor.optim.weight_decay) == (4e-4, 0)
    val = sampling_values(config, validation=True)
    assert (val["n"], val["temperature"], val["max_tokens"]) == (4, 1.0, 16)
    assert (config.trainer.val_before_train, config.trainer.val_freq, config.trainer.save_freq) == (True, -1, 25)
