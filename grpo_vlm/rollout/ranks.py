"""What the processes of a run tell each other, so that none waits for one that has ended or hits a collective's
time-out while another one works."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import broadcast_object_list, gather_object

from grpo_vlm.errors import GRPOVLMError, RolloutError

POLL_S = 0.1
T = TypeVar("T")


def raise_first(error: str | None, accelerator: Any, kind: type[GRPOVLMError]) -> None:
    """Raises `kind` on every rank when any of them gives an error: the first by rank; a collective."""
    messages = gather_object([error]) if accelerator.num_processes > 1 else [error]
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise kind(first)


def on_main(call: Callable[[], T], *, is_main: bool, world_size: int) -> T:
    """What `call` returns on the main process, on every rank; an error for people in it is raised on every rank. A
    collective."""
    outcome: list[Any] = [None, None]
    if is_main:
        try:
            outcome[0] = call()
        except GRPOVLMError as error:
            outcome[1] = error
    if world_size > 1:
        broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def processes_here(accelerator: Any) -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))


class Meeting:
    """Where all ranks exchange small values, however long one of them takes to come.

    Not a collective: its time-out (ten minutes with NCCL) would end the run while a rank generates its last prompts
    or the main process starts a server again. The values are JSON and travel through the store that the process group
    was made with. Every rank makes the same meetings and calls them in the same order.
    """

    _made = itertools.count()

    def __init__(self, accelerator: Any) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.number = 0
        self.store: dist.Store | None = None
        prefix = f"grpo_vlm/meeting-{next(self._made)}"
        if self.size > 1:
            self.store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())

    def exchange(
        self, value: Any, *, limit_s: float, what: str, on_wait: Callable[[list[int]], None] | None = None
    ) -> list[Any]:
        """The values of all ranks, by rank. `on_wait(ranks)` is called now and then with those still awaited.

        RolloutError, naming them and `what` they were to do, when some have not come after `limit_s` seconds.
        """
        if self.store is None:
            return [value]
        self.number += 1
        keys = [f"{self.number}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        deadline, pause_s = time.monotonic() + limit_s, 0.001
        while not self.store.check(keys):
            if on_wait is not None or time.monotonic() > deadline:
                awaited = [rank for rank in range(self.size) if not self.store.check([keys[rank]])]
                if awaited and time.monotonic() > deadline:
                    raise RolloutError(f"rank(s) {awaited} did not {what} within {limit_s:g} s")
                if awaited and on_wait is not None:
                    on_wait(awaited)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, POLL_S)
        values = [json.loads(self.store.get(key)) for key in keys]
        if self.number > 1:  # everybody is here, so everybody has read the values of the meeting before
            self.store.delete_key(f"{self.number - 1}/{self.rank}")
        return values
