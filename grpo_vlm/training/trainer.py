"""GRPOVLMTrainer: TRL's GRPOTrainer with rollouts from an engine, groups that stay whole, and our losses.

One inherited trainer step is one optimizer update; a rollout step is `updates_per_step` of them. What is inherited:
model wrapping (DDP, DeepSpeed, FSDP), the optimizer, gradient clipping, the update loop, callbacks. What is ours:
everything between the data and the loss (update.py), and what happens between two rollout steps. The flow of one
rollout step:

    rows -> sync weights -> generate -> reward -> advantages -> rows of packed groups -> old / reference log-probs ->
    updates -> record -> validate -> save
"""

import functools
import math
import operator
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, ProcessorMixin
from trl import GRPOTrainer

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.data.workers import PromptPool, worker_count
from grpo_vlm.model.packed import compile_layers, form
from grpo_vlm.report.console import Console
from grpo_vlm.report.groups import ShownGroup, is_shown
from grpo_vlm.report.record import StepRecord
from grpo_vlm.report.run_folder import RunFolder
from grpo_vlm.report.trackers import ConsoleTracker, Tracker
from grpo_vlm.rewards.loader import Reward
from grpo_vlm.rollout.engine import make_engine
from grpo_vlm.rollout.probe import SyncProbe
from grpo_vlm.rollout.types import banned_token_ids
from grpo_vlm.training import checkpoint
from grpo_vlm.training.arguments import learning_rate_factor, training_arguments
from grpo_vlm.training.batch import Padding, RolloutBatch, blank_image, split
from grpo_vlm.training.collect import Collector, sampling
from grpo_vlm.training.credit import Credit
from grpo_vlm.training.evaluate import to_samples, validate
from grpo_vlm.training.exchange import balance
from grpo_vlm.training.model_files import ModelSettings
from grpo_vlm.training.observe import (
    GIB,
    Meter,
    Placed,
    Scored,
    Stopwatch,
    free_bytes,
    in_order,
    load_metrics,
    optimizer_bytes,
    placed,
    reward_faults,
    rollout_metrics,
    speed_metrics,
    validation_metrics,
)
from grpo_vlm.training.optimizer import make_optimizer
from grpo_vlm.training.parking import Parking
from grpo_vlm.training.plan import RolloutPlan
from grpo_vlm.training.reference import prepare_reference, reference_of, refresh
from grpo_vlm.training.rounds import Rounds
from grpo_vlm.training.saver import Saver
from grpo_vlm.training.scoring import Scorer, make_scorer
from grpo_vlm.training.sharding import use_settings
from grpo_vlm.training.showcase import show
from grpo_vlm.training.stop import Stop, Stopped
from grpo_vlm.training.update import Learner, Update
from grpo_vlm.training.watchdog import CollectiveWatchdog

UNSHARDED = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)


class GRPOVLMTrainer(GRPOTrainer):
    """Trains a vision-language model with GRPO.

    Args:
        config: a checked configuration.
        model, processor: the policy and its processor; `reference` is the frozen model of the KL term, None when
        `algorithm.disable_kl`.
        train_set, val_set: prompts; `val_set` may be None.
        reward: the loaded reward function.
        folder: the opened run folder. `trackers` take each StepRecord on the main process; `console` shows the phase
        in progress.
        rollout_steps: steps of the whole run.
    """

    def __init__(
        self,
        config: Config,
        *,
        model: PreTrainedModel,
        processor: ProcessorMixin,
        train_set: PromptDataset,
        val_set: PromptDataset | None,
        reward: Reward,
        folder: RunFolder,
        trackers: list[Tracker],
        console: Console,
        rollout_steps: int,
        world_size: int,
        reference: PreTrainedModel | None = None,
    ):
        self.config, self.rollout_steps, self.folder = config, rollout_steps, folder
        self.trackers, self.console = trackers, console
        self.updates_per_step = updates_per_step(config)
        self.model_settings = ModelSettings(model)
        super().__init__(
            model=model,
            processing_class=processor,
            args=training_arguments(config, folder.path, rollout_steps, world_size),
            train_dataset=Dataset.from_dict({"prompt": [""] * (rollout_steps * self.updates_per_step)}),
            reward_funcs=[reward],
        )
        self.remove_callback(PrinterCallback)
        self.pool = PromptPool(worker_count(config.data.num_workers, int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        self.prompts = RolloutPlan(
            train_set,
            config,
            rollout_steps,
            rank=self.args.process_index,
            world_size=self.args.world_size,
            pool=self.pool,
        )
        self.val_set = val_set
        padding = Padding(
            pad_id=processor.tokenizer.pad_token_id,
            image_id=model.config.image_token_id,
            device=self.args.device,
            blank_image=blank_image(model.config) if self.args.world_size > 1 else None,
        )
        self.unsharded = self.accelerator.distributed_type in UNSHARDED
        banned_ids = banned_token_ids(processor, model.config)
        scorer = make_scorer(config, model, banned_ids=banned_ids, padding=padding, sharded=not self.unsharded)
        self._tune(scorer)
        self.engine = make_engine(
            config,
            processor=processor,
            model=self.model,
            accelerator=self.accelerator,
            run_dir=folder.path,
            warn=console.warn,
            on_wait=lambda seconds: console.progress(f"the vLLM server starts, {seconds:.0f} s"),
        )
        self.probe = SyncProbe(config, self.engine, self.accelerator)
        self.collector = Collector(config, self.engine, reward, processor.tokenizer, self.accelerator)
        if reference is not None:
            self.ref_model = prepare_reference(self, reference)
        self.resumed, self.reference_moved = False, False
        self.saver, self.stop = Saver(config, folder, console), Stop(self.accelerator)
        self.between: checkpoint.Between | None = None  # before the step in progress
        self.clock, self.meter = Stopwatch(), Meter()
        self.parking = Parking(config, self.args.device, deepspeed=self.is_deepspeed_enabled)
        limit_s = config.trainer.collective_timeout_s
        self.watchdog = CollectiveWatchdog(self.args.process_index, self.args.world_size, limit_s)
        reference_model = functools.partial(reference_of, self)
        self.learner = Learner(config, scorer, self.accelerator, self.meter, reference_model, self.watchdog.row)
        self.credit = Credit(config, self.accelerator, self.meter)
        self.rounds = Rounds(config, self.collector, self.prompts, self.accelerator, self._phase)
        self._updates: list[Update] = []
        self._collected: list[Scored] = []  # the samples of the rollout step in progress, of all ranks
        self._shown: list[ShownGroup] = []  # a few groups of the step in progress
        self._step_metrics: dict[str, float] = {}
        self._synced_step: int | None = None
        self._step_began = time.perf_counter()
        self._memory_warned = False

    def _tune(self, scorer: Scorer) -> None:
        """Says where the packed form is not used, and compiles the layers where that is possible."""
        kind, reason = form(self.model.config)
        actor = self.config.worker.actor
        if kind == "plain" and actor.padding_free:
            self.console.note(f"worker.actor.padding_free: {reason}")
        if self.args.device.type == "cpu" and (actor.offload.offload_params or actor.offload.offload_optimizer):
            self.console.note("worker.actor.offload has no effect on a CPU: everything is in host memory already")
        if actor.use_torch_compile and scorer.compiles and self.unsharded and self.args.device.type == "cuda":
            compile_layers(self.model)

    # ---- what the inherited loop calls

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """With what `worker.actor.fsdp` selects."""
        return use_settings(super()._build_accelerator_args(**kwargs), self.config)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Runs to the last rollout step. `resume_from_checkpoint` is the `state` folder of a checkpoint whose model
        was passed to the constructor."""
        self.resumed = bool(resume_from_checkpoint)
        if self.resumed:
            checkpoint.load_loop(self, Path(resume_from_checkpoint))
        with self.stop, self.watchdog:
            try:
                return super().train(resume_from_checkpoint, **kwargs)
            except Stopped as stopped:
                checkpoint.save_stopped(self, stopped.reason)
            finally:
                self.saver.settle()

    def get_train_dataloader(self) -> DataLoader:
        """One item per optimizer update: the prompts of a rollout step at its first update, nothing at the others.
        Each rank has its own rows, so nothing is sharded here."""
        return DataLoader(self.prompts, batch_size=1, shuffle=False, collate_fn=operator.itemgetter(0))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """See `worker.actor.optim.strategy`."""
        if self.optimizer is None:
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = make_optimizer(self.config, trained)
        return super().create_optimizer(*args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        """A rate that is constant within a rollout step."""
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda update: learning_rate_factor(self.config, update // self.updates_per_step, self.rollout_steps),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """All of them: EasyR1 and verl decay norms and biases too, transformers does not."""
        return [name for name, _ in model.named_parameters()]

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None):
        """Wraps the model; the optimizer's state comes from our own files under every scheme."""
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        if resume_from_checkpoint is not None:
            checkpoint.load_optimizer(self, Path(resume_from_checkpoint))
        return prepared

    def _load_rng_state(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is not None:
            checkpoint.load_rng(self, Path(checkpoint_folder))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clips; a gradient that is not finite is dropped, so that this update leaves the weights as they are."""
        norm = super()._clip_grad_norm(model)
        finite = norm is None or math.isfinite(float(norm))  # DeepSpeed has stepped by now and tells no norm here
        if not finite:
            self.console.warn(
                f"update {self.state.global_step + 1}: the gradient is not finite, the update is skipped"
            )
            model.zero_grad()
        self.meter.add("actor/skipped_updates", torch.tensor(float(not finite)))
        return norm

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Nothing: the constructor was given the checkpoint's weights."""

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """The whole run is one epoch of updates; validation before training stands in front of it."""
        trainer = self.config.trainer
        self._step_began = time.perf_counter()
        if trainer.val_only:
            if self.resumed:  # this step is on file: what a second validation of it says is only shown
                self.trackers = [tracker for tracker in self.trackers if isinstance(tracker, ConsoleTracker)]
            self._emit(self.rollout_step, [], validating=True)
            self.control.should_training_stop = True
            return
        if self.val_set is not None and trainer.val_before_train and not self.resumed:
            self._emit(0, [], validating=True)
        super()._run_epoch(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: list[Prompt], num_items_in_batch: Any = None) -> Tensor:
        """One optimizer update's gradients. Collects new rollouts first when the last ones are used up."""
        update = self.state.global_step % self.updates_per_step
        if update == 0:
            self.between = checkpoint.Between.now(self)
            with self.stop.at_once():
                self._collect(inputs)
            self.stop.check()
        chosen = self._updates[update % len(self._updates)]
        if self.learner.selects:
            with self._phase("old"):
                chosen = self.learner.selected(model, chosen, self.state.global_step)
        with self._phase("update_actor"):
            return self.learner.accumulate(model, chosen, unmoved=update == 0)

    def _maybe_log_save_evaluate(
        self, tr_loss: Tensor, grad_norm: Any, *args: Any, learning_rate: float | None = None
    ):
        """Called after each optimizer update, and once more at the end: closes the rollout step after the last of
        its updates. A checkpoint is written after the step's line, so its seconds stand in the next one."""
        if not self._collected:
            return
        self.meter.add("actor/grad_norm", torch.as_tensor(float(grad_norm)))
        self.meter.add("actor/lr", torch.as_tensor(learning_rate))
        if self.state.global_step % self.updates_per_step:
            return
        collected, self._collected = self._collected, []
        step, trainer = self.rollout_step, self.config.trainer
        last = step == self.rollout_steps
        due = not last and trainer.val_freq > 0 and step % trainer.val_freq == 0 and not self.stop.asked()
        validating = self.val_set is not None and (last or due)
        record = self._emit(step, collected, validating=validating)
        every = self.config.algorithm.ref_model_sync_steps
        if every is not None and self.ref_model is not None and step % every == 0:
            with self._phase("ref"):
                refresh(self)
            self.reference_moved = True
        if last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
            with self._phase("save_checkpoint"):
                checkpoint.save(self, step, score=record.metrics.get("val/reward_score"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Hands numbers to the callbacks; the record of a step has been written by then."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    # ---- one rollout step

    @property
    def rollout_step(self) -> int:
        """Rollout steps finished so far."""
        return self.state.global_step // self.updates_per_step

    def _sync(self) -> None:
        """Gives the engine the current weights, unless it has them."""
        if self._synced_step != self.rollout_step:
            with self._phase("sync"):
                self._step_metrics |= self.engine.sync(self.model, self.rollout_step)
            self._synced_step = self.rollout_step

    def _collect(self, prompts: list[Prompt]) -> None:
        """Fills `_updates` with new rollouts and `_collected` with their samples."""
        step, config = self.rollout_step + 1, self.config
        self.parking.park_states(self.model_wrapped, self.optimizer)
        self._sync()
        if self.probe.due(step):
            with self._phase("sync_check"):
                prompt = max(prompts or self.prompts.some(), key=lambda prompt: bool(prompt.images or prompt.videos))
                score = functools.partial(self.learner.score_one, self.model_wrapped)
                self._step_metrics |= self.probe.check(prompt, score, step)
        self.parking.park_weights(self.model_wrapped)
        groups = self.credit.flag(self.rounds.collect(prompts, step))
        self.stop.check()
        self.engine.release()
        self.parking.fetch(self.model_wrapped, self.optimizer)
        self._step_metrics |= self.rounds.metrics
        with self._phase("adv"):
            if not self.credit.in_reward:
                groups = self.credit.assign(groups)
            size = config.worker.actor.global_batch_size
            of_updates = split(groups, size, config.data.rollout_batch_size // size)
            if self.args.world_size > 1:
                seconds = [[self.learner.seconds(group) for group in part] for part in of_updates]
                of_updates = balance(of_updates, seconds, self.accelerator)
            self.learner.scorer.forget()
            updates = [self.learner.prepare(part) for part in of_updates]
        self._warn_of_memory(updates)
        self._updates = self._with_log_probs(updates)
        self._collected = self._gather(
            [row for update in self._updates for row in self._samples(update.batch, step)], step
        )

    def _warn_of_memory(self, updates: list[Update]) -> None:
        """Says, before the first row runs, that the largest will hardly fit."""
        sizes = [update.work.largest_bytes for update in updates if update.work.largest_bytes is not None]
        if self.args.device.type == "cpu" or not sizes or self._memory_warned:
            return
        free = free_bytes(self.args.device) - (0 if self.state.global_step else optimizer_bytes(self.model))
        if max(sizes) > free:
            self._memory_warned = True
            self.console.warn(
                f"the largest row needs about {max(sizes) / GIB:.1f} GiB and {max(free, 0) / GIB:.1f} GiB are free;"
                " if memory runs out, lower worker.actor.max_token_len_per_gpu or set"
                " worker.actor.model.enable_gradient_checkpointing=true"
            )

    def _with_log_probs(self, updates: list[Update]) -> list[Update]:
        """Adds the old log-probs where they are asked for, the reference's where KL is on, and what depends on
        them: advantages, importance weights."""
        learner, credit, needed = self.learner, self.credit, {}
        if self.updates_per_step > 1 or credit.in_reward or learner.corrects or learner.selects:
            with self._phase("old"):
                needed["old_log_probs"] = [learner.log_probs(self.model_wrapped, update) for update in updates]
        if not self.config.algorithm.disable_kl and not learner.full:
            with self._phase("ref"), reference_of(self) as reference:
                needed["ref_log_probs"] = [learner.log_probs(reference, update) for update in updates]
        for name, values in needed.items():
            updates = [update.having(**{name: value}) for update, value in zip(updates, values, strict=True)]
        if "old_log_probs" in needed:
            for update in updates:
                learner.compare_with_sampler(update)
        if credit.in_reward:
            with self._phase("adv"):
                updates = self._with_advantages(updates)
        return [learner.corrected(update) for update in updates] if learner.corrects else updates

    def _with_advantages(self, updates: list[Update]) -> list[Update]:
        """Advantages of rewards less the KL penalty, for the whole rollout batch at once."""
        groups = [group for update in updates for group in update.batch.groups]
        penalties = [part for update in updates for part in self.learner.penalties(self.model_wrapped, update)]
        assigned = iter(self.credit.assign(groups, penalties))
        return [update.of([next(assigned) for _ in update.batch.groups]) for update in updates]

    # ---- helpers

    @contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Times a phase of the step and shows it while it lasts; yields a function that shows (done, total)."""
        with self.clock(name), self.console.phase(name) as show, self.watchdog.phase(name):
            yield show

    def _emit(self, step: int, collected: list[Scored], *, validating: bool) -> StepRecord:
        """Makes the record of a step out of its samples, its updates and the validation, and hands it to the
        trackers."""
        metrics = rollout_metrics(collected, self.config) if collected else {}
        validated: list[Scored] = []
        if validating:
            self._sync()
            with self._phase("validation"):
                validated = self._validate(step)
            metrics |= validation_metrics(validated, self.config)
        metrics |= self.meter.totals(self.accelerator) | self._step_metrics | self.engine.metrics()
        rewarding = self.collector.reward.metrics()
        metrics |= reward_faults(gather_object([rewarding]) if self.args.world_size > 1 else [rewarding])
        self._step_metrics = {}
        seconds, now = self.clock.take(), time.perf_counter()
        seconds["step"], self._step_began = now - self._step_began, now
        if collected:
            metrics |= speed_metrics(collected, seconds, self.args.world_size)
        shown, self._shown = self._shown, []
        record = StepRecord(step, metrics, [row.sample for row in collected + validated], seconds, shown)
        for tracker in self.trackers:
            tracker.log(record)
        self.log(record.scalars())
        return record

    def _validate(self, step: int) -> list[Scored]:
        """Scored answers to the held-out rows, of all ranks."""
        groups = validate(
            self.collector,
            functools.partial(self.pool.prompts, self.val_set),
            sampling(self.config, validation=True),
            count=len(self.val_set),
            batch_size=self.config.data.val_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        samples = to_samples(self.collector, groups, step=step, split="val")
        mine = placed(samples, groups, [sample.scores.get("overall", 0.0) for sample in samples])
        ranks = gather_object([mine]) if self.args.world_size > 1 else [mine]
        self._shown += show(ranks, groups)
        return in_order(ranks)

    def _samples(self, batch: RolloutBatch, step: int) -> list[Placed]:
        """The samples of one update on this rank."""
        per_sample = (batch.advantages.sum(-1) / batch.tokens.sum(-1).clamp(min=1)).tolist()
        samples = to_samples(self.collector, batch.groups, step=step, split="train", advantages=per_sample)
        return placed(samples, batch.groups, batch.rewards.tolist())

    def _gather(self, mine: list[Placed], step: int) -> list[Scored]:
        """The samples of all ranks, in the order of their prompts. Notes how even the load is."""
        ranks = gather_object([mine]) if self.args.world_size > 1 else [mine]
        self._step_metrics |= load_metrics(ranks)
        if is_shown(step, self.rollout_steps):
            self._shown += show(ranks, [group for update in self._updates for group in update.batch.groups])
        return in_order(ranks)
