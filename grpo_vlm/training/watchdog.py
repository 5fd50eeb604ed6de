"""Ends a run whose ranks wait for each other for ever, and says who waits where for whom.

A collective that one rank does not reach blocks the others in silence, for half an hour with the libraries' own
time-outs, which then name an operation and no cause. Here each rank notes where it is; a thread compares the ranks'
notes, through the store that the process group was made with, when its own rank has stood still for too long.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

CHECKS = 20  # per time-out
UNEQUAL = ("gen", "reward", "validation", "sync", "sync_check")  # phases with time-outs of their own, not watched
PATIENCE = 1.5  # time-outs that a late rank waits, so that those who wait for it can say so
EXIT_CODE = 1


class CollectiveWatchdog:
    """Watches one rank. Use as a context manager around the training loop.

    limit_s: seconds without progress after which the process ends.
    """

    def __init__(self, rank: int, world_size: int, limit_s: float, end: Callable[[int], None] = os._exit):
        self.rank, self.world_size, self.limit_s, self.end = rank, world_size, limit_s, end
        self.place, self.count, self.since, self.watched = "the training loop", 0, time.monotonic(), True
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None

    def __enter__(self) -> "CollectiveWatchdog":
        self.since = time.monotonic()
        if self.world_size > 1:
            self._store = dist.PrefixStore("grpo_vlm/watchdog", dist.distributed_c10d._get_default_store())
            self._thread = threading.Thread(target=self._watch, name="collective watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """While the block runs, this rank is in a phase of the step."""
        before = self.place, self.watched
        self._move(name, name not in UNEQUAL)
        try:
            yield
        finally:
            self._move(*before)

    def row(self, text: str) -> None:
        """This rank begins with a row of its phase."""
        self._move(f"{self.place.partition(',')[0]}, {text}", self.watched)

    def _move(self, place: str, watched: bool) -> None:
        self.place, self.watched, self.since, self.count = place, watched, time.monotonic(), self.count + 1

    def _watch(self) -> None:
        told = -1
        while not self._over.wait(self.limit_s / CHECKS):
            if told != self.count:
                told = self.count
                self._store.set(str(self.rank), json.dumps([self.count, self.place]))
            if self.watched and (stood_s := time.monotonic() - self.since) > self.limit_s:
                notes = self._notes()
                if self.count < max(count for count, _ in notes) and stood_s < self.limit_s * PATIENCE:
                    continue  # the ranks that wait for this one tell first
                print(self.report(notes, stood_s), file=sys.stderr, flush=True)
                self.end(EXIT_CODE)  # the main thread is inside a library and takes no exception
                return

    def _notes(self) -> list[tuple[int, str]]:
        """What each rank told last: how often it has moved, and where it is."""
        keys = [str(rank) for rank in range(self.world_size)]
        return [tuple(json.loads(self._store.get(key))) if self._store.check([key]) else (0, "") for key in keys]

    def report(self, notes: list[tuple[int, str]], stood_s: float) -> str:
        """What to tell a person, given the ranks' notes and for how long this one has stood still."""
        places = [place or "before its first phase" for _, place in notes]
        others = [(f"rank {rank} ({places[rank]})", count) for rank, (count, _) in enumerate(notes)]
        late = [name for name, count in others if count < self.count]
        ahead = [name for name, count in others if count > self.count]
        state = "no rank is ahead or behind"
        if late or ahead:
            state = f"it waits for {', '.join(late)}" if late else f"{', '.join(ahead)} waits for it"
        return (
            f"\nCollective time-out: rank {self.rank} has been in {self.place} for {stood_s:.0f} s; {state}."
            f" trainer.collective_timeout_s={self.limit_s:g} is over, this process ends. Look at the late rank's log"
            " and machine; raise the time-out where its work may really take so long."
        )
