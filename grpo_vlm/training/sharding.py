"""The launcher's scheme put into force: process group, what the configuration's keys select in the plugins, weights
that are divided while they load, and FSDP2 on machines without an accelerator.

Which scheme it is, and which keys contradict it, is config/check_sharding.py's.
"""

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from grpo_vlm.config import Config
from grpo_vlm.config.check_sharding import FSDP2, ZERO, Launched, launched
from grpo_vlm.config.values import is_bf16
from grpo_vlm.training.arguments import casts_to_bf16


def join_processes(config: Config) -> None:
    """Connects the processes that the launcher started, before the first of them has something to tell. The keys that
    FSDP2 leaves open go into the variables that Accelerate and transformers read from here on."""
    launch = launched(os.environ)
    if launch.kind == FSDP2:
        os.environ.update(fsdp_variables(config))
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    # The libraries' own time-out comes after ours (training/watchdog.py), which knows what the ranks were doing.
    timeout = datetime.timedelta(seconds=3 * config.trainer.collective_timeout_s)
    if torch.accelerator.is_available():
        PartialState(timeout=timeout)
        return
    # Accelerate picks no backend by itself for DeepSpeed on a machine without an accelerator
    state = PartialState(cpu=launch.kind != ZERO, backend="gloo", timeout=timeout)
    if launch.kind == FSDP2:
        # Accelerate turns a run of several accelerators into FSDP and no other; this one would become DDP. All that
        # comes after works on a CPU as it is.
        state.distributed_type = DistributedType.MULTI_GPU


def fsdp_variables(config: Config) -> dict[str, str]:
    """A key selects something where it is not at its default; else the launcher's file does."""
    fsdp, found = config.worker.actor.fsdp, {}
    if not fsdp.enable_full_shard:
        found["FSDP_RESHARD_AFTER_FORWARD"] = "false"
    if fsdp.enable_cpu_offload:
        found["FSDP_OFFLOAD_PARAMS"] = "true"
    if not fsdp.enable_rank0_init:
        found["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    return found


@contextmanager
def dividing_while_loading(config: Config) -> Iterator[None]:
    """Where the launcher asks for it, models that are loaded in the block are divided by ZeRO-3 as they are read, so
    that no process ever holds a whole one."""
    if not launched(os.environ).init:
        yield
        return
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision("bf16" if casts_to_bf16(config) else "no")
    plugin.set_deepspeed_weakref()  # transformers divides while this object lives
    yield
    del plugin


def use_settings(arguments: dict[str, Any], config: Config) -> dict[str, Any]:
    """The arguments of an Accelerator with what the configuration selects."""
    launch, reduced = launched(os.environ), reduce_dtype(config)
    if launch.kind == ZERO:
        plugin = arguments["deepspeed_plugin"]
        plugin.deepspeed_config["communication_data_type"] = "bf16" if reduced == torch.bfloat16 else "fp32"
    if launch.kind == FSDP2:
        casts = casts_to_bf16(config)
        # Log-probs leave the model in float32: Accelerate's own policy would round them to bf16.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if casts else None, reduce_dtype=reduced)
        arguments["fsdp_plugin"] = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    return arguments


def reduce_dtype(config: Config) -> torch.dtype:
    """The type in which gradients are summed over devices."""
    return torch.bfloat16 if is_bf16(config.worker.actor.fsdp.mp_reduce_dtype) else torch.float32


def fsdp2_frozen(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """A model that does not train, divided layer by layer as the policy is."""
    return fsdp2_prepare_model(accelerator, model).eval()


def divided(model: nn.Module) -> nn.Module:
    """The same model; what FSDP2 still holds whole of it after a forward pass without a backward pass (the outermost
    part: embeddings, head) is dropped, so that its parameters are the divided ones again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return model


def described(config: Config, launch: Launched, world_size: int) -> str:
    """The scheme and what was chosen, for the start of a run."""
    fsdp, where = config.worker.actor.fsdp, f"{launch.name} over {world_size} processes"
    if launch.kind == FSDP2:
        environment = os.environ
        kept = environment.get("FSDP_RESHARD_AFTER_FORWARD", "true") == "false"
        parts = [
            "weights kept whole until the backward pass" if kept else "weights whole one layer at a time",
            f"gradients summed in {fsdp.mp_reduce_dtype}",
        ]
        if environment.get("FSDP_OFFLOAD_PARAMS", "false") == "true":
            parts.append("weights and optimizer states in CPU memory")
        if environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "true":
            parts.append("read by the first process")
        return f"{where}: " + ", ".join(parts)
    if launch.kind == ZERO:
        parts = [f"gradients summed in {fsdp.mp_reduce_dtype}"]
        parts += ["weights in CPU memory"] if launch.weights_on_cpu else []
        parts += ["optimizer states in CPU memory"] if launch.optimizer_on_cpu else []
        parts += ["weights divided while they load"] if launch.init else []
        return f"{where}: " + ", ".join(parts)
    return where if world_size > 1 else launch.name
