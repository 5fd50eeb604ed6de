"""What a vLLM server is started with: its settings out of the configuration, its command line, its environment.

Starting again is quick because vLLM's compiled graphs are found again: what enters the key of its compile cache must
not differ between two starts of the same model. Neither port nor seed do. The key in $VLLM_API_KEY does (and vLLM 0.26
writes it into the cache's folder), so ours has another name; the model's path does, so the server is given a link
whose name follows from the model's configuration (`stable_path`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_vlm.config import Config, RolloutConfig, dtype_name
from grpo_vlm.config.check_rollout import is_loopback_host
from grpo_vlm.config.values import KEY_VARIABLE
from grpo_vlm.errors import RolloutError
from grpo_vlm.hub import model_folder
from grpo_vlm.rollout.versions import installed, server_options

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
MODEL_NAME = "policy"
PLUGIN = "grpo_vlm_file_weights"  # file_weights.py, by the name of its entry point
CPU_SEQUENCES = 512
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
# Batches whose decoding is captured as one CUDA graph; others are padded to the next. vLLM's own list has 51, up to
# 512, and captures each twice: seconds of every start, for at most a fifth of padding in batches of above 16.
CAPTURED = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "ROLE_RANK",
    "VLLM_CPU_KVCACHE_SPACE",
)


@dataclass(frozen=True)
class ServerSettings:
    """What the server is started with. Names follow `worker.rollout.*`; lengths in tokens, times in seconds.

    device: "cpu", or the accelerator's type. gpus: what the variable of visible devices is set to; empty: inherited.
    lora_rank: of the adapter that requests name; 0: there is none. host: where it listens.
    """

    model_path: str
    device: str
    max_model_len: int
    placement: str = "shared"
    gpus: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    dtype: str = "float32"
    port: int | None = None
    start_timeout_s: float = 600.0
    cpu_kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    limit_images: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    chat_template: str | None = None
    tokenizer_path: str | None = None
    log_stats: bool = False
    lora_rank: int = 0
    override_config: Mapping[str, Any] = field(default_factory=dict)
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """Name of the weight-transfer backend (weight_engines.py)."""
        if self.device == "cpu":
            return "file"
        return "grpo_vlm_ipc" if self.placement == "shared" else "grpo_vlm_nccl"

    @property
    def sleeps(self) -> bool:
        """Whether the server gives its memory back while the trainer trains: on shared GPUs."""
        return self.device != "cpu" and self.placement == "shared"


def server_settings(config: Config, device: str, processes: int = 1) -> ServerSettings:
    """The server's settings from a checked configuration. device: the trainer's device type; processes: training
    processes on this machine."""
    rollout, data, model = config.worker.rollout, config.data, config.worker.actor.model
    dtype = rollout.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    tensor, engines, gpus = devices(rollout, device, processes)
    return ServerSettings(
        model_path=model_folder(model.model_path),
        tokenizer_path=model.tokenizer_path and model_folder(model.tokenizer_path),
        device=device,
        placement=rollout.placement,
        gpus=gpus,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        dtype=dtype_name(dtype),
        port=rollout.port,
        start_timeout_s=rollout.start_timeout_s,
        cpu_kv_cache_gb=rollout.cpu_kv_cache_gb,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        tensor_parallel_size=tensor,
        data_parallel_size=engines,
        limit_images=rollout.limit_images or None,
        seed=rollout.seed,
        trust_remote_code=model.trust_remote_code,
        chat_template=data.override_chat_template,
        log_stats=not rollout.disable_log_stats,
        lora_rank=model.lora.rank if rollout.lora_sync == "adapter" else 0,
        override_config=dict(model.override_config),
        engine_kwargs=dict(rollout.engine_kwargs),
    )


def devices(rollout: RolloutConfig, device: str, processes: int) -> tuple[int, int, tuple[str, ...]]:
    """GPUs of one engine, engines, and the GPUs as the variable of visible devices names them.

    The training processes of a machine take the visible GPUs from the first on, one each; a shared server the same.
    RolloutError when a dedicated GPU is not there.
    """
    if device == "cpu":
        return 1, 1, ()
    tensor = rollout.tensor_parallel_size or 1
    given = os.environ.get(VISIBLE.get(device, ""))
    visible = [part.strip() for part in given.split(",")] if given else None
    if rollout.placement == "dedicated":
        engines, numbers = rollout.data_parallel_size or len(rollout.gpus) // tensor, rollout.gpus
    else:
        engines = rollout.data_parallel_size or max(1, processes // tensor)
        numbers = range(tensor * engines)
    if visible is None:
        return tensor, engines, tuple(str(number) for number in numbers)
    if absent := [number for number in numbers if number >= len(visible)]:
        raise RolloutError(
            f"worker.rollout: the server needs GPU {absent}, but {VISIBLE[device]}={given} names {len(visible)}, "
            "numbered from 0. Let it name the training processes' GPUs first and then the server's"
        )
    return tensor, engines, tuple(visible[number] for number in numbers)


def ignored_on_cpu(config: RolloutConfig) -> list[str]:
    """The keys that differ from their defaults and that a CPU server does not use. (It has no graphs to compile, so
    enforce_eager is what it does.)"""
    names = (
        "enable_chunked_prefill",
        "gpu_memory_utilization",
        "tensor_parallel_size",
        "data_parallel_size",
        "gpus",
    )
    ignored = [f"worker.rollout.{name}" for name in names if getattr(config, name) != getattr(RolloutConfig(), name)]
    if config.placement == "dedicated":
        ignored.append("worker.rollout.placement = dedicated (there is no GPU that it could have to itself)")
    return ignored


def server_command(settings: ServerSettings, port: int) -> list[str]:
    """vLLM's command line. It holds no secret. (`vllm serve` does not start under vllm-cpu; the module does.)"""
    extra = {name.replace("_", "-"): value for name, value in settings.engine_kwargs.items()}
    defaults = default_options(settings)
    if any(name.startswith(("cudagraph-", "max-cudagraph-", "compilation-")) for name in extra):
        defaults.pop("compilation-config", None)  # vLLM takes the sizes from one place only
    options = fixed_options(settings, port) | server_options(installed()) | defaults | extra
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return command + [part for name, value in options.items() for part in argument(name, value)]


def argument(name: str, value: Any) -> list[str]:
    """One argument as vLLM reads it: a truth value is a flag, a list or mapping is JSON, None is left out."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, list | tuple | Mapping) else str(value)]


def fixed_options(settings: ServerSettings, port: int) -> dict[str, Any]:
    """Arguments that worker.rollout.engine_kwargs may not replace (config/check_rollout.py lists them)."""
    cpu = settings.device == "cpu"
    return {
        "model": settings.model_path if cpu or settings.lora_rank else stable_path(settings.model_path),
        "tokenizer": settings.tokenizer_path,
        "hf-overrides": settings.override_config or None,
        "served-model-name": MODEL_NAME,
        "host": settings.host,
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "seed": settings.seed,
        "tensor-parallel-size": settings.tensor_parallel_size,
        "data-parallel-size": settings.data_parallel_size if settings.data_parallel_size > 1 else None,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "weight-transfer-config": {"backend": settings.backend},
        "middleware": "grpo_vlm.rollout.auth.RequireKey",
        "gpu-memory-utilization": 0.2 if cpu else settings.gpu_memory_utilization,
        "max-num-batched-tokens": settings.max_num_batched_tokens or max(8192, settings.max_model_len),
        "chat-template": settings.chat_template,
        "limit-mm-per-prompt": {"image": settings.limit_images or 999, "video": 0},
        "enforce-eager": cpu or settings.enforce_eager or None,
        "enable-sleep-mode": settings.sleeps or None,
        # A seeded request whose prefill is split over two steps kills vLLM 0.26 on a CPU ("CPU Generator does not
        # use offset").
        "enable-chunked-prefill": settings.enable_chunked_prefill and not cpu,
        "trust-remote-code": settings.trust_remote_code or None,
        "disable-log-stats": not settings.log_stats or None,
        "enable-lora": settings.lora_rank > 0 or None,
        "max-lora-rank": lora_slots(settings.lora_rank) if settings.lora_rank else None,
        "enable-tower-connector-lora": settings.lora_rank > 0 or None,  # otherwise ignored there, without a word
    }


def default_options(settings: ServerSettings) -> dict[str, Any]:
    """Arguments of ours that worker.rollout.engine_kwargs may replace.

    Weights are not read: the first sync brings all of them before the first request, and fails when one is missing.
    With an adapter only that is synced, so the model's own are needed.
    """
    options: dict[str, Any] = {
        "load-format": "dummy" if settings.lora_rank == 0 else None,
        "disable-uvicorn-access-log": True,
    }
    if settings.device == "cpu":
        return options | {
            "kv-cache-memory-bytes": int(settings.cpu_kv_cache_gb * 2**30),
            "max-num-seqs": CPU_SEQUENCES,
            "distributed-executor-backend": "uni",
            "skip-mm-profiling": True,
        }
    options["enable-flashinfer-autotune"] = False  # of kernels that no model here uses; seconds of every start
    if not settings.enforce_eager:
        options["compilation-config"] = {
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(CAPTURED),
        }
    return options


def lora_slots(rank: int) -> int:
    """vLLM's next size of adapter slots, which it has for a few ranks only."""
    return next((size for size in (8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def stable_path(model_path: str) -> str:
    """A link to a local model whose name follows from the contents of its small files: the same for the same model
    wherever it lies. A hub id is returned as it is. Weights are not read through it."""
    folder = Path(model_path)
    if not folder.is_dir():
        return model_path
    digest = hashlib.blake2b(digest_size=10)
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".txt", ".py", ".model") and path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "grpo_vlm", "models")
    link, fresh = cache / digest.hexdigest(), cache / f".{os.getpid()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(folder.resolve())
        fresh.replace(link)  # at once: another run may be starting the same model
    except OSError:  # a home that cannot be written holds no compile cache either
        return str(folder.resolve())
    return str(link)


def server_environment(settings: ServerSettings, api_key: str) -> dict[str, str]:
    """The trainer's environment without what the launcher put there for torch.distributed, and with vLLM's
    settings."""
    prefixes = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
    unwanted = (*LAUNCHER, "VLLM_API_KEY", "VLLM_LOOPBACK_IP")
    inherited = {k: v for k, v in os.environ.items() if k not in unwanted and not k.startswith(prefixes)}
    level = inherited.get("VLLM_LOGGING_LEVEL", "INFO")
    paths = [path for path in (inherited.get("PYTHONPATH"), str(PACKAGE_ROOT)) if path]
    environment = inherited | {
        KEY_VARIABLE: api_key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_LOGGING_LEVEL": "INFO" if level == "ERROR" else level,  # TRL sets ERROR for itself on import
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
        # Its processes are on one machine and meet on loopback, wherever requests come from (see also loopback.py).
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if "VLLM_PLUGINS" in inherited:  # the user's choice; without ours the server could not take weights
        environment["VLLM_PLUGINS"] = ",".join(filter(None, (inherited["VLLM_PLUGINS"], PLUGIN)))
    if is_loopback_host(settings.host):  # else NCCL may have to reach a trainer on another machine
        environment["NCCL_SOCKET_IFNAME"] = "lo"
    if settings.lora_rank:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if settings.device == "cpu":
        return environment | _cpu_environment()
    if settings.gpus:
        environment[VISIBLE[settings.device]] = ",".join(settings.gpus)
    # The engine is forked from the API process, which has not touched the device: importing vLLM anew takes as long as
    # all else that a start with a full compile cache does.
    environment.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    # FlashInfer's sampler cannot give the log-probs that every request asks for.
    return environment | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}


def _cpu_environment() -> dict[str, str]:
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take the cores from the API process and the trainer
        "VLLM_CPU_ATTN_SPLIT_KV": "0",  # otherwise log-probs depend on the order within a batch
        "MKL_CBWR": "AVX2,STRICT",  # and on its size (batch_invariant.py)
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # model in the engine's own process: one process and one hop less
        "TORCH_COMPILE_DISABLE": "1",  # the few compiled helpers cost half a minute of C++ compilation
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "CUDA_VISIBLE_DEVICES": "",
    }
