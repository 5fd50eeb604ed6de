"""Fixtures that several test files share. Servers are expensive: one per model kind for the whole session."""

import os
from collections.abc import Callable

import pytest
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.config import load_config
from grpo_vlm.rollout.vllm_engine import VLLMEngine
from tests.tiny import tiny_model


@pytest.fixture(scope="session")
def vllm_engine(tmp_path_factory) -> Callable[[str], VLLMEngine]:
    """`vllm_engine(kind)`: a started engine with a CPU server for tests.tiny's model of that kind, stopped at the end.

    Its run folder (vllm.log) is `engine.run_dir`, the model's folder `engine.settings.model_path`.
    """
    engines: dict[str, VLLMEngine] = {}

    def engine(kind: str) -> VLLMEngine:
        if kind not in engines:
            path = tiny_model(kind, tmp_path_factory.getbasetemp())
            config = load_config(
                None,
                [
                    f"worker.actor.model.model_path={path}",
                    "data.max_prompt_length=256",
                    "data.max_response_length=64",
                    "worker.rollout.cpu_kv_cache_gb=0.5",
                ],
            )
            engines[kind] = VLLMEngine(
                config,
                processor=AutoProcessor.from_pretrained(path),
                model=AutoModelForImageTextToText.from_pretrained(path, dtype="float32"),
                accelerator=Accelerator(cpu=True),
                run_dir=tmp_path_factory.mktemp(f"run-{kind}"),
            )
            engines[kind].start()
        return engines[kind]

    yield engine
    for started in engines.values():
        started.close()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory) -> None:
    """Tests keep nothing between runs and touch nothing of the user's; their subprocesses likewise."""
    os.environ["GRPO_VLM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["WANDB_MODE"] = "offline"
