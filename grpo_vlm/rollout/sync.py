"""Brings the trainer's weights into the vLLM server: what all ways of doing it share, and the one through files.

    file     a server on a CPU: safetensors files in shared memory              here
    ipc      a server on the trainer's GPUs: one buffer that both see           sync_packed.py
    nccl     a server on GPUs of its own: one buffer, broadcast                 sync_packed.py
    adapter  only a LoRA adapter, for any server: a folder of two small files   sync_adapter.py

Every rank walks over all weights, because gathering a sharded one is a collective; only a leader (a rank whose client
is given) speaks to its server. An error does not stop the walk (the other ranks would hang) but is raised on all ranks
after it. What does not train is sent once, as long as the server keeps it. Before each transfer the server is asked
whether it has, by the name of the weights that it holds: its user may have started it again.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import Tensor, nn

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.ranks import raise_first
from grpo_vlm.rollout.weights import Weight, gathered, largest_bytes, moving, weights
from grpo_vlm.rollout.wire import WEIGHTS_PATH

CHUNK_BYTES = 512 * 2**20
SHARED_MEMORY = Path("/dev/shm")
RESET_TRIES, RESET_PAUSE_S = 20, 0.1


class WeightSync(ABC):
    """One transfer per call of `send`, by all ranks. Subclasses say how the tensors reach the server.

    client: a leader's; None on the other ranks. dtype: what the server holds.
    """

    backend: str
    adapter: str | None = None
    """Name that requests must give, when the server computes with an adapter."""
    sleep_level = 2
    """How deep the server may sleep: at 2 it drops its weights, and the next `send` brings all of them."""

    def __init__(self, client: VLLMClient | None, accelerator: Any, dtype: torch.dtype) -> None:
        self.client, self.accelerator, self.dtype = client, accelerator, dtype
        self.kept = False  # the server has all weights of the last `send`
        self.name: str | None = None  # of what the server holds, as far as it was told
        self.run = secrets.token_hex(8)  # tells a server this run from others
        self.problem: str | None = None

    def connect(self) -> None:
        """Tell a server that was just started how weights will come. On its leader, before the first `begin`."""
        self.kept, self.name = False, None
        self._connect()

    def _connect(self) -> None:
        self.client.post("/init_weight_transfer_engine", {"init_info": {}})

    def begin(self) -> bool:
        """On a leader, before a `send`: until `end` the server holds nothing that has a name. False when it did not
        hold what it was told last: it is another process, which has none of the weights, or another run uses it."""
        mark = f"weights that a sync has not finished ({secrets.token_hex(8)})"
        body = {"weights": mark, "run": self.run, "unfinished": True}
        held = self.client.post(WEIGHTS_PATH, body)["held"]
        same = self.name is None or held == self.name
        if not same:
            self.connect()
        self.name = mark
        return same

    def end(self, name: str) -> None:
        """On a leader, after a `send`: the server holds the weights `name`. WeightsLost when it is not the process
        any more that `begin` spoke to."""
        self.client.post(WEIGHTS_PATH, {"held": self.name, "weights": name, "run": self.run})
        self.name = name

    def reaches_same(self) -> bool:
        """On a leader: whether the server still is the process that `begin` or `end` spoke to last."""
        try:
            return self.client.get(WEIGHTS_PATH)["held"] == self.name
        except RolloutError:
            return False

    def forget(self) -> None:
        """The server has lost its weights: it sleeps at level 2."""
        self.kept = False

    def send(self, model: nn.Module) -> dict[str, float]:
        """Transfer the weights, then drop what the server has cached of the old ones. Returns seconds and gigabytes.

        Raises RolloutError, on all ranks, when a server refuses.
        """
        started, self.problem = time.perf_counter(), None
        found = weights(model, self.accelerator)
        whole = not self._all_kept()
        chosen = found if whole else moving(found)
        walk = gathered(chosen, self.accelerator)
        self.kept = False
        self._try(lambda: self._post("/start_weight_update"))
        sent = self._transfer(walk, chosen, whole)
        for _ in walk:  # ranks that do not send, or the rest after an error: join the gathers
            pass
        self._try(lambda: self._finish(chosen))
        if self.problem is not None:
            with suppress(RolloutError):  # the server may not have begun, or be gone: the problem has been said
                self._post("/finish_weight_update")
        raise_first(self.problem, self.accelerator, RolloutError)
        self.kept = True
        return {"sync/seconds": time.perf_counter() - started, "sync/gb": sent / 1e9}

    @abstractmethod
    def _transfer(self, walk: Iterator[tuple[str, Tensor]], chosen: Sequence[Weight], whole: bool) -> int:
        """Send what `walk` yields, the tensors of `chosen`; returns the bytes. Called by all ranks; a problem of the
        server becomes `self.problem`, and what this rank leaves of the walk is walked for it."""

    def _finish(self, chosen: Sequence[Weight]) -> None:
        """End the update and drop the caches: keys and values of old prompts and, when the tower has moved, features
        of pictures, which vLLM finds again by the picture alone."""
        self._post("/finish_weight_update")
        self._reset_prefix_cache()
        if any(weight.in_tower for weight in chosen):
            self._post("/reset_encoder_cache")

    def _reset_prefix_cache(self) -> None:
        """Drop keys and values. The server says no while it still ends aborted requests."""
        if self.client is None:
            return
        for _ in range(RESET_TRIES):
            if self.client.post("/reset_prefix_cache")["success"]:
                return
            time.sleep(RESET_PAUSE_S)
        raise RolloutError("the vLLM server did not drop its prefix cache: requests are still running in it")

    def _all_kept(self) -> bool:
        """Whether no server has lost its weights; the same on all ranks."""
        if self.accelerator.num_processes == 1:
            return self.kept
        return all(gather_object([self.kept or self.client is None]))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        if self.client is not None:
            self.client.post(path, body)

    def _try(self, call: Any) -> None:
        """`call`, unless there was a problem before. What it raises becomes the problem."""
        if self.problem is None:
            try:
                call()
            except (RolloutError, OSError) as error:
                self.problem = str(error)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class FileSync(WeightSync):
    """safetensors files in /dev/shm (or the run folder when that is too small or not the server's), each removed as
    soon as it is loaded.

    here: the server runs on this machine.
    """

    backend = "file"

    def __init__(
        self,
        client: VLLMClient | None,
        accelerator: Any,
        dtype: torch.dtype,
        run_dir: Path,
        here: bool = True,
    ) -> None:
        super().__init__(client, accelerator, dtype)
        self.run_dir, self.here = run_dir, here

    def _transfer(self, walk: Iterator[tuple[str, Tensor]], chosen: Sequence[Weight], whole: bool) -> int:
        if self.client is None or self.problem is not None:
            return 0
        needed = CHUNK_BYTES + largest_bytes(chosen, self.accelerator, self.dtype)
        place, sent = roomy_place(needed, self.run_dir, self.here), 0
        with tempfile.TemporaryDirectory(prefix=own_prefix(), dir=place) as name:
            for chunk in self._chunks(walk):
                sent += sum(tensor.nbytes for tensor in chunk.values())
                self._try(lambda chunk=chunk: self._send_file(chunk, Path(name, "weights.safetensors"), whole))
                if self.problem is not None:
                    break
        return sent

    def _chunks(self, walk: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Tensors by name in CPU memory, about CHUNK_BYTES at a time."""
        chunk: dict[str, Tensor] = {}
        waiting = 0
        for name, tensor in walk:
            chunk[name] = self._cast(tensor).to("cpu", copy=True).contiguous()
            waiting += chunk[name].nbytes
            if waiting > CHUNK_BYTES:
                yield chunk
                chunk, waiting = {}, 0
        if chunk:
            yield chunk

    def _send_file(self, chunk: dict[str, Tensor], path: Path, whole: bool) -> None:
        save_file(chunk, path)
        self._post("/update_weights", {"update_info": {"path": str(path), "whole": whole}})
        path.unlink()


def roomy_place(needed: int, run_dir: Path, here: bool) -> Path:
    """Shared memory, when it has room for twice `needed` bytes and the server sees it, else the run folder."""
    roomy = here and SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
    return SHARED_MEMORY if roomy else run_dir


def folder_prefix() -> str:
    """Start of the name of a folder of weights: the host (containers may share /dev/shm, but no process ids)."""
    return f"grpo_vlm-{platform.node()}-"


def own_prefix() -> str:
    """Start of the name of this process's folders of weights."""
    return f"{folder_prefix()}{os.getpid()}-"


def remove_left_folders(*places: Path) -> list[Path]:
    """Remove folders of weights whose process was killed in the middle of a sync. Returns what was found."""
    name = re.compile(re.escape(folder_prefix()) + r"(\d{1,9})-\w+")
    left = []
    for place in places:
        for path in place.iterdir() if place.is_dir() else ():
            found = name.fullmatch(path.name)
            if found and _is_dead(int(found[1])):
                shutil.rmtree(path, ignore_errors=True)  # it may be another user's, or another run may remove it too
                left.append(path)
    return left


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it runs, for somebody else
        return False
    return False
