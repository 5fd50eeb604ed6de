"""Where the numbers of a run go: each tracker gets the same StepRecord.

trainer.logger names them: console (a line per step), file (the files of the run folder), tensorboard (board.py), and
wandb, swanlab, mlflow, trackio (services.py). The report is always written.
"""

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from grpo_vlm.config.trackers import TRACKERS
from grpo_vlm.errors import ConfigError
from grpo_vlm.report.board import TensorBoardTracker
from grpo_vlm.report.console import Console
from grpo_vlm.report.page import write_report
from grpo_vlm.report.record import StepRecord
from grpo_vlm.report.run_folder import BEFORE_START, RunFolder
from grpo_vlm.report.services import SERVICES, ServiceTracker


class Tracker(Protocol):
    """Takes the record of each step, in order; `close` ends it and may be called twice."""

    def log(self, record: StepRecord) -> None: ...

    def close(self) -> None: ...


class ConsoleTracker:
    """Prints one line per step."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total_steps = total_steps

    def log(self, record: StepRecord) -> None:
        self._console.step(record, self._total_steps)

    def close(self) -> None:
        self._console.close()


class FileTracker:
    """Appends to metrics.jsonl and samples.jsonl of the run folder."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder

    def log(self, record: StepRecord) -> None:
        self._run_folder.append(record)

    def close(self) -> None:
        """Nothing is open between two records; the run folder is closed by who opened it."""


class ReportTracker:
    """Rewrites report.html of the run folder in a thread of its own, so that no step waits for it, and once more at
    the end.

    Between two writings lie `pause_s` seconds and at least 100 times as long as the last one took: it costs 1 % of a
    core at most. A failure there (a full disk) is printed by the thread and does not end the run.
    """

    def __init__(self, run_folder: RunFolder, pause_s: float = 20.0) -> None:
        self._folder, self._pause_s = run_folder.path, pause_s
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self._behind = False

    def log(self, record: StepRecord) -> None:
        self._behind = True
        writing = self._thread is not None and self._thread.is_alive()
        if not writing and time.monotonic() >= self._due:
            self._behind = False
            self._thread = threading.Thread(target=self._write, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._behind:
            self._behind = False
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        write_report([self._folder])
        now = time.monotonic()
        self._due = now + max(self._pause_s, 100 * (now - began))


def make_trackers(
    names: Sequence[str],
    run_folder: RunFolder,
    *,
    console: Console,
    total_steps: int,
    resume_step: int | None = None,
    val_samples: int = 0,
) -> list[Tracker]:
    """The trackers of `names`, each once; none in a process whose run folder is not written.

    The files are always written, for resuming and the end of the run read them, and so is the report. `val_samples`
    answers to held-out rows are shown per validation where a tracker can.

    Raises ConfigError naming every name that is not one of TRACKERS, and where a service does not start a run.
    """
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ConfigError(f"trainer.logger: no tracker {', '.join(unknown)}. Choose from {', '.join(TRACKERS)}.")
    if not run_folder.write:
        return []
    # files first: what the console shows is then on disk already
    trackers: list[Tracker] = [FileTracker(run_folder), ReportTracker(run_folder)]
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker(run_folder, resume_step, val_samples))
    resumed = resume_step is not None and resume_step != BEFORE_START
    trackers += [
        ServiceTracker(name, run_folder, resumed=resumed) for name in dict.fromkeys(names) if name in SERVICES
    ]
    if "console" in names:
        trackers.append(ConsoleTracker(console, total_steps))
    return trackers
