"""What a server is started with, for each device and placement; what would make its second start slow; no secret."""

import dataclasses
import json
import os
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from grpo_vlm.config import Config, RolloutConfig, load_config
from grpo_vlm.config.check_rollout import OURS
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.command import (
    CAPTURED,
    ServerSettings,
    default_options,
    devices,
    fixed_options,
    ignored_on_cpu,
    lora_slots,
    server_command,
    server_environment,
    server_settings,
    stable_path,
)
from grpo_vlm.rollout.versions import server_options

CPU = ServerSettings(model_path="org/model", device="cpu", max_model_len=256)
CUDA = dataclasses.replace(CPU, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.3)


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def value(command, name):
    return command[command.index(f"--{name}") + 1]


def rollout(*items):
    return load_config(None, [f"worker.rollout.{item}" for item in items]).worker.rollout


@pytest.mark.parametrize("settings", [CPU, CUDA])
def test_no_secret_on_the_command_line_and_loopback_only(settings, monkeypatch):
    for name in ("VLLM_API_KEY", "VLLM_LOOPBACK_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "of somebody else")
    command, environment = server_command(settings, 1234), server_environment(settings, "the-key")
    assert value(command, "host") == "127.0.0.1" and environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert "VLLM_LOOPBACK_IP" not in environment
    assert environment["GRPO_VLM_ROLLOUT_KEY"] == "the-key" and "VLLM_API_KEY" not in environment
    assert not any("the-key" in part for part in command)
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in environment


@pytest.mark.parametrize(
    ("device", "placement", "backend", "sleeps"),
    [
        ("cpu", "shared", "file", False),
        ("cpu", "dedicated", "file", False),
        ("cuda", "shared", "grpo_vlm_ipc", True),
        ("cuda", "dedicated", "grpo_vlm_nccl", False),
        ("cuda", "external", "grpo_vlm_nccl", False),
    ],
)
def test_weights_come_in_the_way_that_suits_the_place(device, placement, backend, sleeps):
    settings = dataclasses.replace(CPU, device=device, placement=placement)
    command = server_command(settings, 1234)
    assert json.loads(value(command, "weight-transfer-config")) == {"backend": backend}
    assert ("--enable-sleep-mode" in command) is sleeps is settings.sleeps
    assert value(command, "load-format") == "dummy"


def test_a_gpu_server_has_few_graphs_and_what_the_configuration_says():
    command = server_command(
        dataclasses.replace(CUDA, tensor_parallel_size=2, data_parallel_size=3, log_stats=True), 1
    )
    assert value(command, "gpu-memory-utilization") == "0.3" and "--enforce-eager" not in command
    assert (value(command, "tensor-parallel-size"), value(command, "data-parallel-size")) == ("2", "3")
    assert json.loads(value(command, "compilation-config"))["cudagraph_capture_sizes"] == list(CAPTURED)
    assert "--disable-log-stats" not in command and "--enable-chunked-prefill" in command
    assert max(new / old for old, new in pairwise(CAPTURED[7:])) <= 4 / 3
    eager = server_command(dataclasses.replace(CUDA, enforce_eager=True, enable_chunked_prefill=False), 1)
    assert (
        "--compilation-config" not in eager and "--enforce-eager" in eager and "--no-enable-chunked-prefill" in eager
    )


def test_extra_arguments_replace_defaults_and_reach_vllm_in_its_form():
    given = {"max_num_seqs": 8, "no-enable-prefix-caching": True, "async_scheduling": False, "stop_words": ["a b"]}
    command = server_command(dataclasses.replace(CPU, engine_kwargs=given | {"load_format": "auto"}), 1)
    assert value(command, "max-num-seqs") == "8" and command.count("--max-num-seqs") == 1
    assert value(command, "load-format") == "auto" and value(command, "stop-words") == '["a b"]'
    assert "--no-enable-prefix-caching" in command and "--no-async-scheduling" in command
    for name in ("compilation_config", "cudagraph_capture_sizes"):
        parts = server_command(dataclasses.replace(CUDA, engine_kwargs={name: [1]}), 1)
        assert [part for part in parts if part.startswith(("--compil", "--cuda"))] == [f"--{name.replace('_', '-')}"]


def test_all_fixed_arguments_are_refused_as_extra_ones():
    fixed = {name.replace("-", "_") for name in fixed_options(CUDA, 1)}
    assert fixed <= set(OURS)
    assert not set(OURS) & {name.replace("-", "_") for s in (CPU, CUDA) for name in default_options(s)}


def test_an_adapter_needs_the_models_own_weights():
    settings = server_settings(load_config(None, ["worker.rollout.lora_sync=adapter"]), "cuda")
    assert settings.lora_rank == 0
    command = server_command(dataclasses.replace(CUDA, lora_rank=12), 1)
    assert "--enable-lora" in command and value(command, "max-lora-rank") == "16" and "--load-format" not in command
    assert value(command, "model") == "org/model"
    assert server_environment(dataclasses.replace(CUDA, lora_rank=12), "k")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert [lora_slots(rank) for rank in (1, 8, 9, 512)] == [8, 8, 16, 512]


@pytest.mark.parametrize(
    ("items", "processes", "expected"),
    [
        ([], 1, (1, 1, ("0",))),
        ([], 4, (1, 4, ("0", "1", "2", "3"))),
        (["tensor_parallel_size=2"], 4, (2, 2, ("0", "1", "2", "3"))),
        (["data_parallel_size=1"], 4, (1, 1, ("0",))),
        (["placement=dedicated", "gpus=[3,2]"], 2, (1, 2, ("3", "2"))),
        (["placement=dedicated", "gpus=[2,3]", "tensor_parallel_size=2"], 2, (2, 1, ("2", "3"))),
    ],
)
def test_which_gpus_a_server_takes(items, processes, expected, monkeypatch):
    assert devices(rollout(*items), "cuda", processes) == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b, 6,7")
    names = dict(zip("0123", ("4", "GPU-b", "6", "7"), strict=True))
    assert devices(rollout(*items), "cuda", processes) == (*expected[:2], tuple(names[gpu] for gpu in expected[2]))
    settings = dataclasses.replace(CUDA, gpus=devices(rollout(*items), "cuda", processes)[2])
    assert server_environment(settings, "k")["CUDA_VISIBLE_DEVICES"] == ",".join(names[gpu] for gpu in expected[2])
    assert devices(rollout(*items), "cpu", processes) == (1, 1, ())


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RolloutError, match=r"needs GPU \[2\], but CUDA_VISIBLE_DEVICES=0,1 names 2"):
        devices(rollout("placement=dedicated", "gpus=[2]"), "cuda", 2)


def test_what_a_cpu_server_ignores_is_named():
    assert ignored_on_cpu(RolloutConfig()) == []
    items = ["enable_chunked_prefill=true", "gpu_memory_utilization=0.5", "tensor_parallel_size=2", "gpus=[1]"]
    assert ignored_on_cpu(rollout(*items)) == [
        f"worker.rollout.{name}"
        for name in ("enable_chunked_prefill", "gpu_memory_utilization", "tensor_parallel_size", "gpus")
    ]
    assert ignored_on_cpu(rollout("enforce_eager=true")) == []  # what a CPU server does anyway
    assert ignored_on_cpu(rollout("placement=dedicated", "gpus=[1]")) == [
        "worker.rollout.gpus",
        "worker.rollout.placement = dedicated (there is no GPU that it could have to itself)",
    ]
    assert server_settings(Config(), "cpu", 2).data_parallel_size == 1


def test_a_server_for_other_machines_meets_itself_on_loopback_all_the_same(monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")  # NCCL may have to reach a trainer elsewhere
    environment = server_environment(dataclasses.replace(CUDA, host="0.0.0.0"), "k")
    assert (environment["VLLM_HOST_IP"], environment["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize("plugins", [None, "", "lora_filesystem_resolver"])
def test_a_choice_of_vllms_plugins_has_ours_too(plugins, monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    chosen = server_environment(CPU, "k").get("VLLM_PLUGINS")
    assert chosen == (None if plugins is None else (plugins + ",grpo_vlm_file_weights").lstrip(","))


def test_the_launchers_variables_do_not_reach_the_server(monkeypatch):
    names = {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"}
    for name in names:
        monkeypatch.setenv(name, "1")
    assert not names & server_environment(CPU, "key").keys()


def test_the_same_model_has_the_same_path_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, weights in (("one", b"1"), ("two", b"2"), ("three", b"3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}" if name != "three" else '{"a": 1}')
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    monkeypatch.chdir(tmp_path)
    links = [stable_path(path) for path in ("one", str(tmp_path / "one"), "two", "three")]
    assert links[0] == links[1] == links[2] != links[3]
    assert Path(links[0]).resolve() == tmp_path / "two" and stable_path("org/model") == "org/model"
    assert value(server_command(dataclasses.replace(CUDA, model_path="one"), 1), "model") == links[0]
    assert value(server_command(dataclasses.replace(CPU, model_path="one"), 1), "model") == "one"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one" / "config.json"))
    assert stable_path("two") == str(tmp_path / "two")


def test_keys_and_ports_do_not_enter_the_key_of_the_compile_cache(monkeypatch):
    from vllm import envs

    environments = [server_environment(dataclasses.replace(CUDA, port=port), key) for port, key in enumerate("ab")]
    with mock.patch.dict(os.environ, environments[0], clear=True):
        first = envs.compile_factors()
    with mock.patch.dict(os.environ, environments[1], clear=True):
        assert envs.compile_factors() == first
    with mock.patch.dict(os.environ, environments[1] | {"VLLM_USE_FLASHINFER_SAMPLER": "1"}, clear=True):
        assert envs.compile_factors() != first


@pytest.mark.parametrize(
    "settings",
    [
        CPU,
        dataclasses.replace(CUDA, data_parallel_size=2, log_stats=True, enable_chunked_prefill=False),
        dataclasses.replace(CUDA, placement="dedicated", enforce_eager=True, lora_rank=3, trust_remote_code=True),
    ],
)
def test_the_installed_vllm_knows_all_arguments(settings):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    of_the_frontend = {"host", "port", "middleware", "chat-template", "disable-uvicorn-access-log"}
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    _, unknown = parser.parse_known_args(server_command(settings, 1)[3:])
    assert {name.removeprefix("--") for name in unknown if name.startswith("--")} <= of_the_frontend


def test_releases_that_normalise_pixels_themselves_are_told_not_to():
    assert [server_options((0, minor)) for minor in (26, 27)] == [{}, {}]
    assert all(server_options((0, minor)) == {"mm-device-do-normalize": False} for minor in (28, 29, 30, 31))
