"""A model as a folder that transformers loads by itself: sharded weights gathered one by one, LoRA adapters merged."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_vlm.model.packed import base_model
from grpo_vlm.rollout.weights import gathered, tied_head, weights


def export(model: nn.Module, accelerator: Any, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors; every process calls it."""
    base = base_model(accelerator.unwrap_model(model))
    is_main, found = accelerator.is_main_process, {}
    for name, tensor in gathered(weights(model, accelerator), accelerator):
        if is_main and not (name == "lm_head.weight" and tied_head(base) is not None):
            found[name] = _own(tensor)
    if not is_main:
        return
    folder.mkdir(parents=True, exist_ok=True)
    base.config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
