"""The engines behind one protocol: a vLLM server, or the trained model itself through transformers.

The trainer calls `start` once, then per rollout step `sync`, `generate` (any number of times) and `release`; `close`
at the end.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from grpo_vlm.config import Config, RolloutConfig, dtype_name
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.embedded import TransformersEngine
from grpo_vlm.rollout.ranks import raise_everywhere, raise_first
from grpo_vlm.rollout.server import ServerSettings, VLLMServer
from grpo_vlm.rollout.sync import SHARED_MEMORY, FileSync, IPCSync, WeightSync, remove_left_folders
from grpo_vlm.rollout.types import Completion, Request, banned_token_ids, eos_token_ids

SLEEP_LEVEL = 2  # weights and cache are dropped; the next sync brings all weights anyway


class Engine(Protocol):
    """What the trainer needs of an engine. All methods are called by all ranks."""

    name: str

    def start(self) -> None:
        """Make ready. RolloutError when that fails."""

    def sync(self, model: nn.Module, version: int) -> dict[str, float]:
        """Use the current weights of `model` from now on; completions carry `version`. Returns metrics."""

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Completions for this rank's own requests, in their order. `on_progress(done)` counts finished prompts."""

    def release(self) -> None:
        """Give the accelerator's memory back until the next `sync` or `generate`."""

    def close(self) -> None:
        """Stop what `start` started. May be called any number of times."""


def make_engine(config: Config, *, processor: Any, model: nn.Module, accelerator: Any, run_dir: str | Path) -> Engine:
    """The engine that `worker.rollout.name` asks for; transformers, with a printed line, when vLLM is not installed.

    model: the policy, for its token ids and generation config; `sync` names the weights. run_dir: where vllm.log goes.
    """
    wanted = config.worker.rollout.name
    if wanted == "vllm" and importlib.util.find_spec("vllm") is None:
        if accelerator.is_main_process:
            print(
                "vLLM is not installed: generating with transformers, which is slower "
                "(as worker.rollout.name=transformers).",
                file=sys.stderr,
            )
        wanted = "transformers"
    if wanted == "vllm":
        return VLLMEngine(config, processor=processor, model=model, accelerator=accelerator, run_dir=Path(run_dir))
    return TransformersEngine(processor=processor, model=model, accelerator=accelerator)


class VLLMEngine:
    """A vLLM server that the main process starts, feeds with weights and stops; every rank sends its own prompts.

    on_wait(seconds): called while the server starts, for a progress line.
    """

    name = "vllm"

    def __init__(
        self,
        config: Config,
        *,
        processor: Any,
        model: nn.Module,
        accelerator: Any,
        run_dir: Path,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        self.accelerator, self.processor, self.on_wait = accelerator, processor, on_wait
        self.run_dir = run_dir
        self.request_timeout_s = config.worker.rollout.request_timeout_s
        self.settings = server_settings(config, accelerator.device.type)
        unwrapped = accelerator.unwrap_model(model)
        self.banned_ids = banned_token_ids(processor, unwrapped.config)
        self.eos_ids = eos_token_ids(processor, unwrapped.generation_config)
        self.server: VLLMServer | None = None
        self.client: VLLMClient | None = None
        self.transfer: WeightSync | None = None
        self.model, self.version = model, -1
        self.asleep = False

    def start(self) -> None:
        """Start the server on the main process and tell every rank where it is."""
        error, where = None, [None, None]
        if self.accelerator.is_main_process:
            if self.settings.device == "cpu":
                remove_left_folders(SHARED_MEMORY, self.run_dir)
                if ignored := ignored_on_cpu(self.settings):
                    print(f"The vLLM server on a CPU ignores {', '.join(ignored)}.", file=sys.stderr)
            self.server = VLLMServer(self.settings, self.run_dir / "vllm.log")
            try:
                self.server.start(self.on_wait)
                where = [self.server.url, self.server.api_key]
            except RolloutError as problem:
                error = str(problem)
        raise_everywhere(error, self.accelerator, RolloutError)
        if self.accelerator.num_processes > 1:
            broadcast_object_list(where)
        self.client = VLLMClient(
            *where,
            tokenizer=self.processor.tokenizer,
            eos_ids=self.eos_ids,
            banned_ids=self.banned_ids,
            request_timeout_s=self.request_timeout_s,
        )
        sender = self.client if self.accelerator.is_main_process else None
        dtype = getattr(torch, self.settings.dtype)
        if self.settings.device == "cpu":
            self.transfer = FileSync(sender, self.accelerator, dtype, self.run_dir)
        else:
            self.transfer = IPCSync(sender, self.accelerator, dtype)
        if sender is not None:
            sender.post("/init_weight_transfer_engine", {"init_info": {}})

    def sync(self, model: nn.Module, version: int) -> dict[str, float]:
        """Wake the server if it sleeps, transfer the weights, drop its caches."""
        waking = self.asleep and self.accelerator.is_main_process
        if waking:
            self.client.post("/wake_up", tags="weights")
        metrics = self.transfer.send(model)
        if waking:
            self.client.post("/wake_up", tags="kv_cache")
        self.asleep = False
        self.model, self.version = model, version
        return metrics

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """See Engine. A failure on any rank is raised on all of them, naming the row."""
        if self.asleep:  # released, and the weights have not moved since: bring the same ones back
            self.sync(self.model, self.version)
        error, completions = None, []
        try:
            completions = self.client.generate(requests, self.version, on_progress)
        except RolloutError as problem:
            error = str(problem) + self._death()
        raise_first(error, self.accelerator, RolloutError)
        return completions

    def _death(self) -> str:
        """What to add to an error when the server is gone."""
        if self.server is None or self.server.alive():
            return ""
        return f". The server has ended; last lines of {self.server.log_path}:\n{self.server.log_tail()}"

    def release(self) -> None:
        """On a GPU, put the server to sleep until the next sync; on a CPU nothing would be gained."""
        if self.settings.device == "cpu" or self.asleep:
            return
        self.accelerator.wait_for_everyone()  # other ranks may still generate
        if self.accelerator.is_main_process:
            self.client.post("/sleep", level=SLEEP_LEVEL)
        self.asleep = True

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()
            self.server = None


def ignored_on_cpu(settings: ServerSettings) -> list[str]:
    """The keys that differ from their defaults and that a CPU server does not use."""
    names = ("enable_chunked_prefill", "gpu_memory_utilization")
    return [f"worker.rollout.{name}" for name in names if getattr(settings, name) != getattr(RolloutConfig(), name)]


def server_settings(config: Config, device: str) -> ServerSettings:
    """The server's settings from a configuration. device: the trainer's device type."""
    rollout, data, model = config.worker.rollout, config.data, config.worker.actor.model
    dtype = rollout.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return ServerSettings(
        model_path=model.model_path,
        tokenizer_path=model.tokenizer_path,
        device=device,
        max_model_len=rollout.max_model_len or data.max_prompt_length + data.max_response_length,
        dtype=dtype_name(dtype),
        port=rollout.port,
        start_timeout_s=rollout.start_timeout_s,
        cpu_kv_cache_gb=rollout.cpu_kv_cache_gb,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        tensor_parallel_size=rollout.tensor_parallel_size or 1,
        limit_images=rollout.limit_images or None,
        seed=rollout.seed,
        trust_remote_code=model.trust_remote_code,
        chat_template=data.override_chat_template,
        log_stats=not rollout.disable_log_stats,
    )
