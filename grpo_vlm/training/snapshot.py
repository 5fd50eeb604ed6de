"""Tensors on their way from the device to a checkpoint's safetensors files.

In the background: all are copied to host memory at once, and a thread writes them while training goes on. Directly: a
file's worth is copied and written before the next one, which needs 4 GiB at most and holds training up.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from grpo_vlm.training.host_copy import HostCopy

SHARD_BYTES = 4 << 30
INDEX = "{stem}.safetensors.index.json"

Naming = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Shards:
    """One set of files `STEM-00001-of-0000N.safetensors` with an index, or `STEM.safetensors` when one file is enough:
    the form that transformers and vLLM read.

    background: keep the copies until `finish`. naming: changes names (and forms) just before a file is written.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        *,
        background: bool,
        naming: Naming | None = None,
        shard_bytes: int | None = None,
    ):
        self.folder, self.stem, self.background = folder, stem, background
        self.naming, self.shard_bytes = naming, shard_bytes or SHARD_BYTES
        self.bytes = 0
        self._copy = HostCopy()
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._waiting: list[dict[str, Tensor]] = []  # full shards that are not written yet
        self._written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Copies a tensor, which may change afterwards. OSError when a file cannot be written."""
        size = tensor.numel() * tensor.element_size()
        if self._open and self._open_bytes + size > self.shard_bytes:
            self._close_shard()
        self._open[name] = self._copy(tensor.detach())
        self._open_bytes += size
        self.bytes += size

    def extend(self, items: Iterable[tuple[str, Tensor]]) -> None:
        """Adds all."""
        for name, tensor in items:
            self.add(name, tensor)

    def copied(self) -> None:
        """Waits until the device is done with what was added."""
        self._copy.wait()

    def finish(self) -> None:
        """Writes what is left, gives the files their final names, and writes the index. OSError."""
        self._close_shard()
        while self._waiting:
            self._write(self._waiting.pop(0))
        count = len(self._written)
        if count == 1:
            os.replace(self._written[0][0], self.folder / f"{self.stem}.safetensors")
            return
        where: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, 1):
            final = f"{self.stem}-{number:05d}-of-{count:05d}.safetensors"
            os.replace(path, self.folder / final)
            where |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.bytes}, "weight_map": dict(sorted(where.items()))}
        (self.folder / INDEX.format(stem=self.stem)).write_text(json.dumps(index, indent=1), encoding="utf-8")

    def _close_shard(self) -> None:
        if self._open:
            shard, self._open, self._open_bytes = self._open, {}, 0
            self._waiting.append(shard)
            if not self.background:
                self._write(self._waiting.pop())

    def _write(self, shard: dict[str, Tensor]) -> None:
        self._copy.wait()
        named = shard if self.naming is None else self.naming(shard)
        path = self.folder / f"{self.stem}-{len(self._written) + 1:05d}.part"
        save_file({name: _alone(tensor) for name, tensor in named.items()}, path, metadata={"format": "pt"})
        self._written.append((path, list(named)))


def shard_files(folder: Path, stem: str) -> dict[str, Path]:
    """For each tensor of a set of files that `Shards` wrote the file it lies in; {} where there is none."""
    index = folder / INDEX.format(stem=stem)
    if index.is_file():
        where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in where.items()}
    path = folder / f"{stem}.safetensors"
    if not path.is_file():
        return {}
    with safe_open(path, "pt") as file:
        return dict.fromkeys(file.keys(), path)


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own, which the format asks for."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
