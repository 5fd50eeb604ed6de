"""Where the numbers of a run go: each tracker gets the same StepRecord.

trainer.logger names them: console (a line per step), file (metrics.jsonl and samples.jsonl) and tensorboard.
"""

from collections.abc import Sequence
from typing import Protocol

from grpo_vlm.errors import ConfigError
from grpo_vlm.report.console import Console
from grpo_vlm.report.record import StepRecord, spread
from grpo_vlm.report.run_folder import RunFolder

TRACKER_NAMES = ("console", "file", "tensorboard")


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


class TensorBoardTracker:
    """Writes the scalars, under the same names, to tensorboard/ of the run folder.

    On resume the events of the steps after `resume_step` stay in their files and are hidden by TensorBoard.
    """

    def __init__(self, run_folder: RunFolder, resume_step: int | None, val_samples: int) -> None:
        # imported here: it takes a second, which a run without this tracker need not wait
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._run_folder, self._val_samples = run_folder, val_samples
        self._writer = SummaryWriter(log_dir=str(run_folder.tensorboard_path), purge_step=purge_step)

    def log(self, record: StepRecord) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, global_step=record.step)
        held_out = [sample for sample in record.samples if sample.split == "val"]
        for sample in spread(held_out, self._val_samples):
            parts = (sample.prompt, sample.response, f"answer {sample.ground_truth}, scores {sample.scores}")
            text = "\n\n---\n\n".join(parts)
            self._writer.add_text(f"val/generations/{sample.row_id}", text, global_step=record.step)
        self._writer.flush()
        self._run_folder.keep()

    def close(self) -> None:
        self._writer.close()


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

    The files are always written: resuming and the end of the run read them. `val_samples` answers to held-out rows are
    shown per validation where a tracker can.

    Raises ConfigError naming every name that is not in TRACKER_NAMES.
    """
    unknown = [name for name in names if name not in TRACKER_NAMES]
    if unknown:
        raise ConfigError(f"trainer.logger: no tracker {', '.join(unknown)}. Choose from {', '.join(TRACKER_NAMES)}.")
    if not run_folder.write:
        return []
    # files first: what the console shows is then on disk already
    trackers: list[Tracker] = [FileTracker(run_folder)]
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker(run_folder, resume_step, val_samples))
    if "console" in names:
        trackers.append(ConsoleTracker(console, total_steps))
    return trackers
