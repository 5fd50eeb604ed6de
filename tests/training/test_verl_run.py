"""A verl command line trains as it is: verl's rows, its reward by data source, greedy validation."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

import train
from tests.tiny import tiny_model

ROOT = Path(__file__).parents[2]
COMMAND = (
    "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False data.image_key=images data.train_batch_size=4 "
    "data.max_prompt_length=512 data.max_response_length=8 data.filter_overlong_prompts=True data.truncation=error "
    "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-3 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
    "actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.strategy=fsdp2 "
    "actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.ref.fsdp_config.param_offload=True "
    'trainer.logger=["console","wandb"] trainer.n_gpus_per_node=1 trainer.nnodes=1 trainer.save_freq=20 '
    "trainer.test_freq=5 trainer.total_epochs=1 trainer.total_training_steps=1 "
)


def verl_rows(count: int, source: str) -> pa.Table:
    """Rows as verl's data_preprocess/geo3k.py writes them."""
    rows = []
    for number in range(count):
        file = io.BytesIO()
        Image.new("RGB", (84, 56), (20 * number, 90, 90)).save(file, "PNG")
        rows.append(
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"<image>What is {number} + 1?"}],
                "images": [{"bytes": file.getvalue(), "path": None}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
                "extra_info": {"split": "train", "index": number},
            }
        )
    return pa.Table.from_pylist(rows)


@pytest.fixture
def command(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(ROOT)
    pq.write_table(verl_rows(6, "hiyouga/geometry3k"), tmp_path / "train.parquet")
    pq.write_table(verl_rows(2, "hiyouga/geometry3k"), tmp_path / "test.parquet")
    pq.write_table(verl_rows(6, "somebody/else"), tmp_path / "other.parquet")
    monkeypatch.setenv("TEST_FILE", str(tmp_path / "test.parquet"))  # as verl's Qwen3-VL script takes it
    return [
        *COMMAND.split(),
        f"data.train_files={tmp_path / 'train.parquet'}",
        f"actor_rollout_ref.model.path={tiny_model('qwen2_5_vl', tmp_path_factory.getbasetemp())}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "worker.rollout.name=transformers",  # ours, on top: no server in this test
    ]


def test_a_verl_command_line_trains(command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train.main(command) == 0
    said = capfd.readouterr().out
    assert "verl: data.train_batch_size=4 -> data.rollout_batch_size=4" in " ".join(said.split())
    assert "is left out" in said
    before, step = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"val/accuracy_reward", "val/format_reward"} <= set(before)
    assert {"reward/overall", "reward/accuracy", "actor/kl_loss"} <= set(step) and step["reward/not_scored"] == 0
    kept = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert kept["worker"]["rollout"]["val_override_config"]["temperature"] == 0.0


def test_an_unknown_data_source_is_refused_before_the_model_loads(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train.main([*command, f"data.train_files={tmp_path / 'other.parquet'}"]) == 2
    error = " ".join(capfd.readouterr().err.split())
    assert "no reward is known for it" in error and "hiyouga/geometry3k" in error
    assert not (tmp_path / "run").exists()
