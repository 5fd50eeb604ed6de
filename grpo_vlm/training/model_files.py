"""A live model as files that transformers, vLLM and peft load: sharded weights gathered one after the other, LoRA
adapters apart or merged.

Names are those that `save_pretrained` gives: of a Qwen2.5-VL they are the published model's, not its modules'.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from grpo_vlm.model.packed import base_model
from grpo_vlm.rollout.lora import adapter_files
from grpo_vlm.rollout.weights import Weight, gathered, tied_head, weights

if TYPE_CHECKING:
    from grpo_vlm.training.saver import Draft

STEM = "model"
ADAPTER_STEM = "adapter_model"
WHOLE = 1 << 60  # bytes of a file: peft reads only one


class ModelSettings:
    """A model's config.json and generation_config.json as it was loaded with them: training changes both (the cache is
    off, the tokenizer's end token is added)."""

    def __init__(self, model: nn.Module):
        base = base_model(model)
        self.config, self.generation = copy.deepcopy(base.config), copy.deepcopy(base.generation_config)

    def write(self, folder: Path) -> None:
        """Both files."""
        self.config.save_pretrained(folder)
        if self.generation is not None:
            self.generation.save_pretrained(folder)


def take_model(
    model: nn.Module, accelerator: Any, draft: "Draft | None", folder: str, settings: ModelSettings
) -> None:
    """Puts a whole model into the draft's `folder`, adapters merged; every process calls it, with a draft on the main
    one."""
    base = base_model(accelerator.unwrap_model(model))
    found = _named(model, base, accelerator)
    if draft is None:
        _pass(found)
        return
    draft.take(folder, STEM, found, naming=lambda part: revert_weight_conversion(base, part))
    draft.then(lambda place: settings.write(place / folder))


def take_adapter(model: nn.Module, accelerator: Any, draft: "Draft | None", folder: str) -> None:
    """Puts the adapter in use into the draft's `folder`, as peft loads it; every process calls it."""
    files = adapter_files(accelerator.unwrap_model(model))
    found = gathered([Weight(name, (value,), moves=True) for name, value in files.tensors.items()], accelerator)
    if draft is None:
        _pass(found)
        return
    draft.take(folder, ADAPTER_STEM, found, shard_bytes=WHOLE)
    draft.text(f"{folder}/adapter_config.json", json.dumps(files.config, indent=2, sort_keys=True))


def _named(model: nn.Module, base: PreTrainedModel, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    left_out = {"lm_head.weight"} if tied_head(base) is not None else set()
    for name, tensor in gathered(weights(model, accelerator), accelerator):
        if name not in left_out:
            yield name, tensor


def _pass(found: Iterator[Any]) -> None:
    """Takes part in gathering."""
    for _ in found:
        pass
