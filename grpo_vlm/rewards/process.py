"""The trainer's end of one reward worker: starting it, giving it a task, killing it with everything it started."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil

from grpo_vlm.rewards.channel import Progress, memory_file, receive, send
from grpo_vlm.rewards.worker import STACK_END, STACK_SIGNAL, TASKS, Job, Request

SOCKET_TIMEOUT_S = 60.0  # for a message
EXIT_WAIT_S = 5.0
NOT_TAKEN = -2  # as a row: the worker has not begun with its task
STACK_WAIT_S = 0.2  # at most; code in C does not let Python write the end of it
STACK_LOOK_S = 0.01
OWNER = "GRPO_VLM_REWARD_WORKER"  # environment variable by which all that a worker has started is known
MOST_SWEEPS = 5
LOAD_TIMEOUT_S = 300.0
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])
from grpo_vlm.rewards.worker import main
main(*map(int, sys.argv[2:]))"""


@dataclass(frozen=True, eq=False)
class Task:
    """Rows for one call of one function.

    function: its number; rows: numbers of the samples in the whole call; idle_limit_s: seconds for one row; purpose:
    what the scores are for (pool.py); not_after: time.monotonic() after which it is not worth starting.
    """

    function: int
    rows: tuple[int, ...]
    idle_limit_s: float
    purpose: str
    not_after: float = float("inf")

    @property
    def total_limit_s(self) -> float:
        return self.idle_limit_s * len(self.rows)


class Launcher:
    """Starts workers for one Job. They die with the thread that started them, so one thread that lives as long as the
    pool starts them all; it ends with the trainer, whatever way that ends."""

    def __init__(self, job: Job):
        self._folder, self._path = os.getcwd(), json.dumps(sys.path)
        self._job: int | None = memory_file()
        with os.fdopen(os.dup(self._job), "wb") as file:
            file.write(pickle.dumps(job, protocol=5))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grpo_vlm_rewards")

    def start(self, threads: int) -> "RewardProcess":
        """A new worker, which may use `threads` threads in numpy and torch. It loads the functions by itself."""
        return self._thread.submit(self._start, threads).result()

    def _start(self, threads: int) -> "RewardProcess":
        ours, theirs = socket.socketpair()
        ours.settimeout(SOCKET_TIMEOUT_S)
        progress = memory_file()
        given, owner = (theirs.fileno(), progress, self._job), uuid.uuid4().hex
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", BOOT, self._path, str(os.getpid()), *map(str, given)],
                env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", **os.environ, OWNER: owner},
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,  # Ctrl-C is for the trainer; what the function starts is killed with it
            )
        return RewardProcess(process, ours, Progress(progress), owner)

    def close(self) -> None:
        """Starts none from here on. Idempotent."""
        if self._job is not None:
            self._thread.shutdown()
            os.close(self._job)
            self._job = None


class RewardProcess:
    """One worker. `ready` once it has loaded the functions; `task` is what it works on, since `began`."""

    def __init__(self, process: subprocess.Popen, connection: socket.socket, progress: Progress, owner: str):
        self.process, self.connection, self.progress, self.owner = process, connection, progress, owner
        self.ready, self.taken = False, False
        self.task: Task | None = None
        self.open_rows: list[int] = []  # places in the task that have no result yet
        self.began = time.monotonic()

    def fileno(self) -> int:
        """For selectors."""
        return self.connection.fileno()

    @property
    def idle(self) -> bool:
        return self.ready and self.task is None

    def give(self, task: Task, samples: list[Any]) -> None:
        """Sends a task. Raises OSError when the worker is gone."""
        self.task, self.open_rows, self.began = task, list(range(len(task.rows))), time.monotonic()
        self.progress.at(NOT_TAKEN)
        self.taken = False
        send(self.connection, pickle.dumps(Request(task.function, samples, task.idle_limit_s), protocol=5))

    def event(self) -> Any:
        """The next message of the worker; None when it is gone."""
        try:
            return receive(self.connection)
        except OSError:
            return None

    def deadline(self, slack_s: float) -> float:
        """time.monotonic() at which its patience ends: for one row, for the task, or for loading the functions."""
        if self.task is None:
            return float("inf") if self.ready else self.began + LOAD_TIMEOUT_S
        since, row = self.progress.read()
        if row == NOT_TAKEN:  # a busy machine has not let it read its task yet: no row is to blame
            return since + max(self.task.idle_limit_s, SOCKET_TIMEOUT_S)
        if not self.taken:
            self.taken, self.began = True, since
        return min(since + self.task.idle_limit_s, self.began + self.task.total_limit_s) + slack_s

    def row(self) -> int | None:
        """Place in the task of the row that it was at; None when it had not come to one."""
        _, row = self.progress.read()
        return row if self.task is not None and 0 <= row < len(self.task.rows) else None

    def stack(self) -> str:
        """Where its Python code is now, or where its coroutines wait; innermost line first, without the lines of this
        package."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        until = time.monotonic() + STACK_WAIT_S
        while STACK_END not in self.progress.stack() and time.monotonic() < until:
            time.sleep(STACK_LOOK_S)
        running, _, waiting = self.progress.stack().partition(STACK_END)[0].partition(TASKS)
        if waiting:
            return waiting.strip("\n")
        lines = running.rstrip().splitlines()[1:]
        ours = next((number for number, line in enumerate(lines) if _is_ours(line)), len(lines))
        return "\n".join(lines[:ours])

    def end(self, *, ended: bool = False) -> str:
        """Kills it with all it started; how it had ended, where it has by itself (`ended`)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_WAIT_S if ended else 0.0)
        code = self.process.returncode
        for child in _descendants(self.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # its group is empty
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(EXIT_WAIT_S)
        _sweep(self.owner)
        self.connection.close()
        self.progress.close()
        if code is None:
            return "was killed"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _descendants(pid: int) -> list[psutil.Process]:
    """The processes below one that may be gone; then nobody knows them any more."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _sweep(owner: str) -> None:
    """Kills what a worker that is gone has left: processes in groups of their own, whose parents have ended. One may
    start another before it dies, hence several sweeps."""
    for _ in range(MOST_SWEEPS):
        left = [process for process in psutil.process_iter() if _owned_by(process, owner)]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=STACK_WAIT_S)


def _owned_by(process: psutil.Process, owner: str) -> bool:
    try:
        return process.environ().get(OWNER) == owner
    except psutil.Error:  # gone, a zombie, or of another user
        return False


def _is_ours(line: str) -> bool:
    folder = os.path.join("grpo_vlm", "rewards", "")
    return any(f"{folder}{name}.py" in line for name in ("loader", "worker"))
