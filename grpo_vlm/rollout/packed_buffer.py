"""Tensors packed into one buffer of bytes, and how another process gets at it: by a handle of its memory, or by a
broadcast. Both ends use it, trainer (sync_packed.py) and server (weight_engines.py).

Shape legend: N bytes of the buffer.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

ALIGNMENT = 16


@dataclass
class Layout:
    """What lies where in a buffer: names, dtypes (torch's names), shapes and first bytes; `size` bytes in all."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    size: int = 0

    def room(self, nbytes: int) -> int:
        """Bytes in all once a tensor of `nbytes` is added."""
        return -(-self.size // ALIGNMENT) * ALIGNMENT + nbytes

    def add(self, name: str, tensor: Tensor, buffer: Tensor) -> None:
        """Copy a contiguous tensor to the end of what is in `buffer` [N]."""
        end = self.room(tensor.nbytes)
        start = end - tensor.nbytes
        buffer[start:end].copy_(tensor.reshape(-1).view(torch.uint8))
        self.names.append(name)
        self.dtypes.append(str(tensor.dtype).removeprefix("torch."))
        self.shapes.append(list(tensor.shape))
        self.starts.append(start)
        self.size = end


def unpack(buffer: Tensor, layout: Layout) -> list[tuple[str, Tensor]]:
    """(name, tensor) of all that is in `buffer` [N], each in memory of its own: the buffer is filled again."""
    found = []
    for name, dtype_name, shape, start in zip(layout.names, layout.dtypes, layout.shapes, layout.starts, strict=True):
        dtype = getattr(torch, dtype_name)
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        found.append((name, buffer[start : start + nbytes].clone().view(dtype).view(shape)))
    return found


@dataclass
class Handle:
    """Memory of one process that another on the same GPU may open (CUDA IPC): torch's arguments as JSON has them."""

    nbytes: int
    memory: str
    memory_bytes: int
    offset_bytes: int
    counter: str
    counter_offset: int
    event: str
    wait_for_event: bool


def make_handle(buffer: Tensor) -> Handle:
    """The handle of a buffer [N] of bytes on a GPU. The process must keep the buffer until the other has closed it."""
    _, arguments = reduce_tensor(buffer)
    memory, memory_bytes, offset_bytes, _, counter, counter_offset, event, wait_for_event = arguments[7:]
    return Handle(
        nbytes=buffer.numel(),
        memory=_text(memory),
        memory_bytes=memory_bytes,
        offset_bytes=offset_bytes,
        counter=_text(counter),
        counter_offset=counter_offset,
        event=_text(event),
        wait_for_event=wait_for_event,
    )


def open_handle(handle: Handle, device: torch.device) -> Tensor:
    """The buffer [N] of a handle, on this process's name for the same GPU."""
    return rebuild_cuda_tensor(*rebuild_arguments(handle, device.index))


def rebuild_arguments(handle: Handle, device_index: int) -> tuple[Any, ...]:
    """torch's arguments of a one-dimensional tensor of bytes, in the order of `reduce_tensor`."""
    return (
        torch.Tensor,
        torch.Size([handle.nbytes]),
        (1,),
        0,  # the tensor's offset in its storage
        torch.storage.TypedStorage,
        torch.uint8,
        device_index,
        base64.b64decode(handle.memory),
        handle.memory_bytes,
        handle.offset_bytes,
        False,  # requires no gradient
        base64.b64decode(handle.counter),
        handle.counter_offset,
        base64.b64decode(handle.event),
        handle.wait_for_event,
    )


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def join_group(address: str, port: int, rank: int, world_size: int, device: torch.device) -> Any:
    """vLLM's NCCL communicator over the trainer (rank 0, which opens `port`) and all workers of the server; returns
    when all are there. RuntimeError when this machine has no NCCL."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    group = PyNcclCommunicator(StatelessProcessGroup.create(address, port, rank, world_size), device)
    if group.disabled:
        raise RuntimeError("NCCL could not be loaded")
    return group
