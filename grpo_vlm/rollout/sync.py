"""Brings the trainer's weights into the vLLM server, in bounded memory: `file` for a CPU server, `ipc` for one on the
same GPU.

Every rank walks over all parameters, because gathering a sharded one is a collective; only the main process sends. An
error of the main process does not stop the walk (the others would hang) but is raised on all ranks after it.
"""

from __future__ import annotations

import base64
import os
import pickle
import platform
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import reduce_tensor

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.client import VLLMClient
from grpo_vlm.rollout.ranks import raise_everywhere

CHUNK_BYTES = 512 * 2**20
SHARED_MEMORY = Path("/dev/shm")
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module.")


def folder_prefix() -> str:
    """Start of the name of a folder of weights: the host (containers may share /dev/shm, but no process ids)."""
    return f"grpo_vlm-{platform.node()}-"


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


def named_weights(model: nn.Module, accelerator: Any) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, full tensor) of every parameter, one after the other, on all ranks.

    A tensor is valid until the next one is asked for. Plain, DDP, ZeRO-3 and FSDP2 models. A head tied to the
    embeddings is named too: vLLM on a CPU packs it apart from them, and it would stay stale.
    """
    module = accelerator.unwrap_model(model)
    zero3 = _is_zero3(accelerator)
    embeddings, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
    for name, parameter in module.named_parameters():
        with _whole(parameter, zero3) as tensor:
            yield _clean(name), tensor
            if parameter is embeddings and parameter is head:
                yield "lm_head.weight", tensor


def _is_zero3(accelerator: Any) -> bool:
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


class _whole:
    """Context: the full tensor of a parameter, whatever it is sharded with."""

    def __init__(self, parameter: nn.Parameter, zero3: bool) -> None:
        self.parameter, self.gathered = parameter, None
        if zero3:
            import deepspeed

            self.gathered = deepspeed.zero.GatheredParameters([parameter])

    def __enter__(self) -> Tensor:
        if self.gathered is not None:
            self.gathered.__enter__()
        data = self.parameter.detach()
        return data.full_tensor() if isinstance(data, DTensor) else data

    def __exit__(self, *error: Any) -> None:
        if self.gathered is not None:
            self.gathered.__exit__(*error)


def _clean(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def largest_weight_bytes(model: nn.Module, accelerator: Any, dtype: torch.dtype) -> int:
    """Bytes of the largest parameter once it is cast to `dtype`."""
    zero3 = _is_zero3(accelerator)
    parameters = accelerator.unwrap_model(model).parameters()
    return max(p.ds_numel if zero3 else p.numel() for p in parameters) * dtype.itemsize


class WeightSync(ABC):
    """One transfer per call of `send`, by all ranks. Subclasses say how a chunk of tensors reaches the server.

    client: the main process's; None on the other ranks. dtype: what the server holds.
    """

    def __init__(self, client: VLLMClient | None, accelerator: Any, dtype: torch.dtype) -> None:
        self.client, self.accelerator, self.dtype = client, accelerator, dtype

    def send(self, model: nn.Module) -> dict[str, float]:
        """Transfer all weights, then drop what the server has cached of the old ones. Returns seconds and gigabytes.

        Raises RolloutError, on all ranks, when the server refuses.
        """
        started = time.perf_counter()
        error, sent = None, 0
        weights = named_weights(model, self.accelerator)
        try:
            if self.client is not None:
                self.client.post("/start_weight_update")
                sent = self._transfer(model, weights)
                self.client.post("/finish_weight_update")
                self.client.post("/reset_prefix_cache")
                self.client.post(
                    "/reset_encoder_cache"
                )  # image features are cached by picture and go stale with the tower
        except (RolloutError, OSError) as problem:
            error = str(problem)
        for _ in weights:  # ranks that do not send, or the rest after an error: join the gathers
            pass
        raise_everywhere(error, self.accelerator, RolloutError)
        return {"sync/seconds": time.perf_counter() - started, "sync/gb": sent / 1e9}

    @abstractmethod
    def _transfer(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> int:
        """Send everything that the iterator yields; returns the bytes."""

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


class FileSync(WeightSync):
    """safetensors files in /dev/shm (or the run folder when that is too small), each removed as soon as it is
    loaded."""

    def __init__(self, client: VLLMClient | None, accelerator: Any, dtype: torch.dtype, run_dir: Path) -> None:
        super().__init__(client, accelerator, dtype)
        self.run_dir = run_dir

    def _transfer(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> int:
        needed = CHUNK_BYTES + largest_weight_bytes(model, self.accelerator, self.dtype)
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2 * needed
        chunk: dict[str, Tensor] = {}
        sent = waiting = 0
        prefix = f"{folder_prefix()}{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=SHARED_MEMORY if roomy else self.run_dir) as folder:
            path = Path(folder) / "weights.safetensors"
            for name, tensor in weights:
                chunk[name] = self._cast(tensor).to("cpu", copy=True).contiguous()
                waiting += chunk[name].nbytes
                sent += chunk[name].nbytes
                if waiting > CHUNK_BYTES:
                    self._send_file(chunk, path)
                    chunk, waiting = {}, 0
            if chunk:
                self._send_file(chunk, path)
        return sent

    def _send_file(self, chunk: dict[str, Tensor], path: Path) -> None:
        save_file(chunk, path)
        self.client.post("/update_weights", {"update_info": {"path": str(path)}})
        path.unlink()


class IPCSync(WeightSync):
    """One reused buffer in the memory of the GPU that both sides use; the server is handed its address (vLLM's packed
    format)."""

    def _transfer(self, model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> int:
        device = self.accelerator.device
        backend = torch.get_device_module(device)
        size = max(CHUNK_BYTES, largest_weight_bytes(model, self.accelerator, self.dtype))
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        uuid = str(backend.get_device_properties(device).uuid)
        handle = base64.b64encode(pickle.dumps({uuid: reduce_tensor(buffer)[1]})).decode()
        chunk: list[tuple[str, Tensor, int]] = []  # name, an empty tensor of the shape and dtype, bytes
        sent = used = 0
        for name, tensor in weights:
            cast = self._cast(tensor).contiguous()
            if used + cast.nbytes > size:
                self._send_buffer(chunk, handle)
                chunk, used = [], 0
            buffer[used : used + cast.nbytes].copy_(cast.view(-1).view(torch.uint8))
            chunk.append((name, cast.to("meta"), cast.nbytes))
            used += cast.nbytes
            sent += cast.nbytes
        self._send_buffer(chunk, handle)
        del buffer
        backend.ipc_collect()
        return sent

    def _send_buffer(self, chunk: list[tuple[str, Tensor, int]], handle: str) -> None:
        torch.accelerator.synchronize()  # the copies into the buffer must have landed
        info = {
            "names": [name for name, _, _ in chunk],
            "dtype_names": [str(like.dtype).removeprefix("torch.") for _, like, _ in chunk],
            "shapes": [list(like.shape) for _, like, _ in chunk],
            "tensor_sizes": [nbytes for _, _, nbytes in chunk],
            "packed": True,
            "ipc_handles_pickled": handle,
        }
        self.client.post("/update_weights", {"update_info": info})
