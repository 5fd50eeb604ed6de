"""The backend behind file_weights.py; a module of its own because it can be imported only where vLLM is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Nothing to agree on: each update names its file."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """`path`: a safetensors file with checkpoint names, readable by the server."""

    path: str


class FileWeightEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads each named file into the live model; several files may make up one update."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Put the layers back into checkpoint form."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        """Load one file."""
        with safe_open(update_info.path, "pt", device="cpu") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())

    def finish_weight_update(self) -> None:
        """Pack the layers for the CPU kernels again."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing to release."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Unused: the trainer writes the files itself (sync.py). vLLM 0.26 declares the method abstract."""
        raise NotImplementedError("the trainer sends weights through grpo_vlm.rollout.sync.FileSync")
