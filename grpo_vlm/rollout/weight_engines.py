"""The server's side of a weight transfer: vLLM weight-transfer backends of our own, one for each way in sync.py.

Why not vLLM's: the wire format of its ipc and nccl backends changed between 0.26 and 0.31, ipc unpickles what it is
sent, and neither tells whether a weight is missing, which matters here because the server starts without any. Its
engine class, the layerwise reload and the NCCL communicator are used and are the same in all these releases.

An update is start, any number of chunks, finish. Layers are put back into checkpoint form at the start and packed
again as soon as all of a layer's weights have come. Imported by vLLM's processes only, through file_weights.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from grpo_vlm.rollout.packed_buffer import Handle, Layout, join_group, open_handle, unpack

SHOWN_NAMES = 5


@dataclass
class NothingToAgree(WeightTransferInitInfo):
    """Each update says all that is needed."""


class CheckpointEngine(WeightTransferEngine):
    """Loads chunks of named tensors into the live model. Subclasses say where a chunk's tensors are.

    Every update info has `whole`: the update brings all weights, so that a missing one is an error.
    """

    init_info_cls = NothingToAgree

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.whole, self.loaded = False, set()

    def init_transfer_engine(self, init_info: Any) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Put the layers back into checkpoint form, and forget what an update that broke off has left in them."""
        self.whole, self.loaded = False, set()
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Any) -> None:
        """Load one chunk."""
        self.whole = update_info.whole
        self.loaded |= self.model.load_weights(self.tensors(update_info)) or set()

    @abstractmethod
    def tensors(self, update_info: Any) -> Iterable[tuple[str, Tensor]]:
        """The chunk's tensors by checkpoint name. The reload keeps them until their layer is complete."""

    def finish_weight_update(self) -> None:
        """Pack the layers again. RuntimeError when a whole update has left out a weight; vLLM then waits for a second
        finish."""
        # A quantised model has scales that the trainer has not; some models do not say what they load.
        known = self.loaded and self.model_config.quantization is None
        missing = sorted(self._wanted() - self.loaded) if self.whole and known else []
        self.whole = False
        finalize_layerwise_reload(self.model, self.model_config)
        if missing:
            names = ", ".join(missing[:SHOWN_NAMES])
            raise RuntimeError(f"{len(missing)} weights did not come from the trainer: {names}")

    def _wanted(self) -> set[str]:
        """Names of what a whole update brings: parameters and, since a server without weights has garbage in them,
        stored buffers; not vLLM's own scales, which begin with an underscore."""
        names = {name for name, _ in self.model.named_parameters()}
        for prefix, part in self.model.named_modules():
            stored = part._buffers.keys() - part._non_persistent_buffers_set
            names |= {f"{prefix}.{name}" for name in stored if not name.startswith("_")}
        return names

    def shutdown(self) -> None:
        """Nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Unused: the trainer sends through grpo_vlm.rollout.sync. vLLM 0.26 and 0.27 declare the method abstract."""
        raise NotImplementedError("the trainer sends weights through grpo_vlm.rollout.sync")


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    """path: a safetensors file with checkpoint names, readable by the server."""

    path: str
    whole: bool


class FileWeightEngine(CheckpointEngine):
    """Backend "file"."""

    update_info_cls = FileUpdate

    def tensors(self, update_info: FileUpdate) -> Iterator[tuple[str, Tensor]]:
        """The file's."""
        with safe_open(update_info.path, "pt", device="cpu") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


@dataclass
class PackedUpdate(WeightTransferUpdateInfo):
    """A chunk in a buffer of bytes. layout: the fields of packed_buffer.Layout. handles: those of packed_buffer.Handle
    by the GPU's UUID, for backend ipc."""

    layout: dict[str, Any]
    whole: bool
    handles: dict[str, dict[str, Any]] | None = None


class IPCWeightEngine(CheckpointEngine):
    """Backend "grpo_vlm_ipc": the buffer is memory of the trainer's process on the same GPU.

    It is opened once per update: CUDA counts one opening for each handle that is given out.
    """

    update_info_cls = PackedUpdate
    opened: tuple[dict[str, Any], Tensor] | None = None

    def tensors(self, update_info: PackedUpdate) -> list[tuple[str, Tensor]]:
        """Copies, because the trainer fills the buffer anew."""
        uuid = str(torch.get_device_module(self.device).get_device_properties(self.device).uuid)
        if uuid not in update_info.handles:
            known = ", ".join(update_info.handles)
            raise ValueError(f"no training process shares memory of GPU {uuid} with the server; those of {known} do")
        handle = update_info.handles[uuid]
        if self.opened is None or self.opened[0] != handle:
            self.opened = handle, open_handle(Handle(**handle), self.device)
        return unpack(self.opened[1], Layout(**update_info.layout))

    def start_weight_update(self) -> None:
        """See CheckpointEngine."""
        self.opened = None
        super().start_weight_update()

    def finish_weight_update(self) -> None:
        """See CheckpointEngine."""
        self.opened = None
        super().finish_weight_update()

    def shutdown(self) -> None:
        """Close the trainer's memory."""
        self.opened = None


@dataclass
class Group(WeightTransferInitInfo):
    """Where the NCCL group of the trainer (rank 0) and all workers meets."""

    master_address: str
    master_port: int
    world_size: int


class NCCLWeightEngine(CheckpointEngine):
    """Backend "grpo_vlm_nccl": each chunk is one broadcast of the trainer."""

    init_info_cls = Group
    update_info_cls = PackedUpdate
    group: Any = None
    buffer: Tensor | None = None

    def init_transfer_engine(self, init_info: Group) -> None:
        """Join the trainer's group."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        address = (init_info.master_address, init_info.master_port)
        self.group = join_group(*address, 1 + worker, init_info.world_size, self.device)

    def tensors(self, update_info: PackedUpdate) -> list[tuple[str, Tensor]]:
        """Receive the chunk into a buffer that is used again for the next, and copy it out of there."""
        if self.group is None:
            raise RuntimeError("the trainer has not opened a group: /init_weight_transfer_engine comes first")
        layout = Layout(**update_info.layout)
        if self.buffer is None or len(self.buffer) < layout.size:
            self.buffer = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        part = self.buffer[: layout.size]
        self.group.broadcast(part, src=0, stream=torch.get_device_module(self.device).current_stream())
        return unpack(part, layout)

    def finish_weight_update(self) -> None:
        """See CheckpointEngine."""
        self.buffer = None
        super().finish_weight_update()

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None
