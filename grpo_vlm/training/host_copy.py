"""Copies of device tensors in host memory, fast: through pinned buffers, which threads empty into pageable memory.

A plain copy to pageable memory runs at the speed of one thread that touches fresh pages, about 2 GB/s; pinning all of
the target costs as much. Here the pages are touched by several threads while the next part is on the bus.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

BUFFER_BYTES = 32 << 20
MOST_BUFFERS = 12
SMALL_BYTES = 1 << 20


class HostCopy:
    """Call it with a tensor; the copy holds its values after `wait`. The tensor itself may change on return."""

    def __init__(self) -> None:
        self._free: SimpleQueue[Tensor] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._pending: list[Future] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the CPU."""
        if tensor.device.type == "cpu" or tensor.numel() * tensor.element_size() < SMALL_BYTES:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        self._prepare()
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, into = (item.contiguous().view(-1).view(torch.uint8) for item in (tensor, target))
        for start in range(0, len(source), BUFFER_BYTES):
            part, buffer = source[start : start + BUFFER_BYTES], self._free.get()
            buffer[: len(part)].copy_(part, non_blocking=True)
            done = torch.Event(device=tensor.device)
            done.record()
            self._pending.append(self._pool.submit(self._empty, buffer, into[start : start + len(part)], done))
        done.synchronize()  # the caller may free the tensor on another stream
        return target

    def wait(self) -> None:
        """Returns when all copies are whole; gives the buffers back."""
        for future in self._pending:
            future.result()
        self._pending.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool, self._free = None, SimpleQueue()

    def _prepare(self) -> None:
        if self._pool is None:
            count = min(MOST_BUFFERS, len(os.sched_getaffinity(0)))
            self._pool = ThreadPoolExecutor(count)
            for _ in range(count):
                self._free.put(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True))

    def _empty(self, buffer: Tensor, into: Tensor, done: torch.Event) -> None:
        done.synchronize()
        np.copyto(into.numpy(), buffer[: len(into)].numpy())
        self._free.put(buffer)
