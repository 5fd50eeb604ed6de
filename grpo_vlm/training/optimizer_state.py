"""The optimizer's state by the names of the parameters, whole: what a checkpoint holds does not depend on how the
states were divided, so that a run goes on with another number of processes or under another scheme.

One tensor is gathered after the other. Plain, DDP and FSDP2 optimizers keep a state per parameter; DeepSpeed keeps one
per flat partition, which `deepspeed.utils` maps to parameters.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_vlm.errors import ConfigError
from grpo_vlm.rollout.weights import WRAPPERS, full
from grpo_vlm.training.snapshot import shard_files

if TYPE_CHECKING:
    from grpo_vlm.training.trainer import GRPOVLMTrainer

STEM = "optimizer"
NUMBERS_NAME = "optimizer.json"
MASTER = "master"  # the float32 weights that DeepSpeed keeps beside bf16 ones


def trained_parameters(trainer: "GRPOVLMTrainer") -> dict[str, nn.Parameter]:
    """The parameters with a gradient, by their names without what wraps modules."""
    module = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {_plain(name): value for name, value in module.named_parameters() if value.requires_grad}


def tensors(trainer: "GRPOVLMTrainer") -> Iterator[tuple[str, Tensor]]:
    """("SLOT:PARAMETER", whole tensor), one after the other; a collective. A tensor is valid until the next one."""
    return (_Zero if trainer.is_deepspeed_enabled else _PerParameter)(trainer).tensors()


def numbers(trainer: "GRPOVLMTrainer") -> str:
    """The rest of the state, counts of steps, as the text of NUMBERS_NAME."""
    found = (_Zero if trainer.is_deepspeed_enabled else _PerParameter)(trainer).numbers()
    return json.dumps({"strategy": trainer.config.worker.actor.optim.strategy, "numbers": found}, indent=1)


def load(trainer: "GRPOVLMTrainer", folder: Path) -> None:
    """Puts the state in `folder` into the optimizer, which has made no step yet. Every process reads all files.

    Raises ConfigError when another optimizer wrote it.
    """
    content = json.loads((folder / NUMBERS_NAME).read_text(encoding="utf-8"))
    strategy = trainer.config.worker.actor.optim.strategy
    if content["strategy"] != strategy:
        raise ConfigError(
            f"worker.actor.optim.strategy: {folder.parent} was saved with {content['strategy']!r}, now it is"
            f" {strategy!r}. Keep it, or start a new run from the checkpoint's model/ folder."
        )
    files = shard_files(folder, STEM)
    _warn_of_others(trainer, {name.partition(":")[2] for name in files})
    reader = _Reader(files)
    lower = any(parameter.dtype != torch.float32 for parameter in trained_parameters(trainer).values())
    if trainer.is_deepspeed_enabled and lower and MASTER not in reader.slots:
        trainer.console.warn(
            f"{folder.parent.name} has no float32 weights beside its model, as DeepSpeed keeps them with bf16: the run"
            " goes on from the weights rounded to bf16"
        )
    (_Zero if trainer.is_deepspeed_enabled else _PerParameter)(trainer).load(reader, content["numbers"])


def _warn_of_others(trainer: "GRPOVLMTrainer", saved: set[str]) -> None:
    trained = set(trained_parameters(trainer))
    if saved - trained:
        trainer.console.warn(
            f"the optimizer states of {len(saved - trained)} parameters are not used, which are not trained any more"
            f" ({min(saved - trained)}, ...)"
        )


class _Reader:
    """Tensors of a set of safetensors files by "SLOT:PARAMETER"; `slots` in the files' order."""

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self.slots = list(dict.fromkeys(name.partition(":")[0] for name in files))
        self._open: tuple[Path, Any] | None = None

    def get(self, slot: str, name: str) -> Tensor | None:
        path = self.files.get(f"{slot}:{name}")
        if path is None:
            return None
        if self._open is None or self._open[0] != path:
            self._open = (path, safe_open(path, "pt"))
        return self._open[1].get_tensor(f"{slot}:{name}")


class _PerParameter:
    """A torch optimizer: `state[parameter]` holds tensors and numbers."""

    def __init__(self, trainer: "GRPOVLMTrainer"):
        self.parameters = trained_parameters(trainer)
        self.optimizer = trainer.optimizer.optimizer  # inside Accelerate's

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `tensors`."""
        for name, parameter in self.parameters.items():
            for slot, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                if _is_tensor(value):
                    yield f"{slot}:{name}", full(value)

    def numbers(self) -> dict[str, dict[str, float]]:
        """{parameter: {slot: number}}."""
        return {
            name: {
                slot: float(value)
                for slot, value in sorted(self.optimizer.state[parameter].items())
                if not _is_tensor(value)
            }
            for name, parameter in self.parameters.items()
            if parameter in self.optimizer.state
        }

    def load(self, reader: _Reader, counts: dict[str, dict[str, float]]) -> None:
        """See `load`. A parameter that never had a gradient has no state."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        for group in self.optimizer.param_groups:
            on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                name = names[parameter]
                if name not in counts:
                    continue
                state = self.optimizer.state[parameter]
                for slot, number in counts[name].items():
                    state[slot] = _number(self.optimizer, number, parameter.device if on_device else "cpu")
                for slot in reader.slots:
                    value = reader.get(slot, name)
                    if value is not None and slot != MASTER:
                        state[slot] = _placed(value, parameter)
                master = reader.get(MASTER, name)
                if master is not None and parameter.dtype == torch.float32:
                    with torch.no_grad():  # model/ has them rounded to bf16
                        parameter.copy_(_placed(master, parameter))


class _Zero:
    """DeepSpeed's ZeRO optimizer: a torch optimizer over this rank's part of flat groups of parameters."""

    def __init__(self, trainer: "GRPOVLMTrainer"):
        self.parameters = trained_parameters(trainer)
        self.zero = trainer.model_wrapped.optimizer
        self.stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
        flat = self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups
        self.flat: list[Tensor] = list(flat)

    @property
    def _states(self) -> dict[Tensor, dict[str, Any]]:
        return self.zero.optimizer.state

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `tensors`."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        first = self._states[self.flat[0]]
        slots = sorted(slot for slot, value in first.items() if _is_tensor(value))
        for name, parameter in self.parameters.items():
            for slot in slots:
                yield f"{slot}:{name}", safe_get_full_optimizer_state(parameter, slot)
            if parameter.dtype != torch.float32:
                yield f"{MASTER}:{name}", safe_get_full_fp32_param(parameter)

    def numbers(self) -> dict[str, dict[str, float]]:
        """The same for all parameters, since all have their steps together."""
        first = self._states[self.flat[0]]
        found = {slot: float(value) for slot, value in sorted(first.items()) if not _is_tensor(value)}
        return dict.fromkeys(self.parameters, found)

    def load(self, reader: _Reader, counts: dict[str, dict[str, float]]) -> None:
        """See `load`. A parameter without a state gets zeros."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        slots = [slot for slot in reader.slots if slot != MASTER]
        latest = {slot: max(of[slot] for of in counts.values()) for slot in next(iter(counts.values()))}
        for flat in self.flat:
            state = self._states[flat]
            for slot, number in latest.items():
                state[slot] = _number(self.zero.optimizer, number, flat.device)
            for slot in slots:
                state[slot] = torch.zeros_like(flat)
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()  # what its first step would do
        for name, parameter in self.parameters.items():
            for slot in slots:
                value = reader.get(slot, name)
                if value is not None:
                    safe_set_full_optimizer_state(parameter, value.to(self.flat[0].device), slot)
            master = reader.get(MASTER, name)
            if master is not None and parameter.dtype != torch.float32:
                safe_set_full_fp32_param(parameter, master.to(self.flat[0].device))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _number(optimizer: torch.optim.Optimizer, value: float, device: Any) -> Tensor | int:
    """A count of steps as this optimizer keeps it: torch's own AdamW as a tensor, the others as an integer."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return torch.tensor(value, dtype=torch.float32, device=device)
    return int(value)


def _placed(value: Tensor, parameter: nn.Parameter) -> Tensor:
    """A whole state where and as the parameter lies."""
    if isinstance(parameter, DTensor):
        mesh, parts = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, parts, src_data_rank=None)
    return value.to(parameter.device)


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
