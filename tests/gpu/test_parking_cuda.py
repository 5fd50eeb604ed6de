"""Parked weights and optimizer states leave the accelerator's memory and come back as they were."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_vlm.config import load_config
from grpo_vlm.training.parking import Parking

pytestmark = pytest.mark.gpu
KEYS = ["worker.actor.offload.offload_params=true", "worker.actor.offload.offload_optimizer=true"]


@pytest.mark.parametrize("divided", [False, True])
def test_parking_frees_memory_and_changes_nothing(divided, tmp_path):
    device = torch.accelerator.current_accelerator()
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(device)
    if divided:
        dist.init_process_group(init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
        fully_shard(model, mesh=init_device_mesh(device.type, (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        step(model, optimizer, device)
        parking = Parking(load_config(None, KEYS), device, deepspeed=False)
        before, full = snapshot(model, optimizer), torch.accelerator.memory_allocated()
        weights = sum(value.numel() * value.element_size() for value in model.parameters())
        parking.park_states(model, optimizer)
        assert full - torch.accelerator.memory_allocated() >= 0.99 * 2 * weights
        parking.park_weights(model)
        assert full - torch.accelerator.memory_allocated() >= 0.99 * 3 * weights
        parking.fetch(model, optimizer)
        assert all(map(torch.equal, before, snapshot(model, optimizer)))
        step(model, optimizer, device)
    finally:
        if divided:
            dist.destroy_process_group()


def step(model, optimizer, device):
    model(torch.ones(2, 1024, device=device)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot(model, optimizer):
    """Copies of weights and states on the host."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().cpu().clone() for value in (*model.parameters(), *states)]
