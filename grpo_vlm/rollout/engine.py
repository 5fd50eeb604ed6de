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

from torch import nn

from grpo_vlm.config import Config
from grpo_vlm.rollout.embedded import TransformersEngine
from grpo_vlm.rollout.types import Completion, Request
from grpo_vlm.rollout.vllm_engine import VLLMEngine, print_warning


class Engine(Protocol):
    """What the trainer needs of an engine. All methods but `metrics` are called by all ranks."""

    name: str

    def start(self) -> None:
        """Make ready. RolloutError when that fails."""

    def sync(self, model: nn.Module, version: int) -> dict[str, float]:
        """Use the current weights of `model` from now on; completions carry `version`. Returns metrics."""

    def generate(
        self, requests: Sequence[Request], on_progress: Callable[[int], None] | None = None
    ) -> list[list[Completion]]:
        """Completions for this rank's own requests, in their order. `on_progress(done)` counts finished prompts."""

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, over all ranks: `rollout/restarts`, `rollout/retries` of a server."""

    def release(self) -> None:
        """Give the accelerator's memory back until the next `sync` or `generate`."""

    def close(self) -> None:
        """Stop what `start` started. May be called any number of times."""


def make_engine(
    config: Config,
    *,
    processor: Any,
    model: nn.Module,
    accelerator: Any,
    run_dir: str | Path,
    warn: Callable[[str], None] = print_warning,
    on_wait: Callable[[float], None] | None = None,
) -> Engine:
    """The engine that `worker.rollout.name` asks for; transformers, with a printed line, when vLLM is not installed.

    model: the policy, for its token ids and generation config; `sync` names the weights. run_dir: where vllm.log goes.
    warn(text): called on the main process when a server is started again. on_wait(seconds): while one starts.
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
        return VLLMEngine(
            config,
            processor=processor,
            model=model,
            accelerator=accelerator,
            run_dir=Path(run_dir),
            warn=warn,
            on_wait=on_wait,
        )
    return TransformersEngine(processor=processor, model=model, accelerator=accelerator)
