"""Prompts from one process to another: pickled, with every array beside the pickle instead of in it, so that pixels
are written once, read in place and sent once however many prompts share them.

A message is a head (the number of pieces and their sizes in bytes), the pickle, and the arrays, each piece starting
at a multiple of ALIGNMENT bytes. Only for processes of one run: unpickling runs code.
"""

import io
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from typing import IO, Any

import numpy as np
import torch
from PIL import Image

ALIGNMENT = 64  # bytes
Piece = bytes | memoryview


class _Pickler(pickle.Pickler):
    """Tensors and RGB pictures travel as arrays, which protocol 5 keeps out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.from_numpy, (value.numpy(),)
        if isinstance(value, Image.Image) and value.mode == "RGB":
            return Image.fromarray, (np.asarray(value),)
        return NotImplemented


def dumps(value: Any) -> list[Piece]:
    """The pieces of a message. Tensors must be on the CPU; arrays are referred to, not copied."""
    arrays: list[Piece] = []
    file = io.BytesIO()
    _Pickler(file, protocol=5, buffer_callback=lambda array: arrays.append(array.raw())).dump(value)
    pieces = [file.getbuffer(), *arrays]
    return [struct.pack(f"<{len(pieces) + 1}q", len(pieces), *(len(piece) for piece in pieces)), *pieces]


def size_of(pieces: Sequence[Piece]) -> int:
    """Bytes of the message."""
    return sum(_padded(len(piece)) for piece in pieces)


def write(pieces: Sequence[Piece], memory: memoryview) -> None:
    """Lays the message down at the start of `memory`, which holds at least size_of(pieces) bytes."""
    first = 0
    for piece in pieces:
        memory[first : first + len(piece)] = piece
        first += _padded(len(piece))


def loads(memory: memoryview) -> Any:
    """The value of the message at the start of `memory`. Its arrays are views: keep the memory as it is."""
    (count,) = struct.unpack_from("<q", memory)
    head, sizes = 8 * (count + 1), struct.unpack_from(f"<{count}q", memory, 8)
    firsts = accumulate(map(_padded, sizes[:-1]), initial=_padded(head))
    body, *arrays = (memory[first : first + size] for first, size in zip(firsts, sizes, strict=True))
    return pickle.loads(body, buffers=arrays)


def send(connection: socket.socket, value: Any) -> None:
    """Gives a value to the process at the other end of a Unix socket, which then holds its memory.

    Does not wait for the receiver. Raises ConnectionError when the other end is closed.
    """
    pieces = dumps(value)
    with _shared_file() as file:
        file.truncate(size_of(pieces))
        with mmap.mmap(file.fileno(), 0) as memory, memoryview(memory) as view:
            write(pieces, view)
        socket.send_fds(connection, [b"\0"], [file.fileno()])


def receive(connection: socket.socket) -> Any:
    """Waits for the next value. Raises ConnectionError when the other end is closed."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not message:
        raise ConnectionResetError("the other end is closed")
    with os.fdopen(descriptors[0], "r+b") as file:
        return loads(memoryview(mmap.mmap(file.fileno(), 0)))  # freed with the last array in it


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shared_file() -> IO[bytes]:
    """A file without a name. On Linux in memory, which no limit of /dev/shm applies to (64 MB in many containers)."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("grpo_vlm"), "w+b")
    return tempfile.TemporaryFile()
