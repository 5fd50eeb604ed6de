"""Writes checkpoints, one at a time, in a thread of the main process; what goes wrong leaves the last good one.

A checkpoint comes about in three steps: `begin` gives a draft, the training processes fill it (tensors are copied to
host memory, so they may change afterwards), `submit` writes the rest. When its manifest is on the disk it gets its
final name. Until then the folder is `global_step_N.tmp`, which no run resumes from.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from grpo_vlm.config import Config
from grpo_vlm.errors import ConfigError
from grpo_vlm.report.console import Console
from grpo_vlm.report.run_folder import RunFolder
from grpo_vlm.training.manifest import write_manifest
from grpo_vlm.training.snapshot import Naming, Shards

FAULTS = (OSError, SafetensorError)  # disk full, no permission, quota


class Draft:
    """A checkpoint that is being put together, on the main process. After a first fault it takes nothing more; the
    fault is raised by `finish`."""

    def __init__(self, step: int, *, background: bool):
        self.step, self.background = step, background
        self.place: Path | None = None
        self.fault: Exception | None = None
        self.main_folder = "model"  # what the tracker names
        self._shards: list[Shards] = []
        self._rest: list[Callable[[Path], None]] = []

    def take(
        self,
        folder: str,
        stem: str,
        items: Iterable[tuple[str, Tensor]],
        *,
        naming: Naming | None = None,
        shard_bytes: int | None = None,
    ) -> None:
        """Copies all tensors; goes through all items in any case, since gathering them is a collective."""
        shards = None
        if self.fault is None:
            shards = self._try(lambda: self._open(folder, stem, naming, shard_bytes))
        for name, tensor in items:
            if self.fault is None:
                self._try(lambda name=name, tensor=tensor: shards.add(name, tensor))
        if self.fault is None:
            shards.copied()

    def text(self, name: str, text: str) -> None:
        """A file with this text."""
        self.then(lambda place: _write_text(place / name, text))

    def then(self, write: Callable[[Path], None]) -> None:
        """Something else to write into the folder, later and perhaps in a thread."""
        self._rest.append(write)

    def finish(self) -> None:
        """Writes what is left. Raises what went wrong."""
        if self.fault is not None:
            raise self.fault
        for shards in self._shards:
            shards.finish()
        for write in self._rest:
            write(self.place)

    def _open(self, folder: str, stem: str, naming: Naming | None, shard_bytes: int | None) -> Shards:
        place = self.place / folder
        place.mkdir(parents=True, exist_ok=True)
        self._shards.append(Shards(place, stem, background=self.background, naming=naming, shard_bytes=shard_bytes))
        return self._shards[-1]

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except FAULTS as fault:
            self.fault = fault
            self._shards.clear()  # gives the copies free
            return None


class Saver:
    """The main process's writer; on the others its methods do nothing."""

    def __init__(self, config: Config, folder: RunFolder, console: Console):
        self.config, self.folder, self.console = config.trainer, folder, console
        self.last_bytes: int | None = None  # of the last checkpoint that was written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None
        self._failed: tuple[int, Exception] | None = None  # the newest checkpoint, when it could not be written

    def begin(self, step: int, *, background: bool) -> Draft | None:
        """The draft of step `step`; None on the other processes."""
        if not self.folder.write:
            return None
        draft = Draft(step, background=background)
        try:
            draft.place = self.folder.begin_checkpoint(step)
        except OSError as fault:
            draft.fault = fault
        return draft

    def submit(self, draft: Draft | None, facts: Mapping[str, Any], *, score: float | None) -> None:
        """Finishes the draft, in the thread or at once as it was begun. score: the validation reward, if known."""
        if draft is None:
            return
        if draft.background:
            self._writing = self._thread.submit(self._write, draft, facts, score)
        else:
            self._write(draft, facts, score)

    def settle(self) -> None:
        """Returns when nothing is being written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Settles. Raises ConfigError when the newest checkpoint could not be written."""
        self.settle()
        self._thread.shutdown()
        if self._failed is not None:
            step, fault = self._failed
            self._failed = None
            raise ConfigError(
                f"trainer.save_checkpoint_path: the checkpoint of step {step}, the last one, could not be written to"
                f" {self.folder.path}: {fault}. {self._last_good()} Make room (trainer.save_limit keeps fewer) or"
                " permit writing, and give the same command again: it goes on from there."
            )

    def refuse(self, step: int, reason: str) -> None:
        """Says that a checkpoint is not written, and keeps it in mind for `close`."""
        self._fail(step, OSError(reason))

    def _write(self, draft: Draft, facts: Mapping[str, Any], score: float | None) -> None:
        try:
            draft.finish()
            write_manifest(draft.place, facts)
            self.folder.finish_checkpoint(draft.step, score=score, model_folder=draft.main_folder)
        except FAULTS as fault:
            self._fail(draft.step, fault)
            if draft.place is not None:
                shutil.rmtree(draft.place, ignore_errors=True)
            return
        self._failed, self.last_bytes = None, _size(self.folder.checkpoint_path(draft.step))
        try:
            self.folder.prune(self.config.save_limit)
        except OSError as fault:
            self.console.warn(f"trainer.save_limit: an old checkpoint cannot be deleted ({fault})")

    def _fail(self, step: int, fault: Exception) -> None:
        self._failed = (step, fault)
        self.console.warn(f"the checkpoint of step {step} could not be written: {fault}. {self._last_good()}")

    def _last_good(self) -> str:
        steps = self.folder.checkpoints()
        return f"The last good one is global_step_{steps[-1]}." if steps else "There is no good one yet."


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
