"""One function's scores for the samples of one call: which tasks it takes, and who is at fault when one fails.

A function that takes single samples is called with some rows a task, and the row that it was at is at fault. One that
takes the whole batch is called once with all rows. When that call raises, ends its process or takes too long, no row
has a score, and the row at fault has to be found:

1. Where the function walks through its list, the row that it had taken last is the suspect: it is called with the
   others alone. If that succeeds, the suspect is at fault, and the others have the scores of a call for all of them.
2. At the same time it is called with each row on its own, which finds the rows at fault whatever the function does.
   The others are then scored in one call again; if that fails too, the scores of the single calls count.
"""

import time
from collections.abc import Iterable

from grpo_vlm.rewards.crew import ERROR, Crew, Failed, Scored
from grpo_vlm.rewards.forms import Form
from grpo_vlm.rewards.process import Task
from grpo_vlm.rewards.results import Scores

MOST_ROWS_A_TASK = 16
TASKS_A_WORKER = 4
FIRST, OTHERS, SINGLE, AGAIN = "first", "others", "single", "again"
SINGLE_LIMIT_S = 2.0  # at least; a row that has hung the batch is given this long, or twice what a call has ever taken
RESCUE_S = 10.0  # at least: how long after a failed batch single calls are still begun


class Scoring:
    """Functions that take one sample a call."""

    def __init__(self, number: int, form: Form, count: int, timeout_s: float, longest_s: float, crew: Crew):
        self.number, self.form, self.rows, self.timeout_s, self.crew = number, form, range(count), timeout_s, crew
        self.single_limit_s = min(timeout_s, max(SINGLE_LIMIT_S, 2 * longest_s))
        self.scores: dict[int, Scores | None] = {}
        self.faults: dict[int, Failed] = {}
        self.batch_fault: Failed | None = None  # of the call as a whole: no row fails on its own
        self.longest_s = longest_s
        self.slowest_s = 0.0

    def tasks(self) -> list[Task]:
        """What to begin with. An asynchronous function gets all rows at once, so that it is one event loop which
        limits how many are in flight."""
        size = max(1, min(MOST_ROWS_A_TASK, len(self.rows) // (TASKS_A_WORKER * self.crew.most)))
        size = len(self.rows) if self.form.asynchronous else size
        return [self._task(self.rows[first : first + size], FIRST) for first in range(0, len(self.rows), size)]

    def handle(self, event: Scored | Failed) -> Iterable[Task]:
        """Takes note of an event; the tasks that follow from it."""
        if isinstance(event, Scored):
            self._note(event)
            self.scores |= zip(event.rows, event.scores, strict=True)
            return []
        self.slowest_s = max(self.slowest_s, event.seconds)
        several = len(event.task.rows) > 1
        suspected = self.form.asynchronous and several and bool(event.unfinished)  # all rows were under way
        known = event.row is not None and event.row not in self.scores and not suspected
        if known:
            self.faults[event.row] = event
        left = [row for row in event.unfinished if row not in self.faults]
        if known and left:
            return [self._task(left, FIRST)]
        return [self._task([row], SINGLE) for row in left]

    def _task(self, rows: Iterable[int], purpose: str, not_after: float = float("inf")) -> Task:
        limit_s = self.timeout_s if purpose == FIRST else self.single_limit_s
        return Task(self.number, tuple(rows), limit_s, purpose, not_after)

    def _note(self, event: Scored) -> None:
        self.longest_s, self.slowest_s = max(self.longest_s, event.seconds), max(self.slowest_s, event.seconds)


class BatchScoring(Scoring):
    """Functions that take all samples in one call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.failure: Failed | None = None
        self.single: dict[int, Scores | None] = {}
        self.guilty: dict[int, Failed] = {}
        self.others_open = False

    def tasks(self) -> list[Task]:
        return [self._task(self.rows, FIRST)]

    def handle(self, event: Scored | Failed) -> Iterable[Task]:
        scored = isinstance(event, Scored)
        if scored:
            self._note(event)
        else:
            self.slowest_s = max(self.slowest_s, event.seconds)
        purpose = event.task.purpose
        if purpose == SINGLE:
            if scored:
                self.single[event.rows[0]] = event.scores[0]
            else:
                self.guilty[event.task.rows[0]] = event
            return self._decide()
        if scored:
            self.scores |= zip(event.rows, event.scores, strict=True)
            if purpose == OTHERS:
                self.guilty = {self.failure.row: self.failure}
                self.crew.cancel(lambda task: task.function == self.number and task.purpose == SINGLE)
            self._close()
            return []
        if purpose == OTHERS:
            self.others_open = False
            return self._decide()
        if purpose == AGAIN or len(self.rows) == 1:
            self.guilty = self.guilty or ({0: event} if len(self.rows) == 1 else {})
            self._close()
            return []
        return self._search(event)

    def _search(self, failure: Failed) -> list[Task]:
        """The tasks that find out which rows made the call for all of them fail."""
        self.failure = failure
        if failure.cause == ERROR:  # nothing hung, so each row has its full time
            self.single_limit_s = self.timeout_s
        not_after = time.monotonic() + max(self.timeout_s, RESCUE_S)
        single = [self._task([row], SINGLE, not_after) for row in self.rows]
        if failure.row is None or failure.cause == ERROR:
            return single
        self.others_open = True
        return [self._task([row for row in self.rows if row != failure.row], OTHERS), *single]

    def _decide(self) -> list[Task]:
        """Once every row has been called on its own: the last call for those that are not at fault."""
        if len(self.single) + len(self.guilty) < len(self.rows):
            return []
        if self.others_open and self.guilty.keys() == {self.failure.row}:
            return []  # the call that is under way is this very one
        if self.others_open:
            self.others_open = False
            self.crew.cancel(lambda task: task.function == self.number and task.purpose == OTHERS)
        if self.single and (self.guilty or self.failure.cause == ERROR):
            return [self._task(sorted(self.single), AGAIN)]
        self._close()
        return []

    def _close(self) -> None:
        """Settles what has been found out: rows at fault, and for the others what scores there are."""
        self.faults = dict(self.guilty)
        self.scores = {row: score for row, score in {**self.single, **self.scores}.items() if row not in self.faults}
        self.batch_fault = self.failure if not self.faults else None
