"""The run folder: the one place where a run's files are written, resumed or refused.

Layout: config.yaml, metrics.jsonl, samples.jsonl, groups.jsonl, pictures/, report.html, tensorboard/, vllm.log,
checkpoint_tracker.json and global_step_N/.
A run may be killed at any moment, so every file is either appended to line by line (flushed and synced) or replaced in
one step, and a checkpoint is written as global_step_N.tmp and renamed: a folder with the final name is complete. What
a resumed run does again is moved aside (*.superseded*), never overwritten, and each step stays in metrics.jsonl
exactly once.

Order within a step that saves: fill `begin_checkpoint(step)`, `append(record)`, `finish_checkpoint(step, ...)`,
`prune(limit)`. Then no checkpoint exists whose step is missing from metrics.jsonl.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shutil
import socket
import warnings
from pathlib import Path
from typing import Any, TextIO

import yaml

from grpo_vlm.errors import ConfigError
from grpo_vlm.report.checkpoint_tracker import CheckpointTracker
from grpo_vlm.report.files import (
    GROUPS_NAME,
    SHOWN_NAMES,
    append_text,
    free_path,
    read_lines,
    remove,
    replace_text,
    supersede_lines,
    sync,
    sync_tree,
)
from grpo_vlm.report.groups import append_groups
from grpo_vlm.report.record import StepRecord

STEP_PREFIX = "global_step_"
CHECKPOINT_NAME = re.compile(rf"{STEP_PREFIX}(\d+)")
LOCK_NAME = "run.lock"
SKIPPED_NAME = "skipped_rows.jsonl"
FAULTS_NAME = "reward_faults.jsonl"
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "tensorboard", "vllm.log", "checkpoint_tracker.json")
OWN_NAMES = (*FILES, *SHOWN_NAMES, SKIPPED_NAME, FAULTS_NAME)
SCORE_NAME = "val/reward_score"
BEFORE_START = -1  # everything on file, the validation before training too, is superseded


def checkpoint_steps(path: str | Path) -> list[int]:
    """Steps of the complete checkpoints in a run folder, ascending; [] when the folder is absent."""
    path = Path(path)
    if not path.is_dir():
        return []
    matches = [CHECKPOINT_NAME.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir()]
    return sorted(int(match.group(1)) for match in matches if match)


def last_checkpoint(path: str | Path) -> int | None:
    """Step of the newest complete checkpoint (what trainer.find_last_checkpoint resumes from), or None."""
    return max(checkpoint_steps(path), default=None)


class RunFolder:
    """An opened run folder; make it with `RunFolder.open`.

    With write=False (every process but the main one) it knows the paths and its writing methods do nothing.
    `superseded` counts the lines and checkpoints that a resume moved aside, by file name; `config_changes` lists the
    keys whose values differ from the run that is resumed ("worker.actor.optim.lr: 1e-06 -> 2e-06"); `unfinished` names
    checkpoints whose writing or deleting broke off, which were removed.
    """

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path = path
        self.write = write
        self.superseded: dict[str, int] = {}
        self.config_changes: list[str] = []
        self.unfinished: list[str] = []
        self.config_path = path / "config.yaml"
        self.metrics_path = path / "metrics.jsonl"
        self.samples_path = path / "samples.jsonl"
        self.tensorboard_path = path / "tensorboard"
        self.tracker_path = path / "checkpoint_tracker.json"
        self.resume_step: int | None = None
        self._created: list[Path] = []  # deepest first
        self._fresh = False
        self._last_step = -1
        self._lock: TextIO | None = None

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        resume_step: int | None,
        config_yaml: str,
        write: bool = True,
        restart: bool = False,
    ) -> "RunFolder":
        """Creates the folder, or opens it to go on after step `resume_step`.

        With `restart` a run that ended before its first checkpoint is begun again in its folder; what it had written
        is kept as superseded (`resume_step` of the folder is then BEFORE_START).

        Raises ConfigError, having changed and created nothing, when the folder is not empty and `resume_step` is None,
        when it is resumed but holds something else than this run, when another process is writing to it, or when it
        cannot be created.
        """
        folder = cls(Path(path).expanduser(), write=write)
        if not write:
            return folder
        try:
            if restart and resume_step is None and _has_only_logs(folder.path):
                resume_step = BEFORE_START
            _check_resumable(folder.path, resume_step)
            folder._create()
            folder._lock = _take_lock(folder.path)
            # again: another process may have begun here before the lock was taken
            _check_resumable(folder.path, resume_step)
            folder._fresh = not _list_contents(folder.path)
            folder.resume_step = resume_step
            if not folder._fresh:
                folder._resume(resume_step)
            folder._write_config(config_yaml)
        except BaseException as error:
            folder.abandon()
            if isinstance(error, OSError):
                raise ConfigError(
                    f"trainer.save_checkpoint_path: cannot write to {folder.path} ({error}). Name another folder."
                ) from error
            raise
        return folder

    def append(self, record: StepRecord) -> None:
        """Writes the record's samples and groups and then its line of metrics, each synced to disk.

        Steps must ascend. No-op with write=False.
        """
        if not self.write:
            return
        assert record.step > self._last_step, (
            f"step {record.step} after step {self._last_step}: a step is recorded once"
        )
        try:
            if record.samples:
                append_text(self.samples_path, "".join(sample.to_json() + "\n" for sample in record.samples))
            append_groups(self.path, record.groups)
            append_text(self.metrics_path, record.to_json() + "\n")
        except OSError as error:
            steps = self.checkpoints()
            goes_on = f"goes on from global_step_{steps[-1]}" if steps else "begins again: there is no checkpoint yet"
            raise ConfigError(
                f"trainer.save_checkpoint_path: step {record.step} cannot be recorded in {self.path} ({error}). Make"
                f" room or permit writing; the same command then {goes_on}."
            ) from error
        self._last_step = record.step
        self.keep()

    def keep(self) -> None:
        """Says that a result of the run is in the folder, so that `abandon` leaves it."""
        self._fresh = False

    def close(self) -> None:
        """Gives the folder free for another process. Idempotent."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # on a read-only disk it stays, and locks nothing without its process
                (self.path / LOCK_NAME).unlink(missing_ok=True)
            self._lock.close()
            self._lock = None

    def abandon(self) -> None:
        """Closes and, if the folder began empty and has no step yet, removes all that the run made.

        For a run that a user's error ends before its first step. Files that are not the run's own are left.
        """
        self.close()
        if self._fresh:
            for name in OWN_NAMES:
                remove(self.path / name)
            for temporary in self.path.glob("*.tmp"):
                remove(temporary)
        for directory in self._created:
            if not directory.exists() or any(directory.iterdir()):
                break
            directory.rmdir()

    # ---- checkpoints

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return checkpoint_steps(self.path)

    def checkpoint_path(self, step: int) -> Path:
        """Where the checkpoint of `step` lies when it is complete."""
        return self.path / f"global_step_{step}"

    def begin_checkpoint(self, step: int) -> Path:
        """The folder to write the checkpoint of `step` into, which the main process makes anew."""
        path = self.path / f"global_step_{step}.tmp"
        if self.write:
            assert not self.checkpoint_path(step).exists(), f"{self.checkpoint_path(step)} exists already"
            remove(path)
            path.mkdir()
        return path

    def finish_checkpoint(self, step: int, *, score: float | None, model_folder: str = "model") -> Path:
        """Gives a checkpoint that all processes have written its final name, records it and returns its path.

        `score` is the validation reward of these weights, None when unknown; the highest one makes the best one.
        """
        path = self.checkpoint_path(step)
        if self.write:
            temporary = self.path / f"global_step_{step}.tmp"
            sync_tree(temporary)
            os.replace(temporary, path)
            sync(self.path)
            self.keep()
            best_step, best_score = self.read_tracker().best_of({} if score is None else {step: score})
            self.write_tracker(CheckpointTracker(best_step, best_score, step, f"{path.name}/{model_folder}"))
        return path

    def read_tracker(self) -> CheckpointTracker:
        """See `CheckpointTracker.read`."""
        return CheckpointTracker.read(self.tracker_path)

    def write_tracker(self, tracker: CheckpointTracker) -> None:
        """Replaces checkpoint_tracker.json in one step. No-op with write=False."""
        if self.write:
            tracker.write(self.tracker_path)

    def prune(self, save_limit: int) -> list[int]:
        """Deletes all but the newest `save_limit` checkpoints, never the best or the last one; below 1 means no limit.

        Returns the deleted steps.
        """
        if not self.write or save_limit < 1:
            return []
        tracker = self.read_tracker()
        keep = {*self.checkpoints()[-save_limit:], tracker.best_global_step, tracker.last_global_step}
        doomed = [step for step in self.checkpoints() if step not in keep]
        for step in doomed:
            # renamed first: a half-deleted folder must not look complete
            temporary = self.path / f"global_step_{step}.tmp"
            os.replace(self.checkpoint_path(step), temporary)
            shutil.rmtree(temporary)
        return doomed

    # ---- opening

    def _create(self) -> None:
        missing = [directory for directory in (self.path, *self.path.parents) if not directory.exists()]
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            self._created.insert(0, directory)

    def _resume(self, resume_step: int) -> None:
        for leftover in self.path.glob("*.tmp"):
            if leftover.name.startswith(STEP_PREFIX):
                self.unfinished.append(leftover.name)
            remove(leftover)
        for path in (self.metrics_path, self.samples_path, self.path / GROUPS_NAME):
            moved = supersede_lines(path, resume_step)
            if moved:
                self.superseded[path.name] = moved
        stale = [step for step in self.checkpoints() if step > resume_step]
        for step in stale:
            # an abandoned future: left in place, a later resume would continue from it
            path = self.checkpoint_path(step)
            os.replace(path, free_path(path.with_name(f"{path.name}.superseded")))
            self.superseded[path.name] = 1
        rows = [row for _, row in read_lines(self.metrics_path) if row is not None]
        self._last_step = max((row["step"] for row in rows), default=-1)
        self._repair_tracker(rows, resume_step)

    def _repair_tracker(self, rows: list[dict[str, Any]], resume_step: int) -> None:
        """Makes the tracker agree with the checkpoints: a kill may fall between a rename and its entry."""
        steps = set(self.checkpoints())
        if not steps:
            self.tracker_path.unlink(missing_ok=True)
            return
        tracker = self.read_tracker()
        if tracker.best_global_step not in steps:
            tracker = dataclasses.replace(tracker, best_global_step=None, best_val_reward_score=None)
        scores = {
            row["step"]: row[SCORE_NAME] for row in rows if row["step"] in steps and row.get(SCORE_NAME) is not None
        }
        best_step, best_score = tracker.best_of(scores)
        model_folder = Path(tracker.last_actor_path).name if tracker.last_actor_path else "model"
        last_path = f"global_step_{resume_step}/{model_folder}"
        self.write_tracker(CheckpointTracker(best_step, best_score, resume_step, last_path))

    def _write_config(self, config_yaml: str) -> None:
        if self.config_path.exists():
            previous = self.config_path.read_text(encoding="utf-8")
            self.config_changes = _list_changes(yaml.safe_load(previous), yaml.safe_load(config_yaml))
            if previous == config_yaml:
                return
            replace_text(free_path(self.path / "config.previous.yaml"), previous)
        replace_text(self.config_path, config_yaml)


def _list_contents(path: Path) -> list[str]:
    """Names in the folder, without what a run killed before its first file leaves; [] when it is absent."""
    if path.is_dir():
        return sorted(entry.name for entry in path.iterdir() if entry.name not in (LOCK_NAME, "config.yaml.tmp"))
    for part in (path, *path.parents):
        if part.exists() and not part.is_dir():
            raise ConfigError(
                f"trainer.save_checkpoint_path: {path} cannot be a run folder, because {part} is a file. Name another."
            )
    return []


def _has_only_logs(path: Path) -> bool:
    """Whether a run began here and ended before its first checkpoint: its own files and nothing else."""
    contents = {name for name in _list_contents(path) if not name.endswith((".superseded.jsonl", ".tmp"))}
    contents = {name for name in contents if not name.startswith("config.previous")}
    return "config.yaml" in contents and contents <= set(OWN_NAMES)


def _check_resumable(path: Path, resume_step: int | None) -> None:
    contents = _list_contents(path)
    if not contents or resume_step == BEFORE_START:
        return
    shown = ", ".join(contents[:8]) + (f" and {len(contents) - 8} more" if len(contents) > 8 else "")
    other = "choose another trainer.experiment_name or trainer.save_checkpoint_path"
    folder = f"trainer.save_checkpoint_path: the folder {path}"
    steps = checkpoint_steps(path)
    if resume_step is None and steps:
        raise ConfigError(
            f"{folder} is not empty (it holds {shown}). Set trainer.find_last_checkpoint=true to resume from step "
            f"{steps[-1]}, or {other}."
        )
    if resume_step is None:
        raise ConfigError(
            f"{folder} is not empty (it holds {shown}) and has no complete checkpoint that "
            f"trainer.find_last_checkpoint=true could resume from. Move or delete it, or {other}."
        )
    if "config.yaml" not in contents:
        raise ConfigError(f"{folder} is not one of a run (no config.yaml; it holds {shown}). Please {other}.")
    if resume_step not in steps:
        raise ConfigError(
            f"{folder} holds another run, without the checkpoint global_step_{resume_step} that is resumed (it holds "
            f"{shown}). Please {other}."
        )


def _take_lock(path: Path) -> TextIO:
    """Locks the folder until the file is closed or the process dies.

    A POSIX lock, because worker processes do not inherit it.
    """
    lock = open(path / LOCK_NAME, "a+", encoding="utf-8")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            lock.seek(0)
            owner = lock.read().strip()
            lock.close()
            raise ConfigError(
                f"trainer.save_checkpoint_path: the folder {path} is in use by {owner or 'another process'}. Wait for "
                "it or stop it, or choose another trainer.experiment_name or trainer.save_checkpoint_path."
            ) from error
        # some cluster file systems have no locks; a run there is fine as long as it is the only one
        warnings.warn(f"{path} cannot be locked ({error}): start only one run in it at a time.", stacklevel=3)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _list_changes(old: Any, new: Any, key: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        names = [*old, *(name for name in new if name not in old)]
        return [
            change
            for name in names
            for change in _list_changes(old.get(name), new.get(name), f"{key}.{name}".strip("."))
        ]
    return [] if old == new else [f"{key}: {old} -> {new}"]
