"""The reward as the trainer calls it: in worker processes that can be killed, so that no answer can hang or end a run.

A row that takes longer than `timeout_s`, raises or ends its process is at fault: it is scored by `on_error`, counted,
and told once to `on_fault`. What a function returns that is no score is an error in the function, whatever the row,
and ends the run.
"""

import inspect
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import cloudpickle

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.crew import ENDED, TIMEOUT, Crew, Failed, Scored
from grpo_vlm.rewards.forms import RewardSample, plain_function
from grpo_vlm.rewards.loader import Reward, load_reward, place, taken_by
from grpo_vlm.rewards.mixture import check_weights, mix
from grpo_vlm.rewards.process import Task
from grpo_vlm.rewards.results import Scores, check_keys
from grpo_vlm.rewards.scoring import BatchScoring, Scoring
from grpo_vlm.rewards.worker import Job

MOST_WORKERS = 8  # of one training process when num_workers is null
TOO_FEW = 4  # a call with fewer samples may fail as a whole without the function being broken
GOLDS = -1  # number of the function that grades golds by themselves
GOLDS_A_TASK = 32

Spec = str | Callable[..., Any]


@dataclass(frozen=True)
class Limits:
    """worker.reward: seconds for one sample, GiB that a worker may take, workers (None: by the cores), calls of an
    asynchronous function in flight, and what a sample at fault gets (`raise`, `zero` or `none`)."""

    num_workers: int | None = None
    timeout_s: float = 30.0
    memory_limit_gb: float = 8.0
    concurrency: int = 64
    on_error: str = "none"


@dataclass(frozen=True)
class Fault:
    """A sample that could not be scored. cause: timeout, error or ended; row_id is that of the batch's first row when
    no row fails on its own; policy: what it got."""

    function: str
    row_id: str
    cause: str
    text: str
    response: str
    ground_truth: str
    seconds: float
    policy: str

    def record(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


class RewardPool:
    """Reward functions in worker processes. Calling it with N samples returns N scores: dicts of finite floats with
    "overall", or None for a sample that has no score. May be called from any thread; one call at a time.

    specs: functions as load_reward takes them. With several, "overall" is their sum by `weights`; kwargs go to those
    that have the parameters. on_fault is called for every sample at fault. The workers start at once and load the
    functions in the background. Raises RewardError when a call of an unknown form is given as an object.
    """

    def __init__(
        self,
        specs: Spec | Sequence[Spec],
        kwargs: Mapping[str, Any] | None = None,
        *,
        weights: Sequence[float] = (),
        limits: Limits | None = None,
        on_fault: Callable[[Fault], None] | None = None,
    ):
        specs = [specs] if isinstance(specs, str) or callable(specs) else list(specs)
        self.limits = limits or Limits()
        self.weights = check_weights(weights, len(specs))
        self.on_fault = on_fault
        self._lock = threading.Lock()
        self._longest_s = [0.0] * len(specs)
        self._counts = dict.fromkeys(("timeouts", "errors", "not_scored"), 0)
        self._slowest_s = 0.0
        most = worker_count(self.limits.num_workers)
        self._crew = Crew(_job(specs, dict(kwargs or {}), self.limits), most, threads=max(1, _cores() // most))

    def load(self) -> list[str]:
        """Waits until the functions are loaded; their names. Raises RewardError when they cannot be."""
        with self._lock:
            return [name for name, _ in self._crew.load()]

    def __call__(self, samples: Sequence[RewardSample], *, strict: bool = False) -> list[Scores | None]:
        """Scores in the order of the samples. strict: a sample at fault is an error, whatever `on_error` says.

        Raises RewardError naming function and row: when a function cannot be loaded, returned what is no score, or
        could score none of the samples; and for a sample at fault with on_error=raise.
        """
        if not samples:
            return []
        policy = "raise" if strict else self.limits.on_error
        with self._lock:
            functions = self._crew.load()
            scorings = [
                (BatchScoring if form.whole_batch else Scoring)(
                    number, form, len(samples), self.limits.timeout_s, self._longest_s[number], self._crew
                )
                for number, (_, form) in enumerate(functions)
            ]

            def handle(event: Scored | Failed) -> list[Task]:
                scoring = scorings[event.task.function]
                more = list(scoring.handle(event))
                if policy == "raise" and (failure := _first(scoring)):
                    raise RewardError(self._text(functions[scoring.number][0], failure, samples))
                return more

            self._crew.run([task for scoring in scorings for task in scoring.tasks()], samples, handle)
            names = [name for name, _ in functions]
            for name, scoring in zip(names, scorings, strict=True):
                self._settle(name, scoring, samples, policy)
            return self._scores(names, scorings, samples, policy)

    def metrics(self) -> dict[str, float]:
        """Since the last call: reward/timeouts and reward/errors (samples at fault; a process that ended is an error),
        reward/not_scored, and reward/slowest_s, the longest call."""
        found = {f"reward/{name}": float(count) for name, count in self._counts.items()}
        found["reward/slowest_s"] = self._slowest_s
        self._counts, self._slowest_s = dict.fromkeys(self._counts, 0), 0.0
        return found

    @property
    def uses_grader(self) -> bool:
        """Whether the functions have loaded grpo_vlm.rewards.grade, as far as they have been called."""
        return self._crew.uses_grader

    def grade_golds(self, golds: Sequence[str], budget_s: float) -> list[bool | None]:
        """Whether grpo_vlm.rewards.grade finds each gold answer equal to itself; None for those that the time was too
        short for."""
        samples = [RewardSample("gold", gold, 0, (), gold, [], "") for gold in golds]
        verdicts: list[bool | None] = [None] * len(golds)
        until = time.monotonic() + budget_s

        def handle(event: Scored | Failed) -> list[Task]:
            if isinstance(event, Scored):
                for row, score in zip(event.rows, event.scores, strict=True):
                    verdicts[row] = bool(score["overall"])
                return []
            if time.monotonic() > until:
                return []
            if event.row is not None:
                verdicts[event.row] = False
            left = [row for row in event.unfinished if row != event.row]
            return [Task(GOLDS, tuple(left), self.limits.timeout_s, "golds", until)] if left else []

        starts = range(0, len(golds), GOLDS_A_TASK)
        rows = [tuple(range(first, min(first + GOLDS_A_TASK, len(golds)))) for first in starts]
        with self._lock:
            self._crew.load()
            tasks = [Task(GOLDS, part, self.limits.timeout_s, "golds", until) for part in rows]
            self._crew.run(tasks, samples, handle)
        return verdicts

    def close(self) -> None:
        """Kills the workers, also in the middle of a call."""
        self._crew.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that are there now."""
        return self._crew.pids

    # ---- what became of a call

    def _settle(self, name: str, scoring: Scoring, samples: Sequence[RewardSample], policy: str) -> None:
        """Counts, tells and judges what one function did."""
        self._longest_s[scoring.number] = scoring.longest_s
        self._slowest_s = max(self._slowest_s, scoring.slowest_s)
        check_keys(name, samples, [scoring.scores.get(row) for row in scoring.rows])
        if len(scoring.faults) == len(samples) >= TOO_FEW:
            first = self._text(name, scoring.faults[min(scoring.faults)], samples)
            raise RewardError(f"not one of {len(samples)} samples could be scored. The first: {first}")
        faults = [scoring.faults[row] for row in sorted(scoring.faults)]
        for failure in faults or ([scoring.batch_fault] if scoring.batch_fault else []):
            self._counts["timeouts" if failure.cause == TIMEOUT else "errors"] += 1
            if self.on_fault is not None:
                sample = samples[failure.row if failure.row is not None else failure.task.rows[0]]
                text = self._text(name, failure, samples)
                about = (sample.row_id, failure.cause, text, sample.response, sample.ground_truth)
                got = policy if scoring.faults else "scored one by one"
                self.on_fault(Fault(name, *about, round(failure.seconds, 3), got))

    def _scores(
        self, names: list[str], scorings: list[Scoring], samples: Sequence[RewardSample], policy: str
    ) -> list[Scores | None]:
        found = []
        for scoring in scorings:
            known = next((score for score in scoring.scores.values() if score is not None), {"overall": 0.0})
            zero = dict.fromkeys(known, 0.0)
            found.append([zero if row in scoring.faults else scoring.scores[row] for row in range(len(samples))])
        mixed = mix(names, self.weights, found)
        if policy == "none":
            at_fault = {row for scoring in scorings for row in scoring.faults}
            mixed = [None if row in at_fault else score for row, score in enumerate(mixed)]
        self._counts["not_scored"] += sum(score is None for score in mixed)
        return mixed

    def _text(self, name: str, failure: Failed, samples: Sequence[RewardSample]) -> str:
        rows = failure.task.rows if failure.row is None else (failure.row,)
        where = place([samples[row] for row in rows])
        if failure.cause == TIMEOUT:
            limit, whole = failure.task.idle_limit_s, self.limits.timeout_s
            if failure.late:
                return f"{name} was not called for {where} alone: finding the row at fault took too long"
            at = f"; it was at\n{failure.text}" if failure.text else ""
            if limit < whole:
                return f"{name}, after the call for all rows had failed, took more than {limit:g} s on {where}{at}"
            hint = "; no row does on its own, so raise it" if len(rows) > 1 else ""
            return f"{name} took more than {whole:g} s (worker.reward.timeout_s{hint}) on {where}{at}"
        if failure.cause == ENDED:
            return f"{name} on {where}: its process {failure.text}"
        return f"{name} raised on {where}:\n{failure.text}"


def _first(scoring: Scoring) -> Failed | None:
    return scoring.faults[min(scoring.faults)] if scoring.faults else scoring.batch_fault


def worker_count(asked: int | None) -> int:
    """Workers of one of the training processes of this machine: worker.reward.num_workers; null: its share of the
    cores, two to eight. They sleep while the trainer works, so they do not take the cores from it."""
    if asked is not None:
        return asked
    return max(2, min(MOST_WORKERS, _cores()))


def _cores() -> int:
    """This process's share of the cores."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def _job(specs: Sequence[Spec], kwargs: dict[str, Any], limits: Limits) -> Job:
    """Names are loaded by the workers; objects are bound here, where their module is, and travel by value unless a
    module that can be imported has them."""
    alone = len(specs) == 1
    found = [
        spec if isinstance(spec, str) else load_reward(spec, kwargs if alone else taken_by(spec, kwargs))
        for spec in specs
    ]
    try:
        pickled = cloudpickle.dumps(found)
    except Exception as error:  # pickling runs whatever the objects in it define
        names = ", ".join(spec.name for spec in found if isinstance(spec, Reward))
        raise RewardError(
            f"{names} cannot be given to a worker process: {type(error).__name__}: {error}; put the function into a "
            "file and name it as FILE.py:function"
        ) from None
    sources = _sources([spec for spec in found if isinstance(spec, Reward)])
    names = tuple(spec if isinstance(spec, str) else spec.name for spec in found)
    return Job(pickled, kwargs, names, sources, limits.memory_limit_gb, limits.concurrency)


def _sources(rewards: Sequence[Reward]) -> dict[str, list[str]]:
    """The source of each function by its file's name: that of a notebook's cell exists in this process alone."""
    codes = [plain_function(reward.function) for reward in rewards]
    names = [code.__code__.co_filename for code in codes if inspect.isfunction(code)]
    return {name: lines for name in names if (lines := linecache.getlines(name))}
