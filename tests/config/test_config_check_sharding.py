"""What the launcher's file and the configuration's sharding keys say together: refused where they contradict each
other, said where a key is void. The variables are those that `accelerate launch` sets for accelerate_configs/."""

import json

import pytest

from grpo_vlm.config import load_config
from grpo_vlm.config.check_sharding import DDP, FSDP2, ONE, ZERO, Launched, launched, sharding_faults, sharding_notices
from tests.training.launcher import environment

FILES = {
    "cpu": Launched(ONE),
    "single_gpu": Launched(ONE),
    "multi_gpu": Launched(DDP),
    "zero2": Launched(ZERO, 2),
    "zero3": Launched(ZERO, 3, init=True),
    "zero3_offload": Launched(ZERO, 3, weights_on_cpu=True, optimizer_on_cpu=True, init=True),
    "fsdp2": Launched(FSDP2),
    "two_nodes": Launched(ZERO, 3, init=True),
}


@pytest.fixture
def variables(monkeypatch):
    """`variables(file)`: those of rank 0 of two processes."""
    for name in ("WORLD_SIZE", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.delenv(name, raising=False)
    return lambda file: environment(file, 0, 29512)


@pytest.mark.parametrize("file", FILES)
def test_every_launcher_file_is_understood(file, variables):
    assert launched(variables(file)) == FILES[file]


def test_a_deepspeed_file_of_its_own_is_read(tmp_path):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    given = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    assert launched(given) == Launched(ZERO, 3, optimizer_on_cpu=True)


@pytest.mark.parametrize(
    ("file", "items", "said"),
    [
        ("zero3", "fsdp.enable_full_shard=false", "launched DeepSpeed ZeRO-3|zero2.yaml"),
        ("zero3", "fsdp.enable_cpu_offload=true", "DeepSpeed ZeRO-3|zero3_offload.yaml"),
        ("zero2", "offload.offload_params=true", "DeepSpeed ZeRO-2|zero3.yaml"),
        ("zero2", "offload.offload_optimizer=true", "DeepSpeed ZeRO-2|zero3.yaml"),
        ("zero3", "optim.strategy=adamw_bf16", "DeepSpeed ZeRO-3|fsdp2.yaml"),
        ("zero2", "fsdp.torch_dtype=bf16", "DeepSpeed ZeRO-2|float32 masters"),
        ("fsdp2", "optim.strategy=adamw_8bit", "FSDP2|multi_gpu.yaml"),
        ("fsdp2", "fsdp.fsdp_size=3", "started 2 process|write -1 or 2"),
        ("zero3_offload", "fsdp.enable_cpu_offload=true", ""),
        ("zero2", "fsdp.enable_full_shard=false", ""),
        ("zero3", "offload.offload_params=true offload.offload_optimizer=true", ""),
        ("fsdp2", "fsdp.enable_full_shard=false fsdp.enable_cpu_offload=true fsdp.fsdp_size=2", ""),
        ("fsdp2", "optim.strategy=adamw_bf16", ""),
    ],
)
def test_a_contradiction_names_both_sides(file, items, said, variables):
    config = load_config(None, [f"worker.actor.{item}" for item in items.split()])
    faults = sharding_faults(config, variables(file))
    if not said:
        assert faults == []
        return
    (fault,) = faults
    key = "worker.actor." + items.partition("=")[0]
    assert fault.keys == (key,) and fault.message.startswith(f"{key}: ")
    assert all(part.removeprefix("launched ") in fault.message for part in said.split("|"))


def test_fsdp1_is_refused(variables):
    (fault,) = sharding_faults(load_config(), variables("fsdp2") | {"FSDP_VERSION": "1"})
    assert "fsdp_version: 2" in fault.message


def test_weights_that_generate_cannot_be_parked(variables):
    items = ["worker.actor.offload.offload_params=true", "worker.rollout.name=transformers"]
    (fault,) = sharding_faults(load_config(None, items), variables("cpu"))
    assert "worker.rollout.name=transformers" in fault.message


@pytest.mark.parametrize(
    ("file", "item", "said"),
    [
        ("multi_gpu", "enable_full_shard=false", "DDP divides nothing"),
        ("cpu", "enable_cpu_offload=true", "one process keeps the weights whole"),
        ("zero3", "enable_rank0_init=false", "only FSDP2"),
        ("multi_gpu", "mp_reduce_dtype=bf16", "DDP sums"),
        ("fsdp2", "enable_rank0_init=false", ""),
        ("zero2", "mp_reduce_dtype=bf16", ""),
    ],
)
def test_a_void_key_is_said(file, item, said, variables):
    found = sharding_notices(load_config(None, [f"worker.actor.fsdp.{item}"]), variables(file))
    assert (said in found[0]) if said else found == []
