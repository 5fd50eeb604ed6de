"""Stops Python code that takes too long, in whatever thread it runs; signals would need the main thread.

A second thread looks at the processor time of the first and raises OutOfTime in it, again and again until the function
is left: one exception may get lost in a destructor or a bare `except`. One long computation in C cannot be stopped, so
callers bound what they give to the function.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_S = 0.02  # between two looks at the clock
AGAIN_S = 0.1  # before the exception is raised once more


class OutOfTime(BaseException):
    """Not an Exception: the libraries inside catch those."""


def call_within(limit_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns. Raises OutOfTime after limit_s of this thread's processor time, which does not depend
    on what else the machine does."""
    watch = _Watch(threading.get_ident(), limit_s)
    try:
        watch.thread.start()
        return function(*arguments)
    finally:
        while not watch.over:  # the exception may come here, too: then the function had just returned
            try:
                watch.stop()
            except OutOfTime:
                pass


class _Watch:
    """over: nothing is raised any more."""

    def __init__(self, watched: int, limit_s: float) -> None:
        self.watched, self.over = watched, False
        self.clock = time.pthread_getcpuclockid(watched)
        self.end = time.clock_gettime(self.clock) + limit_s
        self.lock, self.leave = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.run, name="grade-deadline", daemon=True)

    def run(self) -> None:
        wait_s = LOOK_S
        while not self.leave.wait(wait_s):
            if time.clock_gettime(self.clock) < self.end:
                continue
            with self.lock:
                if self.over:
                    return
                _raise_in(self.watched, ctypes.py_object(OutOfTime))
            wait_s = AGAIN_S

    def stop(self) -> None:
        """From the watched thread, when the function is left."""
        with self.lock:
            _raise_in(self.watched, None)  # takes back what has not been raised yet
            self.over = True
        self.leave.set()


def _raise_in(thread: int, error: ctypes.py_object | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
