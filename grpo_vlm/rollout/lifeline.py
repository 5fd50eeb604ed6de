"""Has each process of a vLLM server die with the one that made it.

The guard (guard.py) ends the whole tree when the trainer is gone. Where the guard itself is killed, the kernel kills
vLLM's first process, and that one's children would go on: engines, their workers and the coordinator of several
engines wait for a parent that is no more, with the GPU's memory. So each of them is bound to its parent before it does
anything else, whether it is forked or spawned.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from grpo_vlm.rollout.guard import die_with
from grpo_vlm.rollout.loopback import keep_stores_local

_start = BaseProcess.start


class Bound:
    """What a child process runs: `target`, once it is bound to the process `parent` (null: to none)."""

    def __init__(self, target: Callable[..., Any], parent: int | None) -> None:
        self.target, self.parent = target, parent

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.parent is not None:
            die_with(self.parent)
        hold()
        return self.target(*args, **kwargs)


def hold() -> None:
    """Bind all processes that this one will start through `multiprocessing`, and those that they start, and keep the
    stores of all of them on loopback. Called by our plugin in each process of a guarded server."""
    keep_stores_local()
    BaseProcess.start = _bound_start


def _bound_start(process: BaseProcess) -> None:
    # The kernel's promise is about the thread that starts a process. One that may end earlier is no parent.
    lasting = threading.current_thread() is threading.main_thread()
    process._target = Bound(process._target, os.getpid() if lasting else None)
    _start(process)
