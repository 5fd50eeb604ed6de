"""A process that calls reward functions and nothing else, so that the trainer can kill it at any moment.

Started by process.py as a fresh interpreter, without the trainer's CUDA context, threads or second run of the user's
script. It imports what the reward file imports and the standard library: no torch, no numpy. Over its socket it gets
Requests and answers each with Events, in any number, and one Done.
"""

import asyncio
import ctypes
import faulthandler
import inspect
import linecache
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import Any

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.channel import Progress, Watched, receive, send
from grpo_vlm.rewards.forms import Form, RewardSample
from grpo_vlm.rewards.loader import Reward, load_reward, load_rewards
from grpo_vlm.rewards.results import Scores, read_batch, read_one

PR_SET_PDEATHSIG = 1
GIB = 1 << 30
STACK_SIGNAL = signal.SIGUSR1
GRADER = "grpo_vlm.rewards.grade"
TASKS, STACK_END = "Suspended tasks:", "End of stack."  # lines behind that of faulthandler
SHOWN_TASKS = 3
CANCEL_S = 0.1  # for a call at its time-out to leave; one that does not is left behind


@dataclass(frozen=True)
class Job:
    """What a worker is for. specs: the pickle of a list of names and, for functions given as objects, Rewards;
    names: of the functions, for messages; lines: sources by file name, for tracebacks of notebook cells."""

    specs: bytes
    kwargs: dict[str, Any]
    names: tuple[str, ...]
    lines: dict[str, list[str]]
    memory_limit_gb: float
    concurrency: int


@dataclass(frozen=True)
class Ready:
    """The functions are loaded: name and form of each."""

    functions: list[tuple[str, Form]]


@dataclass(frozen=True)
class Unusable:
    """The functions cannot be loaded, or one returned what is no score."""

    text: str


@dataclass(frozen=True)
class Request:
    """Samples for one function: its number, or -1 for the check that golds grade themselves."""

    function: int
    samples: Sequence[RewardSample]
    timeout_s: float


@dataclass(frozen=True)
class Scored:
    """Scores of the rows from number `first` of the request on, and the seconds of the call."""

    first: int
    scores: list[Scores | None]
    seconds: float


@dataclass(frozen=True)
class Raised:
    """The call for row number `row` (None: for all of them) raised; timed_out: it was cancelled at its time-out."""

    row: int | None
    text: str
    seconds: float
    timed_out: bool = False


@dataclass(frozen=True)
class Done:
    """The request is answered. uses_grader: this process has loaded grpo_vlm.rewards.grade."""

    uses_grader: bool


def golds_grade_themselves(solution_str: str, ground_truth: str) -> float:
    """1 where our grader finds a gold answer equal to itself."""
    from grpo_vlm.rewards.grade import grade  # loads mpmath: only for those who use it

    return float(grade(solution_str, ground_truth).correct)


class Worker:
    """The functions, and the connection to the trainer."""

    def __init__(self, connection: socket.socket, progress: Progress, job: Job):
        self.connection, self.progress, self.job, self.pid = connection, progress, job, os.getpid()
        self.loop = asyncio.new_event_loop()  # one for all calls: clients with open connections live across them
        self.rewards: list[Reward] = []

    def tell(self, event: Any) -> None:
        if os.getpid() != self.pid:  # a process that the function forked, and that came back from the function
            os._exit(0)
        send(self.connection, pickle.dumps(event, protocol=5))

    def serve(self) -> None:
        """Loads the functions and answers requests until the connection closes."""
        try:
            self.rewards = self._load()
        except RewardError as error:
            self.tell(Unusable(str(error)))
            return
        _limit_memory(self.job.memory_limit_gb)
        self.tell(Ready([(reward.name, reward.form) for reward in self.rewards]))
        while True:
            request: Request = receive(self.connection)
            self.progress.at(-1)  # the task is taken
            reward = self.rewards[request.function] if request.function >= 0 else load_reward(golds_grade_themselves)
            try:
                self._answer(reward, request)
            except RewardError as error:
                self.tell(Unusable(str(error)))
            _flush()
            self.progress.at(-1)
            self.tell(Done(GRADER in sys.modules))

    def write_stack(self, _signal: int, _frame: FrameType | None) -> None:
        """Behind what faulthandler wrote of this thread: where the coroutines are that the loop waits for."""
        lines = [] if asyncio.current_task(self.loop) else list(_suspended(self.loop))
        self.progress.write("\n".join(["", *([TASKS] if lines else []), *lines, STACK_END, ""]))

    def _load(self) -> list[Reward]:
        for name, lines in self.job.lines.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        try:
            specs = pickle.loads(self.job.specs)
        except BaseException as error:  # anything: unpickling imports the user's modules
            raise RewardError(
                f"the reward function cannot be unpickled in a worker process: {type(error).__name__}: {error}; put "
                "it into a file and name it as FILE.py:function"
            ) from None
        return load_rewards(specs, self.job.kwargs)

    def _answer(self, reward: Reward, request: Request) -> None:
        if reward.form.whole_batch:
            self._batch(reward, request.samples)
        elif reward.form.asynchronous:
            self.loop.run_until_complete(self._concurrently(reward, request))
        else:
            for row, sample in enumerate(request.samples):
                self._single(reward, row, sample)

    def _batch(self, reward: Reward, samples: Sequence[RewardSample]) -> None:
        self.progress.at(-1)
        began = time.monotonic()
        try:
            returned = self._settled(reward.start(samples, lambda items: Watched(items, self.progress)))
        except BaseException as error:
            self._tell_raised(reward, None, error, began)
            return
        self.tell(Scored(0, read_batch(reward.name, reward.form, samples, returned), time.monotonic() - began))

    def _single(self, reward: Reward, row: int, sample: RewardSample) -> None:
        self.progress.at(row)
        began = time.monotonic()
        try:
            returned = self._settled(reward.start([sample]))
        except BaseException as error:
            self._tell_raised(reward, row, error, began)
            return
        self.tell(Scored(row, [read_one(reward.name, reward.form, sample, returned)], time.monotonic() - began))

    async def _concurrently(self, reward: Reward, request: Request) -> None:
        limit = asyncio.Semaphore(self.job.concurrency)

        async def one(row: int, sample: RewardSample) -> None:
            async with limit:
                self.progress.at(row)
                began = time.monotonic()
                task = asyncio.ensure_future(_outcome(reward, sample))
                _, late = await asyncio.wait({task}, timeout=request.timeout_s)
                if late:
                    where = "\n".join(_waiting(task))
                    task.cancel()
                    await asyncio.wait({task}, timeout=CANCEL_S)
                    self.tell(Raised(row, where, time.monotonic() - began, timed_out=True))
                    return
                returned, error = task.result()
                if error is not None:
                    self._tell_raised(reward, row, error, began)
                    return
                score = read_one(reward.name, reward.form, sample, returned)
                self.tell(Scored(row, [score], time.monotonic() - began))

        self.progress.at(-1)
        await asyncio.gather(*(one(row, sample) for row, sample in enumerate(request.samples)))

    def _settled(self, result: Any) -> Any:
        return self.loop.run_until_complete(_result_of(result)) if inspect.isawaitable(result) else result

    def _tell_raised(self, reward: Reward, row: int | None, error: BaseException, began: float) -> None:
        """Any exception, SystemExit and KeyboardInterrupt too, is the function's: nothing else runs here."""
        text = reward.user_traceback(error)
        if isinstance(error, MemoryError):
            text += f"\n(worker.reward.memory_limit_gb={self.job.memory_limit_gb:g} is what one worker may take)"
        self.tell(Raised(row, text, time.monotonic() - began))


def _suspended(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """The lines at which the loop's tasks wait; last the call itself, which waits for the others."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_coro().__name__ == _result_of.__name__)
    places = dict.fromkeys("\n".join(_waiting(task)) for task in tasks)  # of tasks that wait at one line, one
    return islice(filter(None, places), SHOWN_TASKS)


def _waiting(task: asyncio.Task) -> Iterator[str]:
    """The lines at which a task waits, innermost first; Task.get_stack knows the outermost alone."""
    frames, coroutine = [], task.get_coro()
    while inspect.iscoroutine(coroutine) and coroutine.cr_frame is not None:
        frames.append((coroutine.cr_frame, coroutine.cr_frame.f_lineno))
        coroutine = coroutine.cr_await
    for frame in reversed(traceback.StackSummary.extract(frames, lookup_lines=False)):
        if frame.filename != __file__:
            yield f'  File "{frame.filename}", line {frame.lineno} in {frame.name}'


async def _outcome(reward: Reward, sample: RewardSample) -> tuple[Any, BaseException | None]:
    """What an asynchronous function returns, or what it raises: SystemExit would end the loop for all others."""
    try:
        return await reward.start([sample]), None
    except BaseException as error:
        return None, error


async def _result_of(awaitable: Any) -> Any:
    return await awaitable


def _flush() -> None:
    """Prints what is left; a function may have closed or replaced the stream, which is no row's fault."""
    if not sys.__stdout__.closed:
        sys.__stdout__.flush()


def _limit_memory(limit_gb: float) -> None:
    """An allocation beyond what the process holds now plus `limit_gb` raises MemoryError. Private writable memory is
    what Linux counts here, so address space that a library merely reserves (CUDA does) is free."""
    if sys.platform != "linux":
        return
    with open("/proc/self/status") as status:
        held_kib = next(int(line.split()[1]) for line in status if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = held_kib * 1024 + int(limit_gb * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _die_with_parent(parent: int) -> None:
    """Ends this process as soon as the trainer is gone, also in the middle of C code that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def main(parent: int, connection: int, progress: int, job: int) -> None:
    """The worker's life. parent: the trainer's process id; the others are descriptors of the socket, the Progress and
    a file with the pickled Job."""
    _die_with_parent(parent)
    for descriptor in (connection, progress, job):
        os.set_inheritable(descriptor, False)
    sys.stdout.reconfigure(line_buffering=True)  # what a killed function had printed is not lost
    shared = Progress(progress)
    faulthandler.enable()
    wanted: Job = pickle.loads(os.pread(job, os.fstat(job).st_size, 0))
    worker = Worker(socket.socket(fileno=connection), shared, wanted)
    signal.signal(STACK_SIGNAL, worker.write_stack)
    faulthandler.register(STACK_SIGNAL, file=progress, all_threads=False, chain=True)
    try:
        worker.serve()
    except OSError:  # the trainer has ended
        pass
    _flush()
    os._exit(0)  # at once: what threads or libraries the function started is not waited for
