"""The bytes between client.py and route.py: one batch of prompts there, one frame per finished prompt back.

Numbers travel as raw little-endian buffers and everything else as JSON, so neither side parses a token or a pixel:

    batch   magic | bytes of the JSON | JSON | token ids of each prompt (int32) | pixels of each distinct picture
    frame   bytes of the JSON | bytes of the numbers | JSON | prompt ids, token ids (int32), log-probs (float32)

An empty frame ends the answer; without it the connection broke. On one machine the batch itself stays in memory that
both processes see, and only its name is posted. Imports neither vLLM nor transformers: both sides use it.

Shape legend: P prompt tokens, T tokens of a completion, K tokens of all completions of a prompt.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import secrets
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

PATH = "/grpo_vlm/generate"
WEIGHTS_PATH = "/grpo_vlm/weights"
BODY_TYPE = "application/octet-stream"
SHARED_TYPE = "application/x-grpo-vlm-memory"
UNSHARED = 422  # the HTTP status that asks for the batch itself
WEIGHTS_LOST = 412  # the HTTP status that says: other weights than the batch names
MAGIC = b"GRPOVLM1"
ALIGNMENT = 64
BATCH_HEAD = struct.Struct("<8sQ")
FRAME_HEAD = struct.Struct("<QQ")
PIXEL_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, eq=False)
class Media:
    """A processed picture or video.

    key: equal for equal contents, and only then. kind: "image" or "video".
    pixels: [patches, patch_dim]. grid: patches along time, height and width.
    seconds_per_grid: seconds that one step along time lasts, for models that count time (Qwen2.5-VL videos).
    """

    key: str
    kind: str
    pixels: Tensor
    grid: tuple[int, int, int]
    seconds_per_grid: float | None = None


@dataclass(frozen=True, eq=False)
class WireRequest:
    """One prompt. index: the caller's number of it. token_ids: int32 [P], expanded. media: positions in
    `Batch.media`, those of a kind in reading order. sampling: keyword arguments of `route.sampling_params`."""

    index: int
    token_ids: np.ndarray
    media: tuple[int, ...]
    sampling: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Batch:
    """What one POST asks for. adapter: the name of the LoRA adapter to compute with. hold: let no step of the engine
    begin before all prompts are in, so that equal batches are computed equally. weights: name of those that the server
    must hold."""

    requests: Sequence[WireRequest]
    media: Sequence[Media]
    adapter: str | None = None
    hold: bool = True
    weights: str | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The completions of one prompt. prompt_ids: int32 [P], as the engine used them. token_ids int32 [T] and logprobs
    float32 [T] of each completion; reasons: "stop" or "length" of each."""

    index: int
    prompt_ids: np.ndarray
    token_ids: list[np.ndarray]
    logprobs: list[np.ndarray]
    reasons: list[str]


@dataclass(frozen=True)
class Failure:
    """Why one prompt has no completions. status: as of HTTP, 4xx when the prompt itself is at fault."""

    index: int
    status: int
    reason: str


def encode_batch(batch: Batch) -> list[memoryview | bytes]:
    """The body's pieces, in order; pixels are not copied."""
    buffers = [_bytes(torch.from_numpy(request.token_ids)) for request in batch.requests]
    buffers += [_bytes(item.pixels) for item in batch.media]
    header = {
        "adapter": batch.adapter,
        "hold": batch.hold,
        "weights": batch.weights,
        "requests": [
            {"index": r.index, "tokens": len(r.token_ids), "media": r.media, "sampling": r.sampling}
            for r in batch.requests
        ],
        "media": [
            {
                "key": item.key,
                "kind": item.kind,
                "grid": item.grid,
                "seconds_per_grid": item.seconds_per_grid,
                "shape": list(item.pixels.shape),
                "dtype": str(item.pixels.dtype).removeprefix("torch."),
            }
            for item in batch.media
        ],
    }
    text = json.dumps(header).encode()
    pieces: list[memoryview | bytes] = [BATCH_HEAD.pack(MAGIC, len(text)), text]
    used = BATCH_HEAD.size + len(text)
    for buffer in buffers:
        pieces += [bytes(-used % ALIGNMENT), buffer]
        used += -used % ALIGNMENT + len(buffer)
    return [piece for piece in pieces if len(piece)]


def decode_batch(body: bytearray | mmap.mmap) -> Batch:
    """The batch of a body; its arrays are views into it. ValueError when the bytes do not fit together."""
    if len(body) < BATCH_HEAD.size or body[: len(MAGIC)] != MAGIC:
        raise ValueError(f"the body does not start with {MAGIC!r}: client and server differ in version")
    used = BATCH_HEAD.size + BATCH_HEAD.unpack_from(body)[1]
    header = json.loads(bytes(body[BATCH_HEAD.size : used]))

    def take(dtype: torch.dtype, count: int) -> Tensor:
        nonlocal used
        used += -used % ALIGNMENT
        start, used = used, used + count * dtype.itemsize
        if used > len(body):
            raise ValueError(f"the body has {len(body)} bytes, its header speaks of {used} or more")
        return torch.frombuffer(body, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)

    requests = [
        WireRequest(r["index"], take(torch.int32, r["tokens"]).numpy(), tuple(r["media"]), r["sampling"])
        for r in header["requests"]
    ]
    media = []
    for item in header["media"]:
        rows, width = item["shape"]
        pixels = take(PIXEL_DTYPES[item["dtype"]], rows * width).view(rows, width)
        media.append(Media(item["key"], item["kind"], pixels, tuple(item["grid"]), item["seconds_per_grid"]))
    if used != len(body):
        raise ValueError(f"the body has {len(body)} bytes, its header speaks of {used}")
    return Batch(requests, media, header["adapter"], header["hold"], header["weights"])


def can_share(host: str | None) -> bool:
    """Whether a server at this host may be able to read this process's memory."""
    return sys.platform == "linux" and host in ("127.0.0.1", "localhost", "::1")


@contextmanager
def shared(pieces: Sequence[memoryview | bytes]) -> Iterator[bytes]:
    """The body that names memory with the pieces in it; the server must have opened it before the block ends.

    An anonymous file (memfd): no limit of /dev/shm applies to it (64 MB in many containers) and none is left behind.
    """
    name = f"grpo_vlm-{secrets.token_hex(8)}"
    descriptor = os.memfd_create(name)
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            for piece in pieces:
                file.write(piece)
        yield json.dumps({"path": f"/proc/{os.getpid()}/fd/{descriptor}", "name": name}).encode()
    finally:
        os.close(descriptor)


def open_shared(body: bytes | bytearray) -> mmap.mmap:
    """The memory that a body names, a private view. OSError or ValueError when it is not this machine's or not there.

    The name is random: another machine's process id may mean another process here.
    """
    place = json.loads(bytes(body))
    if not re.fullmatch(r"/proc/\d+/fd/\d+", place["path"]):
        raise ValueError(f"{place['path']!r} is not a file descriptor")
    target = os.readlink(place["path"])
    if target != f"/memfd:{place['name']} (deleted)":
        raise ValueError(f"{place['path']} is {target!r} and not {place['name']!r}: not of this machine")
    with open(place["path"], "rb") as file:
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def encode_answer(answer: Answer) -> bytes:
    """One frame."""
    header = {
        "index": answer.index,
        "prompt": len(answer.prompt_ids),
        "lengths": [len(ids) for ids in answer.token_ids],
        "reasons": answer.reasons,
    }
    arrays = [answer.prompt_ids, *answer.token_ids, *answer.logprobs]
    return _frame(header, b"".join(array.tobytes() for array in arrays))


def encode_failure(failure: Failure) -> bytes:
    """One frame."""
    return _frame({"index": failure.index, "status": failure.status, "reason": failure.reason}, b"")


def encode_end() -> bytes:
    """The last frame."""
    return FRAME_HEAD.pack(0, 0)


def read_frame(read: Callable[[int], bytes]) -> Answer | Failure | None:
    """The next frame of a stream, None after the last. `read(n)` gives up to n bytes, none at the end.

    EOFError when the stream ends before its last frame, ValueError when a frame does not fit together.
    """
    header_bytes, payload_bytes = FRAME_HEAD.unpack(_read_all(read, FRAME_HEAD.size))
    if header_bytes == 0:
        return None
    header = json.loads(_read_all(read, header_bytes))
    if "status" in header:
        return Failure(header["index"], header["status"], header["reason"])
    payload = _read_all(read, payload_bytes)
    lengths = header["lengths"]
    numbers = header["prompt"] + sum(lengths)
    if payload_bytes != 4 * (numbers + sum(lengths)) or len(header["reasons"]) != len(lengths):
        raise ValueError(f"an answer of {payload_bytes} bytes has the header {header}")
    ids = np.frombuffer(payload, np.int32, numbers)
    logprobs = np.frombuffer(payload, np.float32, sum(lengths), 4 * numbers)
    ends = np.cumsum(lengths)[:-1]
    prompt_ids, token_ids = ids[: header["prompt"]], ids[header["prompt"] :]
    return Answer(
        header["index"], prompt_ids, np.split(token_ids, ends), np.split(logprobs, ends), list(header["reasons"])
    )


def _frame(header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header).encode()
    return FRAME_HEAD.pack(len(text), len(payload)) + text + payload


def _read_all(read: Callable[[int], bytes], count: int) -> bytes:
    parts = []
    while count:
        part = read(count)
        if not part:
            raise EOFError("the vLLM server's answer ends in the middle")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _bytes(tensor: Tensor) -> memoryview:
    """The tensor's memory, one dimension of bytes (numpy has no bfloat16)."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
