"""Our vLLM plugin: weight-transfer backends of our own (weight_engines.py), kernels that do not mind the batch, a log
without pictures, stores that listen on loopback alone, and processes that die with their parents.

vLLM loads it in each of its processes through the entry point group `vllm.general_plugins` (setup.cfg). On a CPU it is
the only way: CUDA IPC and NCCL do not exist there, and a plain `load_weights` fails because vLLM has packed its linear
layers at load; the layerwise reload between `start_weight_update` and `finish_weight_update` unpacks and packs them.
"""

from __future__ import annotations

import os

from grpo_vlm.rollout.auth import silence_dumps
from grpo_vlm.rollout.batch_invariant import make_batch_invariant
from grpo_vlm.rollout.guard import GUARDED
from grpo_vlm.rollout.lifeline import hold

ENGINES = {"file": "FileWeightEngine", "grpo_vlm_ipc": "IPCWeightEngine", "grpo_vlm_nccl": "NCCLWeightEngine"}


def register() -> None:
    """Entry point, called once or more in each process of vLLM."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if "file" in WeightTransferEngineFactory._registry:
        return
    for name, engine in ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, "grpo_vlm.rollout.weight_engines", engine)
    silence_dumps()
    if GUARDED in os.environ:  # a server of ours, and not somebody's own vLLM in the same environment
        hold()
    if current_platform.is_cpu():
        make_batch_invariant()
