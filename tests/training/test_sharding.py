"""DDP, ZeRO-2, ZeRO-3 and FSDP2 over two gloo processes lead where one process leads, and are what they say."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.utils import DeepSpeedPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from grpo_vlm.config import load_config
from grpo_vlm.config.check_sharding import launched
from grpo_vlm.training.sharding import described, fsdp_variables, use_settings
from tests.training.launcher import environment

ROOT = Path(__file__).parents[2]
SCHEMES = ("multi_gpu", "zero2", "zero3", "fsdp2")
KINDS = {"multi_gpu": "MULTI_CPU", "fsdp2": "FSDP"}  # of Accelerate; the others are DeepSpeed's


def start(folder: Path, kind: str, case: str, names: tuple[str, ...], steps: int) -> subprocess.CompletedProcess:
    """sharded.py, to its end."""
    command = [sys.executable, "-m", "tests.training.sharded", str(folder), kind, case, str(steps), *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def run(folder: Path, kind: str, case: str, names: tuple[str, ...], steps: int = 1) -> dict[str, dict]:
    """What sharded.py leaves of each scheme."""
    done = start(folder, kind, case, names, steps)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return {name: torch.load(folder / f"{name}.pt", weights_only=False) for name in names}


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest of any weight; infinite where one is not a number."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().nan_to_num(torch.inf).max().item() for name in left)


def assert_in_force(scheme: str, ranks: list[dict]) -> None:
    """The scheme is the real one on every rank: what is divided, what is whole, and the ranks are connected."""
    for seen in ranks:
        fsdp2 = scheme == "fsdp2"
        parts = {"dtensor": fsdp2, "sharded gradients": fsdp2, "ds_id": scheme.startswith("zero3")}
        assert seen["trained"] > 0 and seen["ddp"] == (scheme == "multi_gpu")
        assert seen["kind"] == KINDS.get(scheme, "DEEPSPEED")
        assert {name: seen[name] for name in parts} == {name: seen["trained"] * here for name, here in parts.items()}
    first, second = ranks
    assert all(map(torch.equal, first["gradients"], second["gradients"]))
    assert difference(first["after"], second["after"]) == 0.0
    assert first["rows"] != second["rows"]  # unequal work, of which the missing rows are blank ones


def compare(found: dict[str, dict]) -> None:
    """All schemes beside one process."""
    (alone,), record = found["cpu"]["ranks"], found["cpu"]["record"]
    for name, made in found.items():
        if name == "cpu":
            continue
        dropped = name.endswith("-dropped")
        apart = difference(alone["after"], made["ranks"][0]["after"])
        assert apart > 1e-4 if dropped else apart <= 1e-5, (name, apart)
        if not dropped:
            assert_in_force(name, made["ranks"])
            assert made["record"]["actor/grad_norm"] == pytest.approx(record["actor/grad_norm"], rel=1e-4)


def test_every_scheme_leads_where_one_process_leads(tmp_path):
    """Three AdamW updates of one rollout batch, with a reference model; a lost row is seen."""
    compare(run(tmp_path, "qwen2_5_vl", "whole", ("cpu", *SCHEMES, "multi_gpu-dropped")))


@pytest.mark.slow
def test_a_rank_that_waits_for_ever_says_for_whom_and_ends(tmp_path):
    """Rank 1 sleeps at its second row: the other one is named, with phase and row, within the time-out."""
    began = time.monotonic()
    done = start(tmp_path, "qwen2_5_vl", "frozen", ("multi_gpu-sleeping",), 1)
    assert done.returncode != 0 and time.monotonic() - began < 100
    waiting, late = r"rank 0 has been in .+ for [45] s; it waits for", r"rank 1 \((old|ref|update_actor), row 2 of"
    assert re.search(f"Collective time-out: {waiting} {late}", done.stderr), done.stderr
    assert "trainer.collective_timeout_s=4 is over" in done.stderr


@pytest.mark.parametrize("chosen", ["fp32", "bf16"])
def test_keys_become_settings_of_the_plugins(chosen):
    """What the configuration selects reaches Accelerate; what it leaves alone stays as the launcher's file says."""
    items = [f"worker.actor.fsdp.mp_reduce_dtype={chosen}"]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[chosen]
    if chosen == "bf16":
        items += [f"worker.actor.fsdp.enable_{key}" for key in ("full_shard=false", "cpu_offload=true")]
    config, changed = load_config(None, items), chosen == "bf16"
    with mock.patch.dict(os.environ, environment("fsdp2", 0, 29514)):
        os.environ.update(fsdp_variables(config))
        plugin = use_settings({}, config)["fsdp_plugin"]
        text = described(config, launched(os.environ), 2)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(reduce_dtype=dtype)  # log-probs stay in float32
    assert plugin.reshard_after_forward is not changed and isinstance(plugin.cpu_offload, CPUOffloadPolicy) is changed
    assert [part in text for part in ("until the backward", "in CPU memory", f"summed in {chosen}")] == [
        changed,
        changed,
        True,
    ]
    with mock.patch.dict(os.environ, environment("zero3", 0, 29514)):
        zero = use_settings({"deepspeed_plugin": DeepSpeedPlugin()}, config)["deepspeed_plugin"]
    assert zero.hf_ds_config.config["communication_data_type"] == chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "case"),
    [("qwen3_vl", "whole"), *((kind, case) for kind in ("qwen2_5_vl", "qwen3_vl") for case in ("lora", "frozen"))],
)
def test_adapters_and_frozen_towers_too(tmp_path, kind, case):
    compare(run(tmp_path, kind, case, ("cpu", *SCHEMES, "fsdp2-dropped")))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("whole", ("zero3_offload",)),  # compiles DeepSpeed's CPU optimizer the first time, a minute and a half
        ("bf16 states", ("multi_gpu", "fsdp2")),
        ("whole until backward", ("fsdp2",)),
    ],
)
def test_other_optimizers_and_settings_too(tmp_path, case, names):
    compare(run(tmp_path, "qwen2_5_vl", case, ("cpu", *names)))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_fifty_steps(tmp_path, scheme):
    """51 updates: no scheme hangs or lets the ranks part."""
    first, second = run(tmp_path, "qwen3_vl", "whole", (scheme,), steps=17)[scheme]["ranks"]
    assert len(first["rows"]) == 51 and difference(first["after"], second["after"]) == 0.0
