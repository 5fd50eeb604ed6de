"""vLLM plugin: a weight-transfer backend named "file" that reads safetensors files, for servers on a CPU.

vLLM loads it in each of its processes through the entry point group `vllm.general_plugins` (setup.cfg). CUDA IPC and
NCCL do not exist on a CPU, and a plain `load_weights` fails there because vLLM has packed its linear layers at load;
the layerwise reload between `start_weight_update` and `finish_weight_update` unpacks and packs them again.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types


def register() -> None:
    """Entry point, called once or more in each process of vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    if "file" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("file", "grpo_vlm.rollout.file_weights_engine", "FileWeightEngine")
    if os.environ.get("GRPO_VLM_RAY_STUB") == "1" and importlib.util.find_spec("ray") is None:
        # vLLM 0.26's IPC backend imports ray at module top and uses it only with Ray's own transport.
        stub = types.ModuleType("ray")
        stub.__spec__ = importlib.machinery.ModuleSpec("ray", None)
        sys.modules["ray"] = stub
