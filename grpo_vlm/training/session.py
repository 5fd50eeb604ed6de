"""The parts of one run, built in order: reward, processor, rows, run folder, model, trainer. Whatever was opened is
closed again.

The order is the point: what a user can have got wrong is found before a model loads, and before anything is written.
"""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from grpo_vlm.config import Config, run_folder, to_yaml, updates_per_step
from grpo_vlm.config.check_sharding import launched
from grpo_vlm.config.reward_sources import BY_DATA_SOURCE, check_sources
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.sampler import steps_per_epoch
from grpo_vlm.errors import ConfigError, DataError, RewardError
from grpo_vlm.model.gpus import present
from grpo_vlm.model.load import load_policy, load_processor, load_reference
from grpo_vlm.report.console import Console
from grpo_vlm.report.record import Sample, spread
from grpo_vlm.report.run_folder import BEFORE_START, SKIPPED_NAME, RunFolder
from grpo_vlm.report.trackers import make_trackers
from grpo_vlm.rollout.ranks import on_main
from grpo_vlm.training import checkpoint
from grpo_vlm.training.forecast import add_measured, forecast, write_plan
from grpo_vlm.training.optimizer import check_8bit
from grpo_vlm.training.reference import saved_reference
from grpo_vlm.training.reward_start import (
    ConstantReward,
    FaultLog,
    check_golds,
    start_rewards,
    try_reward,
    wanted_scores,
)
from grpo_vlm.training.room import check_room
from grpo_vlm.training.sharding import described, dividing_while_loading, join_processes
from grpo_vlm.training.trainer import GRPOVLMTrainer

LAST_LINES = 500
LONGEST_NAMED = 3  # of the rows that are left out or changed
T = TypeVar("T")


def quieten() -> None:
    """Silences what the libraries print on every run and nobody needs: bars of loading and saving, and that the
    tokenizer's end-of-turn token joins the model's list of end tokens.
    """
    disable_progress_bar()
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)


class Session:
    """Everything of one run. Use as a context manager."""

    def __init__(
        self,
        config: Config,
        *,
        notices: Sequence[str] = (),
        train_rows: Sequence[Mapping[str, Any]] | None = None,
        val_rows: Sequence[Mapping[str, Any]] | None = None,
        reward: Callable | Sequence[Callable] | None = None,
    ):
        quieten()
        self.config, self.stack = config, ExitStack()
        self.skipped: list[dict[str, str]] = []  # rows left out: media that cannot be used, too long
        self.world_size, self.is_main = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0)) == 0
        self.console = Console(enabled=self.is_main)
        for notice in notices:
            self.console.note(notice)
        if config.worker.actor.optim.strategy == "adamw_8bit":
            check_8bit()
        join_processes(config)
        self.faults = FaultLog(self.console)
        self.reward = start_rewards(config, reward, self.faults)
        self.stack.callback(self.reward.close)
        try:
            self._build(train_rows, val_rows)
        except BaseException:
            self.stack.close()
            raise

    def _build(
        self, train_rows: Sequence[Mapping[str, Any]] | None, val_rows: Sequence[Mapping[str, Any]] | None
    ) -> None:
        config = self.config
        processor = load_processor(config)
        self.reward.load()
        self.train_set = self._rows("data.train_files", train_rows, config.data.train_files, processor)
        self.val_set = None
        if val_rows is not None or config.data.val_files:
            self.val_set = self._rows("data.val_files", val_rows, config.data.val_files, processor)
        self.rollout_steps = self._count_steps()
        if config.worker.reward.reward_function == BY_DATA_SOURCE:
            column = config.worker.reward.reward_function_kwargs.get("column", "data_source")
            sets = [rows for rows in (self.train_set, self.val_set) if rows is not None]
            self._on_main(lambda: check_sources(value for rows in sets for value in rows.source.column(column)))
        self._on_main(lambda: self._try_reward(processor.tokenizer))
        path = run_folder(config)
        resume = self._on_main(lambda: checkpoint.find_resume(config, path))
        self.resume_step, self.resume_path = (resume.step, resume.path) if resume else (None, None)
        for warning in resume.warnings if resume else ():
            self.console.warn(warning)
        if resume and self.is_main and resume.rows != self.train_set.mark:
            self.console.warn(
                f"the training rows are others than those of {resume.path.name} ({resume.rows} then, "
                f"{self.train_set.mark} now): from here on the order is that of the new ones, so that a row may come "
                "twice or not at all in this epoch"
            )
        self._on_main(lambda: self._open_folder(path))
        if not self.is_main:
            self._open_folder(path)
        try:
            self.trainer = self._build_trainer(processor)
        except BaseException:
            self.folder.abandon()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def train(self) -> None:
        """Starts the engine and trains to the last rollout step."""
        self._show_start()
        done = self.resume_step is not None and self.resume_step >= self.rollout_steps
        if done and not self.config.trainer.val_only:
            self.console.note(f"{self.folder.path} has all {self.rollout_steps} steps already; nothing to do.")
            return
        try:
            if not self.config.trainer.val_only:
                self._on_main(lambda: check_room(self.trainer))
                self._on_main(self._plan)
            if not self.config.trainer.val_only and not (self.config.algorithm.online_filtering and self.resume_step):
                self.trainer.prompts.prefetch(self.resume_step or 0)  # built while the engine starts
            with self.console.phase("engine"):
                self.trainer.engine.start()
            state = None if self.resume_path is None else str(self.resume_path / "state")
            self.trainer.train(resume_from_checkpoint=state)
            self.trainer.saver.close()
            if compared := self._on_main(lambda: add_measured(self.folder.path)):
                self.console.note(compared)
        except (ConfigError, DataError, RewardError):  # an engine's failure leaves its log, to be read
            self.folder.abandon()  # removes the folder only when no step was recorded
            raise

    def validations(self) -> tuple[dict[str, float], dict[str, float]]:
        """The val/ metrics of the run's first and last validation, read from metrics.jsonl; empty where there was
        none."""
        path = self.folder.metrics_path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found = [
            # val/reward_score is EasyR1's name for val/overall_reward: shown once
            {name: value for name, value in record.items() if name.startswith("val/") and name != "val/overall_reward"}
            for record in map(json.loads, lines)
            if "val/reward_score" in record
        ]
        return (found[0], found[-1]) if found else ({}, {})

    def show_end(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Held-out scores before and after, sample answers, where the files are."""
        self.console.finish(before, after, self._last_samples(), self.folder.path)

    def _last_samples(self) -> list[Sample]:
        """A few answers of the last step, of different rows; those to held-out rows where there are some."""
        count, path = self.config.trainer.val_generations_to_log, self.folder.samples_path
        if count < 1 or not path.exists():
            return []
        with path.open(encoding="utf-8") as lines:
            samples = [Sample(**json.loads(line)) for line in deque(lines, maxlen=LAST_LINES)]
        return spread([sample for sample in samples if sample.split == samples[-1].split], count)

    # ---- building

    def _on_main(self, call: Callable[[], T]) -> T:
        """What `call` returns on the main process, on every rank; a user's error in it is raised on every rank."""
        return on_main(call, is_main=self.is_main, world_size=self.world_size)

    def _open_folder(self, path: Path) -> None:
        self.folder = RunFolder.open(
            path,
            resume_step=self.resume_step,
            config_yaml=to_yaml(self.config, redact=True),
            write=self.is_main,
            restart=self.config.trainer.find_last_checkpoint,
        )
        self.stack.callback(self.folder.close)
        self.faults.write_to(self.folder.path)
        if self.is_main:
            (self.folder.path / SKIPPED_NAME).unlink(missing_ok=True)  # of a run that is resumed
        if self.skipped and self.is_main:
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in self.skipped)
            (self.folder.path / SKIPPED_NAME).write_text("".join(lines), encoding="utf-8")
        for name in self.folder.unfinished:
            self.console.warn(f"{name}: a checkpoint whose writing broke off was removed")
        for change in self.folder.config_changes:
            self.console.warn(f"changed since the run began: {change}")
        since = (
            "before its first checkpoint" if self.folder.resume_step == BEFORE_START else f"after {self.resume_step}"
        )
        for name, count in self.folder.superseded.items():
            self.console.note(f"{name}: {count} entries of a run that ended {since} were moved aside")

    def _rows(self, key: str, given: Sequence[Mapping[str, Any]] | None, named: str, processor: Any) -> PromptDataset:
        """The rows given as objects, else those of the configuration, checked; the main process checks for all."""
        rows = PromptDataset(named if given is None else given, self.config.data, processor)
        began = time.perf_counter()
        report = self._on_main(rows.validate)
        rows.select(report.kept)
        self.console.note(
            f"{key}: {len(report.kept)} of {report.rows} rows, longest prompt {report.longest} tokens"
            f" ({'lengths of an earlier run' if report.cached else 'checked'}, {time.perf_counter() - began:.1f} s)"
        )
        for schema in dict.fromkeys(rows.schemas.values()):
            self.console.note(f"{key}: {schema.description}")
        for note in report.notes:
            self.console.note(f"{key}: {note}")
        if rows.builder.animated:
            some = ", ".join(sorted(rows.builder.animated)[:LONGEST_NAMED])
            self.console.warn(
                f"{key}: {len(rows.builder.animated)} rows show a moving picture, of which the first frame is used"
                f" ({some}); give a video where the others matter"
            )
        if report.skipped:
            self.skipped += [{"file": key, "row": row_id, "reason": reason} for row_id, reason in report.skipped]
            self.console.warn(
                f"{key}: {len(report.skipped)} rows were left out (data.on_bad_media=skip); {SKIPPED_NAME} in the run"
                f" folder lists them, the first: {report.skipped[0][1]}"
            )
        if report.dropped_overlong:
            longest = sorted(report.dropped_overlong, key=lambda row: -row[1])[:LONGEST_NAMED]
            limit = self.config.data.max_prompt_length
            reason = f"tokens, more than data.max_prompt_length={limit}"
            self.skipped += [
                {"file": key, "row": row_id, "reason": f"{tokens} {reason}"}
                for row_id, tokens in report.dropped_overlong
            ]
            some = ", ".join(f"{row_id} ({tokens} tokens)" for row_id, tokens in longest)
            self.console.warn(
                f"{key}: {len(report.dropped_overlong)} prompts are longer than data.max_prompt_length={limit}"
                f" and were left out ({SKIPPED_NAME} in the run folder lists them); the longest: {some}"
            )
        return rows

    def _count_steps(self) -> int:
        """Rollout steps of the run: trainer.max_steps, or total_epochs of whole batches."""
        data, trainer = self.config.data, self.config.trainer
        per_epoch = steps_per_epoch(len(self.train_set), data.rollout_batch_size)
        return trainer.max_steps or trainer.total_epochs * per_epoch

    def _try_reward(self, tokenizer: Any) -> None:
        """Finds a broken function, and golds that it cannot grade, before anything heavy."""
        n, wanted = self.config.worker.rollout.n, wanted_scores(self.config)
        self.console.note(try_reward(self.reward, self.train_set, tokenizer, n, wanted))
        for warning in check_golds(self.reward, [rows for rows in (self.train_set, self.val_set) if rows is not None]):
            self.console.warn(warning)

    def _plan(self) -> None:
        """Keeps what the run is expected to need, and says what will not fit."""
        plan = forecast(self.config, self.trainer.prompts.some(), present())
        write_plan(self.folder.path, plan)
        for remark in plan.remarks:
            self.console.warn(f"plan.json: {remark}")

    def _build_trainer(self, processor: Any) -> GRPOVLMTrainer:
        config = self.config
        trackers = make_trackers(
            config.trainer.logger,
            self.folder,
            console=self.console,
            total_steps=self.rollout_steps,
            resume_step=self.folder.resume_step,
            val_samples=config.trainer.val_generations_to_log,
        )
        if trackers:
            trackers.append(ConstantReward(self.console))
        for tracker in trackers:
            self.stack.callback(tracker.close)
        with dividing_while_loading(config):
            model, reference = load_policy(config, self.resume_path), self._reference()
        trainer = GRPOVLMTrainer(
            config,
            model=model,
            processor=processor,
            train_set=self.train_set,
            val_set=self.val_set,
            reward=self.reward,
            folder=self.folder,
            trackers=trackers,
            console=self.console,
            rollout_steps=self.rollout_steps,
            world_size=self.world_size,
            reference=reference,
        )
        self.stack.callback(trainer.engine.close)
        self.stack.callback(trainer.pool.close)
        return trainer

    def _reference(self) -> PreTrainedModel | None:
        config = self.config
        if config.algorithm.disable_kl or config.worker.actor.model.lora.rank > 0:
            return None  # without its adapters the policy is the reference
        return load_reference(config, saved_reference(self.resume_path))

    def _show_start(self) -> None:
        """The batch arithmetic in words, and what is used."""
        config, rollout = self.config, self.config.worker.rollout
        prompts, held_out = config.data.rollout_batch_size, 0 if self.val_set is None else len(self.val_set)
        self.console.start(
            {
                "model": config.worker.actor.model.model_path,
                "rows": f"{len(self.train_set)} to train on, {held_out} held out",
                "step": f"{prompts} prompts x {rollout.n} answers = {prompts * rollout.n} samples,"
                f" {updates_per_step(config)} update(s)",
                "steps": f"{self.rollout_steps}" + (f", resumed after {self.resume_step}" if self.resume_step else ""),
                "rollouts": self.trainer.engine.name,
                "device": f"{self.trainer.args.device} x {self.world_size}",
                "sharding": described(config, launched(os.environ), self.world_size),
                "run folder": str(self.folder.path),
            }
        )
