"""What trainer and reward worker share: messages over a socket, and a page of memory that still tells after a kill
which row the worker was at.

Standard library only: every worker imports it. Only for processes of one run: unpickling runs code.
"""

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
from typing import Any

PAGE = mmap.PAGESIZE
STACK_LIMIT = 1 << 16  # bytes of a stack trace that are read
MAX_MESSAGE = 1 << 36  # bytes
MARK = b"GVRW"  # begins every message: a reward that writes to a descriptor which is not its own may hit the socket
_HEAD, _PLACE = struct.Struct("<4sQ"), struct.Struct("<dq")


def send(connection: socket.socket, message: bytes) -> None:
    """Raises OSError when the other end is closed, or takes nothing for the socket's time-out."""
    connection.sendall(_HEAD.pack(MARK, len(message)))
    connection.sendall(message)


def receive(connection: socket.socket) -> Any:
    """The next message, unpickled. Raises OSError (ConnectionResetError) when the other end is closed, or when what
    comes is no message of this module: then nothing behind it can be told apart either."""
    mark, size = _HEAD.unpack(_read(connection, _HEAD.size))
    if mark != MARK or size > MAX_MESSAGE:
        raise ConnectionResetError(f"no message of a reward worker: it begins with {mark!r}")
    return pickle.loads(_read(connection, size))


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the other end is closed")
        view = view[count:]
    return data


def memory_file() -> int:
    """Descriptor of a file without a name; on Linux it is in memory, which no limit of /dev/shm applies to."""
    if sys.platform == "linux":
        return os.memfd_create("grpo_vlm_reward")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Progress:
    """Which row the worker is at and since when (time.monotonic() is one clock for all processes of a machine); behind
    that page the file takes the worker's stack when it is asked for one."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        os.ftruncate(descriptor, max(PAGE, os.fstat(descriptor).st_size))
        os.lseek(descriptor, PAGE, os.SEEK_SET)
        self._memory = mmap.mmap(descriptor, PAGE)

    def at(self, row: int) -> None:
        """The worker begins with row number `row` of its task; -1: with none in particular."""
        _PLACE.pack_into(self._memory, 0, time.monotonic(), row)

    def read(self) -> tuple[float, int]:
        """When it began, in seconds of time.monotonic(), and with which row."""
        return _PLACE.unpack_from(self._memory)

    def write(self, text: str) -> None:
        """In the worker: more behind what there is of the stack."""
        os.write(self.descriptor, text.encode())

    def stack(self) -> str:
        """What the worker wrote of its stack so far."""
        return os.pread(self.descriptor, STACK_LIMIT, PAGE).decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


class Watched(list):
    """A list that notes which of its items was taken last. Copies and slices are plain lists."""

    def __init__(self, items: list, progress: Progress):
        super().__init__(items)
        self._progress = progress

    def __iter__(self):
        for row, item in enumerate(super().__iter__()):
            self._progress.at(row)
            yield item

    def __getitem__(self, key):
        if isinstance(key, int):
            self._progress.at(key % len(self) if len(self) else -1)
        return super().__getitem__(key)

    def __reduce__(self):
        return list, (list(super().__iter__()),)
