"""SIGTERM and SIGUSR1, what schedulers send before they take a machine away: save, and end with exit code 0.

What is saved is always the state between two rollout steps, so that a resumed run equals an unbroken one. A step that
has not moved the weights yet is given up; in one process at once, also in the middle of generation, in several at the
next point where all meet. A step that has moved them is finished first.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import reduce

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Stopped(BaseException):
    """The run ends here. Not an Exception: what catches those must not catch this."""

    def __init__(self, number: int | None):
        self.reason = "another process's request" if number is None else signal.Signals(number).name
        super().__init__(self.reason)


class Stop:
    """Use as a context manager around training; the signals have their former effect before and after."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.received: int | None = None
        self._at_once = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._former = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if self._at_once:
            self._at_once = False
            raise Stopped(number)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """What runs inside may be given up at any moment: in one process a signal raises Stopped there."""
        self._at_once = self.accelerator.num_processes == 1
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def check(self) -> None:
        """Raises Stopped, on all processes, when any of them has had a signal. A collective."""
        if self.asked():
            self._at_once = False
            raise Stopped(self.received)

    def asked(self) -> bool:
        """Whether any process has had a signal. A collective."""
        mine = self.received is not None
        if self.accelerator.num_processes == 1:
            return mine
        flag = torch.tensor(float(mine), device=self.accelerator.device)
        return bool(reduce(flag, "sum") > 0)
