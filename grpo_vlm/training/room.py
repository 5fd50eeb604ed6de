"""Whether a checkpoint fits: its size before there is one, and what is free in host memory and on the disk."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from grpo_vlm.errors import ConfigError
from grpo_vlm.model.packed import base_model
from grpo_vlm.rollout.weights import is_zero3, stored_tensors

if TYPE_CHECKING:
    from grpo_vlm.training.trainer import GRPOVLMTrainer

GIB = 2**30
SLACK = 1.02  # configuration files, the tokenizer
SMALL = 64 << 20  # bytes of those
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a checkpoint. model: with LoRA the merged model and the adapter. state: of the optimizer, and the
    reference where it moves."""

    model: int
    state: int

    @property
    def total(self) -> int:
        """On the disk, and in host memory while a thread writes it."""
        return self.model + self.state


def predict(trainer: "GRPOVLMTrainer") -> Sizes:
    """The size of each checkpoint of this run, from the weights' shapes alone."""
    config, count = trainer.config, _counter(trainer)
    module = trainer.accelerator.unwrap_model(trainer.model)
    base = base_model(module)
    weights = sum(count(tensor) * tensor.element_size() for _, tensor in stored_tensors(base))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    adapters = 0 if module is base else sum(count(parameter) * parameter.element_size() for parameter in trained)
    model = adapters + (weights if module is base or config.trainer.save_merged else 0)
    if config.trainer.save_model_only:
        return Sizes(model, 0)
    state = sum(count(parameter) * _bytes_a_weight(trainer, parameter) for parameter in trained)
    moves = config.algorithm.ref_model_sync_steps is not None and trainer.ref_model is not None
    return Sizes(model, state + (weights if moves else 0))


def _counter(trainer: "GRPOVLMTrainer") -> Callable[[Tensor], int]:
    """Numbers of a whole tensor, which ZeRO-3 may have cut up by now."""
    if not is_zero3(trainer.accelerator):
        return Tensor.numel
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    return lambda tensor: tensor.ds_numel if is_zero_param(tensor) else tensor.numel()


def _bytes_a_weight(trainer: "GRPOVLMTrainer", parameter: Tensor) -> int:
    if trainer.is_deepspeed_enabled:  # both moments in float32, and the float32 weights beside bf16 ones
        lower = parameter.dtype != torch.float32 or trainer.args.bf16
        return 8 + (4 if lower else 0)
    strategy = trainer.config.worker.actor.optim.strategy
    if strategy == "adamw_8bit":
        return 3  # a byte for each moment, and a scale for every few hundred of them
    if strategy == "adamw_bf16":
        return 4 + (2 if parameter.dtype == torch.bfloat16 else 0)
    return 2 * parameter.element_size()


def check_room(trainer: "GRPOVLMTrainer") -> None:
    """Before the first step, on the main process. Raises ConfigError when not even one checkpoint fits, with all that
    is wrong at once."""
    sizes, path = predict(trainer), trainer.folder.path
    on_disk, in_memory = free_on_disk(path), free_in_memory()
    faults, needed = [], _needed(sizes.total)
    if needed > on_disk:
        faults.append(
            f"trainer.save_checkpoint_path: a checkpoint takes {_gib(needed)} ({_gib(sizes.model)} of weights,"
            f" {_gib(sizes.state)} of the optimizer's state) and {path} has {_gib(on_disk)} free. Name a folder on"
            " another disk, make room, or set trainer.save_model_only=true (no resuming)."
        )
    if trainer.config.trainer.save_in_background and sizes.total > in_memory:
        faults.append(
            f"trainer.save_in_background: the copy in host memory takes {_gib(sizes.total)} and {_gib(in_memory)} are"
            " free. Set it to false: checkpoints are then written from the device, in 4 GiB of host memory, and"
            " training waits meanwhile."
        )
    if faults:
        raise ConfigError("\n".join(faults))


def lack_of_disk(trainer: "GRPOVLMTrainer") -> str | None:
    """Why the next checkpoint will not fit on the disk, or None."""
    needed = _needed(trainer.saver.last_bytes or predict(trainer).total)
    try:
        free = free_on_disk(trainer.folder.path)
    except OSError as error:
        return str(error)
    return f"it takes {_gib(needed)} and {_gib(free)} are free on the disk" if needed > free else None


def fits_in_memory(trainer: "GRPOVLMTrainer") -> bool:
    """Whether the copy of the next checkpoint fits into what is free in host memory."""
    return (trainer.saver.last_bytes or predict(trainer).total) <= free_in_memory()


def free_on_disk(path: Path) -> int:
    """Bytes that a file below `path` can have. OSError."""
    return shutil.disk_usage(path).free


def free_in_memory() -> int:
    """Bytes of host memory that a process can still have: of the machine, and of its control group (a container or a
    scheduler's job) where that is limited."""
    free = psutil.virtual_memory().available
    limit, used = (_read(CGROUP / f"memory.{name}") for name in ("max", "current"))
    return free if limit is None or used is None else min(free, limit - used)


def _read(path: Path) -> int | None:
    text = path.read_text().strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None


def _needed(total: int) -> int:
    return int(total * SLACK) + min(SMALL, total)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB // 10 else f"{count / 2**20:.1f} MiB"
