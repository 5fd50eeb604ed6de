"""Weights and optimizer states parked in CPU memory while answers are generated (`worker.actor.offload`), so that the
server has the accelerator to itself."""

from typing import Any

import torch
from torch import Tensor, nn

from grpo_vlm.config import Config


class Parking:
    """Moves what the configuration names between the accelerator and the host. On a CPU there is nothing to move.

    The model that is passed is the one that trains: plain, DDP, FSDP2, or DeepSpeed's engine (ZeRO-3), whose own
    optimizer is used.
    """

    def __init__(self, config: Config, device: torch.device, *, deepspeed: bool):
        offload, here = config.worker.actor.offload, device.type != "cpu"
        self.weights, self.states = offload.offload_params and here, offload.offload_optimizer and here
        self.device, self.deepspeed = device, deepspeed

    def park_states(self, model: nn.Module, optimizer: Any) -> None:
        """The optimizer's states to the host."""
        if self.states and self.deepspeed:
            _offload(model, "optim_states")
        elif self.states:
            move_states(optimizer, torch.device("cpu"))

    def park_weights(self, model: nn.Module) -> None:
        """The weights to the host; DeepSpeed's float32 masters with them."""
        if self.weights and self.deepspeed:
            _offload(model, "lp_params", "hp_params")
        elif self.weights:
            model.to("cpu")

    def fetch(self, model: nn.Module, optimizer: Any) -> None:
        """Everything back to the accelerator."""
        if self.deepspeed and (self.weights or self.states):
            model.reload_states()
            return
        if self.weights:
            model.to(self.device)
        if self.states:
            move_states(optimizer, self.device)


def _offload(engine: Any, *names: str) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine.offload_states(include=[OffloadStateTypeEnum[name] for name in names])


def move_states(optimizer: Any, device: torch.device) -> None:
    """All tensors of an optimizer's states to `device`, a step counter on the host excepted."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = value.to(device)
