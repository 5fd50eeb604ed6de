"""Weights through one buffer in GPU memory that is filled, taken over by the server, and filled again.

ipc: the server sits on the trainer's GPUs and opens the buffer's memory. Each of its workers finds the training
process of its own GPU, so every training process fills a buffer of its own.
nccl: the server sits on other GPUs; the leader's buffer is broadcast to all of its workers.

Shape legend: N bytes of the buffer.
"""

from __future__ import annotations

import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate.utils import gather_object
from torch import Tensor

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.failures import ServerGone
from grpo_vlm.rollout.packed_buffer import ALIGNMENT, Handle, Layout, join_group, make_handle
from grpo_vlm.rollout.ranks import raise_first
from grpo_vlm.rollout.sync import CHUNK_BYTES, WeightSync
from grpo_vlm.rollout.weights import Weight, largest_bytes

JOIN_S = 60.0


class PackedSync(WeightSync):
    """Fills the buffer and sends it when it is full."""

    @property
    def device_module(self) -> Any:
        """torch.cuda, or another device's module."""
        return torch.get_device_module(self.accelerator.device)

    def _transfer(self, walk: Iterator[tuple[str, Tensor]], chosen: Sequence[Weight], whole: bool) -> int:
        largest = largest_bytes(chosen, self.accelerator, self.dtype)
        buffer = self._allocate(max(CHUNK_BYTES, largest) + ALIGNMENT)
        self._open(buffer)
        layout, sent = Layout(), 0
        for name, tensor in walk:
            cast = self._cast(tensor).contiguous()
            if layout.room(cast.nbytes) > len(buffer):
                self._send(buffer[: layout.size], layout, whole)
                sent, layout = sent + layout.size, Layout()
            layout.add(name, cast, buffer)
        if layout.names:
            self._send(buffer[: layout.size], layout, whole)
        return sent + layout.size

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.accelerator.device)

    def _open(self, buffer: Tensor) -> None:
        """Make the buffer known to those who will read it."""

    @abstractmethod
    def _send(self, part: Tensor, layout: Layout, whole: bool) -> None:
        """Have the server take over the filled part [N] of the buffer; afterwards it may be filled again."""


class IPCSync(PackedSync):
    """Backend "grpo_vlm_ipc". Called by all ranks in step: each fills its buffer, then the leader tells the server."""

    backend = "grpo_vlm_ipc"
    handles: dict[str, Handle]

    def _allocate(self, size: int) -> Tensor:
        problem = buffer = None
        try:
            buffer = super()._allocate(size)
        except torch.OutOfMemoryError:
            problem = (
                f"no room on {self.accelerator.device} for the {size / 1e9:.1f} GB through which weights reach the "
                "server; lower worker.rollout.gpu_memory_utilization"
            )
        raise_first(problem, self.accelerator, RolloutError)
        return buffer

    def _open(self, buffer: Tensor) -> None:
        self.handles = merge_handles({self._uuid(): make_handle(buffer)}, self.accelerator)

    def _uuid(self) -> str:
        return str(self.device_module.get_device_properties(self.accelerator.device).uuid)

    def _send(self, part: Tensor, layout: Layout, whole: bool) -> None:
        self.device_module.synchronize()  # the copies into the buffer must have landed
        self.accelerator.wait_for_everyone()
        handles = {uuid: asdict(handle) for uuid, handle in self.handles.items()}
        info = {"layout": asdict(layout), "handles": handles, "whole": whole}
        self._try(lambda: self._post("/update_weights", {"update_info": info}))
        self.accelerator.wait_for_everyone()

    def _finish(self, chosen: Sequence[Weight]) -> None:
        super()._finish(chosen)
        self.handles = {}
        self.device_module.ipc_collect()  # the server has closed the buffer


def merge_handles(mine: dict[str, Handle], accelerator: Any) -> dict[str, Handle]:
    """The handles of all ranks by their GPU's UUID; the same on all ranks."""
    if accelerator.num_processes == 1:
        return mine
    merged: dict[str, Handle] = {}
    for handles in gather_object([mine]):
        merged |= handles
    return merged


class NCCLSync(PackedSync):
    """Backend "grpo_vlm_nccl". Only the leader fills a buffer; the other ranks join the gathers."""

    backend = "grpo_vlm_nccl"
    group: Any = None

    def _connect(self) -> None:
        """Open the group of the leader and the server's workers."""
        self._leave()
        address, port = own_address(self.client.url)
        size = 1 + self.client.get("/get_world_size")["world_size"]
        info = {"master_address": address, "master_port": port, "world_size": size}
        self.group = beside(
            lambda: join_group(address, port, 0, size, self.accelerator.device),
            lambda: self.client.post("/init_weight_transfer_engine", {"init_info": info}),
        )

    def _transfer(self, walk: Iterator[tuple[str, Tensor]], chosen: Sequence[Weight], whole: bool) -> int:
        if self.client is None or self.problem is not None:
            return 0
        return super()._transfer(walk, chosen, whole)

    def _send(self, part: Tensor, layout: Layout, whole: bool) -> None:
        info = {"layout": asdict(layout), "whole": whole}
        self.device_module.synchronize()
        self._try(lambda: self._broadcast(part, info))

    def _broadcast(self, part: Tensor, info: dict[str, Any]) -> None:
        """The server receives while it answers, so both go on at once."""
        stream = self.device_module.current_stream()

        def broadcast() -> None:
            with torch.accelerator.device_index(part.device.index):  # a new thread begins with GPU 0
                self.group.broadcast(part, src=0, stream=stream)

        try:
            beside(broadcast, lambda: self.client.post("/update_weights", {"update_info": info}))
        except RolloutError:
            self._leave()  # half of a broadcast hangs in the GPU
            raise
        self.device_module.synchronize()

    def _leave(self) -> None:
        if self.group is not None:
            self.group.destroy()
            self.group = None


def beside(work: Callable[[], Any], request: Callable[[], Any]) -> Any:
    """The result of `work`, which waits in a thread for what the server does during `request`.

    Raises what `request` raises, without waiting for `work`: it would wait for ever.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:  # handed to the caller below
            outcome.append(error)

    thread = threading.Thread(target=run, name="weights", daemon=True)
    thread.start()
    request()
    thread.join(JOIN_S)
    if not outcome:
        raise ServerGone(f"the vLLM server did not take part in the transfer of weights within {JOIN_S:g} s")
    if isinstance(outcome[0], Exception):
        raise RolloutError(f"the transfer of weights failed: {outcome[0]!r}") from outcome[0]
    return outcome[0]


def own_address(url: str) -> tuple[str, int]:
    """This machine's address as the server at `url` reaches it, and a free port there."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))  # of a datagram socket: nothing is sent
        address = probe.getsockname()[0]
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return address, probe.getsockname()[1]
