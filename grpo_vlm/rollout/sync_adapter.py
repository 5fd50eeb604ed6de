"""Only the LoRA adapter goes to the server, as the two files that peft writes; the server reads it beside the model's
own weights, which it has loaded by itself and which do not train.

The server must keep those weights, so it sleeps at level 1 at most: they wait in its CPU memory.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.lora import adapter_files
from grpo_vlm.rollout.ranks import raise_first
from grpo_vlm.rollout.sync import FileSync, own_prefix, roomy_place
from grpo_vlm.rollout.weights import TOWERS, Weight, gathered

ADAPTER_NAME = "policy-adapter"


class AdapterSync(FileSync):
    """Writes the adapter into a folder and has the server load it in place of the last one."""

    backend = "adapter"
    adapter = ADAPTER_NAME
    sleep_level = 1

    def _connect(self) -> None:
        """Nothing: adapters are loaded by vLLM's own route."""

    def send(self, model: nn.Module) -> dict[str, float]:
        """See WeightSync. The adapter is small, so its tensors are gathered all together."""
        started, self.problem = time.perf_counter(), None
        files = adapter_files(self.accelerator.unwrap_model(model))
        chosen = [Weight(name, (parameter,), moves=True) for name, parameter in files.tensors.items()]
        tensors = {
            name: self._cast(tensor).to("cpu", copy=True).contiguous()
            for name, tensor in gathered(chosen, self.accelerator)
        }
        sent = sum(tensor.nbytes for tensor in tensors.values())
        if self.client is not None:
            self._try(lambda: self._load(files.config, tensors, sent))
        raise_first(self.problem, self.accelerator, RolloutError)
        return {"sync/seconds": time.perf_counter() - started, "sync/gb": sent / 1e9}

    def _load(self, config: dict[str, Any], tensors: dict[str, torch.Tensor], needed: int) -> None:
        place = roomy_place(needed, self.run_dir, self.here)
        with tempfile.TemporaryDirectory(prefix=own_prefix(), dir=place) as folder:
            Path(folder, "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, Path(folder, "adapter_model.safetensors"))
            body = {"lora_name": ADAPTER_NAME, "lora_path": folder, "load_inplace": True}
            self._post("/v1/load_lora_adapter", body)
        self._reset_prefix_cache()
        if any(part in name for name in tensors for part in TOWERS):
            self._post("/reset_encoder_cache")
