"""Processes that build prompts ahead of time, while the trainer generates and trains.

Each is a fresh interpreter, not a fork: safe whatever the trainer has initialised (CUDA, vLLM, DeepSpeed, threads),
and without a second run of the user's script or notebook. A worker knows the data sets it was given and answers
requests in order; it ends when the trainer does, for its connection closes.
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_vlm.data import transfer
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.errors import DataError, GRPOVLMError

MOST_WORKERS = 4  # of one training process when data.num_workers is null
WAIT_FOR_EXIT_S = 10.0


def worker_count(asked: int | None, processes: int) -> int:
    """Workers of one of `processes` training processes on this machine: data.num_workers; null: none where that would
    take the cores from the trainer, else at most four."""
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return 0 if cores <= 2 else min(MOST_WORKERS, cores // processes)


@dataclass(frozen=True)
class _Share:
    """Rows that one worker builds, and the number of the request."""

    worker: "_Worker"
    indices: list[int]
    ticket: int


class Pending:
    """Prompts that were asked for. `prompts()` waits for them; it raises what building them raised."""

    def __init__(self, rows: PromptDataset, indices: Sequence[int], shares: Sequence["_Share"] = ()):
        self.rows, self.indices, self.shares = rows, list(indices), shares

    def prompts(self) -> list[Prompt]:
        """In the order of the indices. Without workers they are built now."""
        if not self.shares:
            with _one_thread():
                return self.rows.prompts(self.indices)
        found: dict[int, Prompt] = {}
        for share in self.shares:
            found |= zip(share.indices, share.worker.answer(share.ticket), strict=True)
        return [found[index] for index in self.indices]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Pictures are small: more threads save little, and where the cores are busy they wait for each other (two took
    five times as long as one)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class PromptPool:
    """`workers` processes of this trainer process; with 0 everything is built in the process itself, when needed."""

    def __init__(self, workers: int):
        self._workers = [_Worker(workers) for _ in range(workers)]

    def submit(self, rows: PromptDataset, indices: Sequence[int]) -> Pending:
        """Begins to build these prompts. Rows that share a picture go to the same worker, which opens it once.

        Raises DataError when a worker has died.
        """
        if not self._workers:
            return Pending(rows, indices)
        parts = share_out(rows.picture_sources(indices), len(self._workers))
        parts = [(worker, part) for worker, part in zip(self._workers, parts, strict=True) if part]
        return Pending(rows, indices, [_Share(worker, part, worker.ask(rows, part)) for worker, part in parts])

    def prompts(self, rows: PromptDataset, indices: Sequence[int]) -> list[Prompt]:
        """These prompts, built by all workers at once."""
        return self.submit(rows, indices).prompts()

    def close(self) -> None:
        """Ends the workers, also in the middle of a row."""
        for worker in self._workers:
            worker.close()
        self._workers = []


def share_out(sources: dict[int, list[Hashable]], workers: int) -> list[list[int]]:
    """Distributes rows, given with their pictures, so that no picture is in two shares and the shares are of like
    size. Deterministic."""
    leader = {index: index for index in sources}

    def lead(index: int) -> int:
        while leader[index] != index:
            leader[index] = index = leader[leader[index]]
        return index

    first_with: dict[Hashable, int] = {}
    for index, pictures in sources.items():
        for picture in pictures:
            leader[lead(index)] = lead(first_with.setdefault(picture, index))
    linked: dict[int, list[int]] = {}
    for index in sources:
        linked.setdefault(lead(index), []).append(index)
    shares: list[list[int]] = [[] for _ in range(workers)]
    for rows in sorted(linked.values(), key=len, reverse=True):
        min(shares, key=len).extend(rows)
    return shares


class _Worker:
    """The trainer's end of one worker process."""

    def __init__(self, workers: int):
        self.workers = workers
        self.sets: list[PromptDataset] = []
        self.asked: list[int] = []  # rows of each request
        self.answers: dict[int, Any] = {}
        self.received = 0
        self.connection, theirs = socket.socketpair()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_vlm.data.workers", str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the trainer; a worker ends when its connection closes
        )
        theirs.close()

    def ask(self, rows: PromptDataset, indices: list[int]) -> int:
        """Sends a request; returns its number."""
        self.asked.append(len(indices))
        try:
            transfer.send(self.connection, (self._number_of(rows), indices))
        except ConnectionError:
            raise self._death() from None
        return len(self.asked) - 1

    def _number_of(self, rows: PromptDataset) -> int:
        """The data set's number in the worker, which is sent the rows when they are new to it."""
        for number, known in enumerate(self.sets):
            if known is rows:
                return number
        try:
            transfer.send(self.connection, rows)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise DataError(
                f"{rows.source.name}: the rows cannot be given to another process: {error}; set data.num_workers=0"
            ) from None
        self.sets.append(rows)
        return len(self.sets) - 1

    def answer(self, ticket: int) -> list[Prompt]:
        """Waits for the answer to a request and forgets it. An error of the row is raised here."""
        while self.received <= ticket:
            try:
                self.answers[self.received] = transfer.receive(self.connection)
            except ConnectionError:
                raise self._death() from None
            self.received += 1
        answer = self.answers.pop(ticket)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def _death(self) -> DataError:
        code = self.process.wait(WAIT_FOR_EXIT_S)
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return DataError(
            f"a process that builds prompts {end} with {self.asked[self.received]} rows to build; where memory ran "
            f"out, lower data.num_workers (now {self.workers}; with 0 the trainer builds them itself)"
        )


def serve(connection: socket.socket) -> None:
    """The worker's life: takes data sets and requests, answers with prompts or with the error that came up."""
    sets: list[PromptDataset] = []
    while True:
        request = transfer.receive(connection)
        if isinstance(request, PromptDataset):
            sets.append(request)
            continue
        number, indices = request
        transfer.send(connection, _build(sets[number], indices))


def _build(rows: PromptDataset, indices: list[int]) -> list[Prompt] | Exception:
    try:
        return rows.prompts(indices)
    except GRPOVLMError as error:
        return error
    except Exception:  # a fault of ours: raised in the trainer with the place it came from
        return RuntimeError(f"building rows {indices} failed in a worker:\n{traceback.format_exc()}")


if __name__ == "__main__":
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except ConnectionError:  # the trainer has ended
        os._exit(0)  # at once: taking the libraries down takes seconds
