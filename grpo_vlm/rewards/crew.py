"""The workers of one pool: hands out tasks, watches their time, replaces those that died.

One worker starts with the pool; more start while there is work that waits for one. Knows nothing of scores or
policies: whoever gives out the tasks is told what became of each row (Scored) and each fault (Failed).
"""

import os
import pickle
import selectors
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards import worker
from grpo_vlm.rewards.forms import Form, RewardSample
from grpo_vlm.rewards.process import LOAD_TIMEOUT_S, Launcher, RewardProcess, Task
from grpo_vlm.rewards.results import Scores

TICK_S = 0.25
GROW_AFTER_S = 0.05
SPARE_AFTER_S = 1.0  # a call that lasts this long may have to be stopped: then another worker should be there
MOST_REFUSED = 3
ASYNC_SLACK_S = 1.0  # asynchronous calls end at their time-out by themselves
TIMEOUT, ERROR, ENDED = "timeout", "error", "ended"


@dataclass(frozen=True)
class Scored:
    """rows: numbers of samples, with their scores; seconds: of the call."""

    task: Task
    rows: tuple[int, ...]
    scores: list[Scores | None]
    seconds: float


@dataclass(frozen=True)
class Failed:
    """row: the sample at fault, as far as can be told; cause: TIMEOUT, ERROR (it raised) or ENDED (the process did);
    text: traceback, or where it was; unfinished: rows of the task that got no result, when the task has ended; late:
    the task was not begun, since its time was over."""

    task: Task
    row: int | None
    cause: str
    text: str
    seconds: float
    unfinished: tuple[int, ...] = ()
    late: bool = False


Handler = Callable[[Scored | Failed], Iterable[Task]]


class Crew:
    """At most `most` workers for one Job."""

    def __init__(self, job: worker.Job, most: int, threads: int):
        self.most, self._threads = most, threads
        self._launcher, self._names = Launcher(job), ", ".join(job.names)
        self._workers: list[RewardProcess] = [self._launcher.start(threads)]
        weakref.finalize(self, _end_all, self._workers, os.getpid())  # also at the trainer's exit, without a close()
        self._queue: deque[Task] = deque()
        self._samples: Sequence[RewardSample] = ()
        self._refused = 0
        self.functions: list[tuple[str, Form]] = []
        self.uses_grader = False

    def load(self) -> list[tuple[str, Form]]:
        """Waits until the functions are loaded; name and form of each. Raises RewardError when they cannot be."""
        while not self.functions:
            self._turn(lambda event: ())
        return self.functions

    def run(self, tasks: Iterable[Task], samples: Sequence[RewardSample], handle: Handler) -> None:
        """Works off the tasks and those that `handle` answers an event with. samples: what the tasks' rows number.

        Raises RewardError when a function returned what is no score, or what `handle` raises; then, and when it is
        interrupted, nothing of the tasks goes on.
        """
        self._queue, self._samples, self._refused = deque(tasks), samples, 0
        began = time.monotonic()
        try:
            while self._queue or any(one.task for one in self._workers):
                self._feed(handle)
                self._grow(time.monotonic() - began)
                self._turn(handle)
        finally:
            self.cancel(lambda task: True)

    def cancel(self, what: Callable[[Task], bool]) -> None:
        """Drops these tasks; workers that are at one are killed."""
        self._queue = deque(task for task in self._queue if not what(task))
        for one in [one for one in self._workers if one.task is not None and what(one.task)]:
            self._drop(one)
        if not self._workers:
            self._start()

    def close(self) -> None:
        """Kills the workers, also in the middle of a call."""
        for one in list(self._workers):
            self._drop(one)
        self._launcher.close()

    @property
    def pids(self) -> list[int]:
        return [one.process.pid for one in self._workers]

    # ---- one round

    def _feed(self, handle: Handler) -> None:
        for one in [one for one in self._workers if one.idle]:
            if not self._queue:
                return
            task = self._queue.popleft()
            if time.monotonic() > task.not_after:
                self._queue.extend(handle(Failed(task, task.rows[0], TIMEOUT, "", 0.0, task.rows, late=True)))
                continue
            keep = task.function >= 0 and self.functions[task.function][1].needs_images
            samples = [self._samples[row] if keep else self._samples[row].without_images() for row in task.rows]
            try:
                one.give(task, samples)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                one.task = None
                raise RewardError(
                    f"the columns of row {samples[0].row_id} cannot be given to a reward worker: {error}"
                ) from None
            except OSError:  # it died while idle: the task is for another one
                one.task = None
                self._drop(one)
                self._queue.appendleft(task)
                self._refused += 1
                if self._refused > MOST_REFUSED:
                    raise RewardError(
                        "reward workers end before they take their samples; see what they printed"
                    ) from None

    def _grow(self, running_s: float) -> None:
        """One more worker for work that waits, or to take over from a call that may have to be stopped: then there are
        two at least."""
        most = max(self.most, 2) if running_s > SPARE_AFTER_S else self.most
        if len(self._workers) >= most or any(one.task is None for one in self._workers):
            return
        if not self._workers or (self._queue and running_s > GROW_AFTER_S) or running_s > SPARE_AFTER_S:
            self._start()

    def _start(self) -> None:
        self._workers.append(self._launcher.start(self._threads))

    def _turn(self, handle: Handler) -> None:
        """Waits a little for messages; looks after workers that ended or take too long."""
        if not self._workers:
            self._start()
        with selectors.DefaultSelector() as selector:
            for one in self._workers:
                selector.register(one, selectors.EVENT_READ)
            soon = min(self._deadline(one) for one in self._workers) - time.monotonic()
            wait = GROW_AFTER_S if self._queue else TICK_S
            ready = [key.fileobj for key, _ in selector.select(min(max(soon, 0.0), wait))]
        for one in ready:
            if one not in self._workers:  # killed by what was made of the event before
                continue
            event = one.event()
            if event is None:
                self._lost(one, ENDED, handle)
            else:
                self._take(one, event, handle)
        for one in [one for one in self._workers if one not in ready]:
            if one not in self._workers:
                continue
            if one.process.poll() is not None:
                self._lost(one, ENDED, handle)
            elif time.monotonic() >= self._deadline(one):
                self._lost(one, TIMEOUT, handle)

    def _deadline(self, one: RewardProcess) -> float:
        if one.task is None or one.task.function < 0:
            return one.deadline(0.0)
        form = self.functions[one.task.function][1]
        return one.deadline(ASYNC_SLACK_S if form.asynchronous and not form.whole_batch else 0.0)

    def _take(self, one: RewardProcess, event: Any, handle: Handler) -> None:
        task = one.task
        if isinstance(event, worker.Unusable):
            self._drop(one)
            raise RewardError(event.text)
        if isinstance(event, worker.Ready):
            one.ready, self.functions = True, event.functions
        elif isinstance(event, worker.Done):
            one.task, self.uses_grader = None, self.uses_grader or event.uses_grader
        elif isinstance(event, worker.Scored):
            places = range(event.first, event.first + len(event.scores))
            one.open_rows = [row for row in one.open_rows if row not in places]
            rows = tuple(task.rows[place] for place in places)
            self._queue.extend(handle(Scored(task, rows, event.scores, event.seconds)))
        else:
            cause = TIMEOUT if event.timed_out else ERROR
            whole = event.row is None and len(task.rows) > 1
            row = None if whole else task.rows[event.row or 0]
            one.open_rows = [place for place in one.open_rows if place != event.row]
            self._queue.extend(handle(Failed(task, row, cause, event.text, event.seconds, task.rows if whole else ())))

    def _lost(self, one: RewardProcess, cause: str, handle: Handler) -> None:
        """A worker that ended, or has to be ended; the row that it was at is the suspect."""
        task, place, seconds = one.task, one.row(), time.monotonic() - one.began
        text = one.stack() if cause == TIMEOUT else ""
        end = self._drop(one, ended=cause == ENDED)
        if not one.ready:
            how = f"was not loaded after {LOAD_TIMEOUT_S:g} s" if cause == TIMEOUT else f"{end} while it was loaded"
            raise RewardError(
                f"worker.reward.reward_function {self._names} {how}{':' if text else ''}\n{text}".rstrip()
            )
        if task is None:  # it died between two calls
            return
        row = task.rows[0] if len(task.rows) == 1 else None if place is None else task.rows[place]
        unfinished = tuple(task.rows[open_place] for open_place in one.open_rows)
        self._queue.extend(handle(Failed(task, row, cause, text or end, seconds, unfinished)))

    def _drop(self, one: RewardProcess, *, ended: bool = False) -> str:
        self._workers.remove(one)
        return one.end(ended=ended)


def _end_all(workers: list[RewardProcess], owner_pid: int) -> None:
    """In the process that has started them, not in one that it forked."""
    if os.getpid() == owner_pid:
        while workers:
            workers.pop().end()
