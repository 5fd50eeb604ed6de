"""Runs with the embedded engine: the notebook form, validation, several updates per rollout batch, several
processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_vlm import ConfigError, DataError, RewardError, Run
from grpo_vlm.training.evaluate import validate
from tests.training.rigs import hashed_reward, largest_difference, parameters, rows, session, settings


def records(folder: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").open(encoding="utf-8", newline="\n")]


def test_in_a_notebook(tmp_path, tmp_path_factory):
    base = settings(tmp_path_factory.getbasetemp(), tmp_path / "run")

    def favourite(completions, prompts, answer=None, **columns):  # TRL's form, defined here
        return [float(len(completion[0]["content"]) % 3) for completion in completions]

    result = Run(base, train_rows=rows(8), val_rows=rows(4), reward=favourite).train()
    assert result.folder == tmp_path / "run" and result.steps == 1
    assert set(result.before) == set(result.after) and "val/reward_score" in result.before
    assert (tmp_path / "run" / "global_step_1" / "model" / "model.safetensors").is_file()


def test_validation_saving_and_rates_count_rollout_steps(tmp_path, tmp_path_factory):
    changes = {
        "data.num_workers": 1,
        "worker.actor.global_batch_size": 2,
        "worker.actor.ppo_epochs": 2,
        "worker.actor.optim.lr_warmup_steps": 2,
        "worker.rollout.val_override_config": {"n": 2, "temperature": 0.5},
        "trainer.max_steps": 4,
        "trainer.val_freq": 2,
        "trainer.save_freq": 2,
        "trainer.val_before_train": True,
    }
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    Run(config, train_rows=rows(12), val_rows=rows(3), reward=hashed_reward).train()
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == [0, 1, 2, 3, 4]
    assert [record["step"] for record in found if "val/reward_score" in record] == [0, 2, 4]
    assert [record["actor/lr"] for record in found[1:]] == pytest.approx([0.5e-4, 1e-4, 1e-4, 1e-4])
    assert sorted(path.name for path in (tmp_path / "run").glob("global_step_*")) == ["global_step_2", "global_step_4"]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert sum(sample["split"] == "val" and sample["step"] == 2 for sample in samples) == 3 * 2
    assert all(record["rollout/logprob_diff/mean"] <= 2e-5 for record in found[1:])


def test_val_only_trains_nothing(tmp_path, tmp_path_factory):
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **{"trainer.val_only": True})
    result = Run(config, train_rows=rows(8), val_rows=rows(4), reward=hashed_reward).train()
    assert [record["step"] for record in records(tmp_path / "run")] == [0]
    assert result.before == result.after and not list((tmp_path / "run").glob("global_step_*"))


def test_kl_in_the_reward_lowers_it_once_the_policy_has_moved(tmp_path, tmp_path_factory):
    changes = {
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": False,
        "algorithm.kl_penalty": "low_var_kl",
        "algorithm.kl_coef": 0.5,
        "worker.actor.optim.lr": 1e-2,
        "trainer.max_steps": 2,
    }
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    Run(config, train_rows=rows(8), reward=hashed_reward).train()
    first, second = records(tmp_path / "run")
    assert first["actor/kl_penalty"] == 0.0 and first["critic/rewards/mean"] == pytest.approx(
        first["critic/score/mean"]
    )
    assert second["actor/kl_penalty"] > 0.0 and second["critic/rewards/mean"] < second["critic/score/mean"]


def test_a_frozen_vision_tower_does_not_move(tmp_path, tmp_path_factory):
    changes = {"worker.actor.model.freeze_vision_tower": True, "worker.actor.optim.lr": 1e-3}
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)) as parts:
        before = parameters(parts.trainer)
        parts.train()
        after = parameters(parts.trainer)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("visual" in name for name in moved)


def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing(tmp_path, tmp_path_factory):
    changes = {"worker.actor.optim.lr": 1e-2, "worker.actor.optim.weight_decay": 0.5}
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)) as parts:
        loss = parts.trainer.learner.loss
        parts.trainer.learner.loss = lambda *args: loss(*args) * float("nan")
        before = parameters(parts.trainer)
        parts.train()
        assert all(torch.equal(before[name], value) for name, value in parameters(parts.trainer).items())
    assert records(tmp_path / "run")[0]["actor/skipped_updates"] == 1.0


def test_resume_takes_the_new_rate_and_refuses_another_number_of_updates(tmp_path, tmp_path_factory):
    root, folder = tmp_path_factory.getbasetemp(), tmp_path / "run"
    two = {"trainer.max_steps": 2, "trainer.save_freq": 1, "trainer.val_before_train": False}
    Run(settings(root, folder, **two), train_rows=rows(12), reward=hashed_reward).train()
    three = {**two, "trainer.max_steps": 3, "worker.actor.optim.lr": 5e-3}
    with pytest.raises(ConfigError, match="updates per rollout step"):
        Run(
            settings(root, folder, **three, **{"worker.actor.ppo_epochs": 2}),
            train_rows=rows(12),
            reward=hashed_reward,
        ).train()
    Run(settings(root, folder, **three), train_rows=rows(12), reward=hashed_reward).train()
    assert [record["step"] for record in records(folder)] == [1, 2, 3]
    assert [record["actor/lr"] for record in records(folder)] == pytest.approx([1e-4, 1e-4, 5e-3])


def test_a_run_that_ended_before_its_first_checkpoint_begins_again(tmp_path, tmp_path_factory):
    changes = {"trainer.max_steps": 2, "worker.reward.on_error": "raise"}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)

    class Stop(Exception):
        pass

    def fails_at_step_two(reward_inputs, calls=[]):  # noqa: B006  # counts its own calls: a trial, step 1, step 2
        calls.append(1)
        if len(calls) == 3:
            raise Stop
        return hashed_reward(reward_inputs)

    with pytest.raises(RewardError, match="Stop"):
        Run(config, train_rows=rows(8), reward=fails_at_step_two).train()
    assert [record["step"] for record in records(tmp_path / "run")] == [1]
    Run(config, train_rows=rows(8), reward=hashed_reward).train()
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2]
    kept = (tmp_path / "run" / "metrics.superseded.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1]


def test_overrides_apply_to_a_config_object_and_empty_rows_are_not_the_files(tmp_path, tmp_path_factory):
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run")
    assert Run(config, ["trainer.max_steps=7"], train_rows=rows(4), reward=hashed_reward).config.trainer.max_steps == 7
    with pytest.raises(DataError):
        Run(config, train_rows=[], reward=hashed_reward).train()


def test_validation_takes_as_many_rounds_on_every_rank():
    class Counted:
        rounds = 0

        def generate(self, prompts, sampling, *, step, purpose):
            self.rounds += 1
            return [[] for _ in prompts]

        def score(self, prompts, completions, places):
            return list(prompts)

    seen, rounds = [], []
    for rank in range(2):
        collector = Counted()
        seen += validate(collector, list, None, count=5, batch_size=2, rank=rank, world_size=2)
        rounds.append(collector.rounds)
    assert sorted(seen) == [0, 1, 2, 3, 4] and rounds == [3, 3]
    assert validate(Counted(), list, None, count=1, batch_size=-1, rank=1, world_size=2) == []


WORKER = """
import json
import sys
from pathlib import Path
from tests.training.rigs import session, settings

root, folder = Path(sys.argv[1]), Path(sys.argv[2])
changes = {"worker.actor.ppo_epochs": 3, "worker.actor.micro_batch_size_per_device_for_update": 2,
           "trainer.val_before_train": False, "worker.rollout.name": sys.argv[3],
           "trainer.max_steps": int(sys.argv[4]), "trainer.save_freq": 1, **json.loads(sys.argv[5])}
with session(settings_for(root, folder, changes)) as parts:
    parts.train()
    kind = type(parts.trainer.model_wrapped).__name__
    sharded = any(hasattr(p, "ds_id") for p in parts.trainer.model.parameters())
    if parts.is_main:
        (folder / "shown.txt").write_text(f"{kind} x {parts.trainer.accelerator.num_processes} sharded={sharded}")
""".replace("settings_for(root, folder, changes)", "settings(root, folder, **changes)")


# Whatever sums over the ranks: filtered groups of unequal numbers, whitening, the KL controller, importance weights.
ACROSS_RANKS = {
    "algorithm.adv_estimator": "reinforce_plus_plus",
    "algorithm.online_filtering": True,
    "algorithm.filter_low": 0.35,
    "algorithm.filter_high": 0.65,
    "algorithm.disable_kl": False,
    "algorithm.kl_type": "adaptive",
    "algorithm.kl_coef": 0.1,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.ref_model_sync_steps": 3,
    "algorithm.rollout_is": "sequence",
    "worker.actor.loss_type": "clip_cov",
    "worker.actor.clip_cov_lb": -9.0,
    "worker.actor.clip_cov_ratio": 0.2,
    "worker.actor.loss_avg_mode": "seq",
    "worker.actor.optim.lr": 1e-5,
}


@pytest.mark.parametrize(
    ("scheme", "changes"), [("ddp", {}), ("ddp", ACROSS_RANKS), ("zero3", {})], ids=["ddp", "ddp-filtered", "zero3"]
)
def test_two_processes_go_where_one_goes(tmp_path, tmp_path_factory, scheme, changes):
    """Three updates on the rollouts of the start, over gloo. A sharded model cannot generate, so vLLM does, with the
    weights of each of three steps."""
    engine, steps = ("vllm", "3") if scheme == "zero3" else ("transformers", "1")
    changes = json.dumps(changes)
    root = tmp_path_factory.getbasetemp()
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    repository = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), str(root), str(tmp_path / "one"), engine, "1", changes],
        check=True,
        env=env,
        timeout=200,
    )
    launch = {
        "ddp": ["torch.distributed.run", "--nproc_per_node", "2"],
        "zero3": [
            *("accelerate.commands.accelerate_cli", "launch", "--num_processes", "2"),
            *("--config_file", str(repository / "accelerate_configs" / "zero3.yaml")),
        ],
    }[scheme]
    two = [sys.executable, "-m", *launch, str(script), str(root), str(tmp_path / "two"), engine, steps, changes]
    subprocess.run(two, check=True, env=env, timeout=250)
    shown = (tmp_path / "two" / "shown.txt").read_text()
    assert (
        shown
        == {"ddp": "DistributedDataParallel x 2 sharded=False", "zero3": "DeepSpeedEngine x 2 sharded=True"}[scheme]
    )
    one = load_file(tmp_path / "one" / "global_step_1" / "model" / "model.safetensors")
    both = load_file(tmp_path / "two" / "global_step_1" / "model" / "model.safetensors")
    assert largest_difference(one, both) <= 1e-5
    shown_groups = [
        [(group["row_id"], group["pictures"], group["why"]) for group in groups if group["step"] == 1]
        for groups in (records(tmp_path / name, "groups") for name in ("one", "two"))
    ]
    assert shown_groups[0] == shown_groups[1] and shown_groups[0]  # picked and shown alike
    one_record, (two_record, *later) = records(tmp_path / "one")[0], records(tmp_path / "two")
    assert [record["rollout/logprob_diff/mean"] <= 2e-5 for record in (two_record, *later)] == [True] * int(steps)
    for name in ("reward/overall", "actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert two_record[name] == pytest.approx(one_record[name], rel=1e-4, abs=1e-6), name
