"""GRPOVLMTrainer: TRL's GRPOTrainer with rollouts from an engine, groups that stay on one rank, and our losses.

One inherited trainer step is one optimizer update; a rollout step is `updates_per_step` of them. What is inherited:
model wrapping (DDP, DeepSpeed, FSDP), the optimizer, gradient
clipping, the update loop, callbacks. What is ours: everything between the data and the loss, and what happens
between two rollout steps. The flow of one rollout step:

    rows -> sync weights -> generate -> reward -> old / reference log-probs -> advantages -> updates -> record ->
    validate -> save

Shape legend: B samples of this rank, T completion tokens.
"""

import dataclasses
import math
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, ProcessorMixin
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp

from grpo_vlm.algorithms import advantages, kl, losses
from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.model.logprobs import PaddedBatch, score_completions
from grpo_vlm.report.console import Console
from grpo_vlm.report.record import Sample, StepRecord
from grpo_vlm.report.run_folder import RunFolder
from grpo_vlm.report.trackers import ConsoleTracker, Tracker
from grpo_vlm.rewards.loader import Reward
from grpo_vlm.rollout.engine import make_engine
from grpo_vlm.rollout.types import banned_token_ids
from grpo_vlm.training import checkpoint
from grpo_vlm.training.arguments import learning_rate_factor, training_arguments
from grpo_vlm.training.batch import Group, Padding, RolloutBatch, blank_image, micro_batches
from grpo_vlm.training.collect import Collector, sampling
from grpo_vlm.training.evaluate import to_samples, validate
from grpo_vlm.training.observe import (
    Meter,
    Scored,
    Stopwatch,
    load_metrics,
    rollout_metrics,
    speed_metrics,
    validation_metrics,
)
from grpo_vlm.training.plan import RolloutPlan


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
        super().__init__(
            model=model,
            processing_class=processor,
            args=training_arguments(config, folder.path, rollout_steps, world_size),
            train_dataset=Dataset.from_dict({"prompt": [""] * (rollout_steps * self.updates_per_step)}),
            reward_funcs=[reward],
        )
        self.remove_callback(PrinterCallback)
        self.prompts = RolloutPlan(
            train_set, config, rollout_steps, rank=self.args.process_index, world_size=self.args.world_size
        )
        self.val_set = val_set
        self.padding = Padding(
            pad_id=processor.tokenizer.pad_token_id,
            image_id=model.config.image_token_id,
            device=self.args.device,
            blank_image=blank_image(model.config) if self.args.world_size > 1 else None,
        )
        self.banned_ids = banned_token_ids(processor, model.config)
        self.engine = make_engine(
            config, processor=processor, model=self.model, accelerator=self.accelerator, run_dir=folder.path
        )
        self.collector = Collector(config, self.engine, reward, processor.tokenizer, self.accelerator)
        if reference is not None:
            self.ref_model = self._prepare_reference(reference)
        self.resumed = False
        self.clock, self.meter = Stopwatch(), Meter()
        self._minibatches: list[RolloutBatch] = []
        self._collected: list[Scored] = []  # the samples of the rollout step in progress, of all ranks
        self._sync_metrics: dict[str, float] = {}
        self._synced_step: int | None = None
        self._step_began = time.perf_counter()

    # ---- what the inherited loop calls

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any):
        """Runs to the last rollout step. `resume_from_checkpoint` is the `state` folder of a checkpoint whose model
        was passed to the constructor."""
        self.resumed = bool(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, **kwargs)

    def get_train_dataloader(self) -> DataLoader:
        """One item per optimizer update: the prompts of a rollout step at its first update, nothing at the others.
        Each rank has its own rows, so nothing is sharded here."""
        return DataLoader(self.prompts, batch_size=1, shuffle=False, collate_fn=operator.itemgetter(0))

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

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restores the states; the settings are the configuration's, which may have changed since."""
        super()._load_optimizer_and_scheduler(checkpoint)
        optim = self.config.worker.actor.optim
        self.lr_scheduler.base_lrs = [optim.lr] * len(self.lr_scheduler.base_lrs)
        rate = optim.lr * learning_rate_factor(self.config, self.rollout_step, self.rollout_steps)
        self.lr_scheduler._last_lr = [rate] * len(self.lr_scheduler.base_lrs)
        for group in self.optimizer.param_groups:
            group |= {"lr": rate, "initial_lr": optim.lr, "betas": tuple(optim.betas)}
            group["weight_decay"] = optim.weight_decay

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
            self._collect(inputs)
        with self._phase("update_actor"):
            return self._accumulate(model, self._minibatches[update % len(self._minibatches)])

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
        validating = self.val_set is not None and (last or (trainer.val_freq > 0 and step % trainer.val_freq == 0))
        record = self._emit(step, collected, validating=validating)
        if last or (trainer.save_freq > 0 and step % trainer.save_freq == 0):
            with self._phase("save_checkpoint"):
                checkpoint.save(self, self.folder, step, score=record.metrics.get("val/reward_score"))

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
                self._sync_metrics |= self.engine.sync(self.model, self.rollout_step)
            self._synced_step = self.rollout_step

    def _collect(self, prompts: list[Prompt]) -> None:
        """Fills `_minibatches` with new rollouts and `_collected` with their samples."""
        step, config = self.rollout_step + 1, self.config
        self._sync()
        with self._phase("gen") as show:
            completions = self.collector.generate(
                prompts, sampling(config), step=step, purpose="train", on_progress=lambda n: show(n, len(prompts))
            )
        self.engine.release()
        with self._phase("reward"):
            groups = self.collector.score(prompts, completions)
        rollouts = self._with_log_probs(self._to_device(RolloutBatch.of(groups)))
        with self._phase("adv"):
            rollouts = self._with_advantages(rollouts)
        parts = config.data.rollout_batch_size // config.worker.actor.global_batch_size
        self._minibatches = rollouts.minibatches(parts)
        per_sample = (rollouts.advantages.sum(-1) / rollouts.mask.sum(-1)).tolist()
        samples = to_samples(self.collector, groups, step=step, split="train", advantages=per_sample)
        self._collected = self._gather(samples, groups, rollouts.rewards.tolist())

    def _with_log_probs(self, rollouts: RolloutBatch) -> RolloutBatch:
        """Adds the old log-probs where the policy will have moved before they are used, and the reference's where KL
        is on."""
        algorithm = self.config.algorithm
        kl_in_reward = not algorithm.disable_kl and not algorithm.use_kl_loss
        old = reference = None
        if self.updates_per_step > 1 or kl_in_reward:
            with self._phase("old"):
                old = self._score_all(self.model_wrapped, rollouts)
            self._compare_with_sampler(old, rollouts.sampler_log_probs, rollouts.mask)
        if self.ref_model is not None:
            with self._phase("ref"):
                reference = self._score_all(self.ref_model, rollouts)
        return dataclasses.replace(rollouts, old_log_probs=old, ref_log_probs=reference)

    def _with_advantages(self, rollouts: RolloutBatch) -> RolloutBatch:
        """The score at each sample's last token, less the KL penalty per token where KL is in the reward."""
        algorithm, mask = self.config.algorithm, rollouts.mask
        scores = torch.tensor(
            [score["overall"] for group in rollouts.groups for score in group.scores], device=mask.device
        )
        rewards = torch.zeros_like(mask)
        rewards[torch.arange(len(scores)), mask.sum(-1).long() - 1] = scores
        if rollouts.ref_log_probs is not None and not algorithm.use_kl_loss:
            penalty = kl.estimate(algorithm.kl_penalty, rollouts.old_log_probs, rollouts.ref_log_probs) * mask
            self.meter.mean("actor/kl_penalty", penalty.sum(), mask.sum())
            self.meter.add("actor/kl_coef", torch.tensor(algorithm.kl_coef))
            rewards = rewards - algorithm.kl_coef * penalty
        estimated = advantages.estimate(algorithm.adv_estimator, rewards, mask, rollouts.group_ids)
        return dataclasses.replace(rollouts, rewards=rewards.sum(-1), advantages=estimated)

    # ---- one update

    def _accumulate(self, model: nn.Module, minibatch: RolloutBatch) -> Tensor:
        """Backward through all micro-batches of one update; gradients are reduced over the ranks at the last."""
        model.train()
        size = self.config.worker.actor.micro_batch_size_per_device_for_update
        counts = self.accelerator.reduce(
            torch.stack([minibatch.mask.sum(), torch.ones_like(minibatch.mask[:, 0]).sum()])
        )
        whole = losses.Denominators(*counts.tolist())
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        total = torch.zeros((), device=self.args.device)
        for rows, batch in self._micro_batches(minibatch, size):
            last = rows.stop == len(minibatch.mask)
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last or deepspeed else self.accelerator.no_sync(model):
                loss = self._loss(model, minibatch, rows, batch, whole)
                # the ranks' gradients are averaged, but each loss is already a share of the global mean
                self.accelerator.backward(
                    loss * self.args.world_size, **({"scale_wrt_gas": False} if deepspeed else {})
                )
            total += loss.detach()
        self.meter.close_update()
        return total

    def _loss(
        self, model: nn.Module, minibatch: RolloutBatch, rows: slice, batch: PaddedBatch, whole: losses.Denominators
    ) -> Tensor:
        """This micro-batch's share of the update's loss."""
        actor, algorithm = self.config.worker.actor, self.config.algorithm
        t = batch.mask.shape[1]
        scores = self._score(model, batch)
        old = scores.log_probs.detach() if minibatch.old_log_probs is None else minibatch.old_log_probs[rows, :t]
        if minibatch.old_log_probs is None:
            self._compare_with_sampler(old, minibatch.sampler_log_probs[rows, :t], batch.mask)
        loss, metrics = losses.policy_loss(
            actor.loss_type,
            old,
            scores.log_probs,
            minibatch.advantages[rows, :t],
            batch.mask,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_dual=actor.clip_ratio_dual,
            loss_avg_mode=actor.loss_avg_mode,
            whole=whole,
        )
        metrics |= {"pg_loss": loss.detach(), "entropy": losses.average(scores.entropy, batch.mask, "token", whole)}
        if minibatch.ref_log_probs is not None and algorithm.use_kl_loss:
            per_token = kl.estimate(algorithm.kl_penalty, scores.log_probs, minibatch.ref_log_probs[rows, :t])
            divergence = losses.average(per_token, batch.mask, actor.loss_avg_mode, whole)
            loss = loss + algorithm.kl_coef * divergence
            metrics["kl_loss"] = divergence.detach()
            self.meter.add("actor/kl_coef", torch.tensor(algorithm.kl_coef))
        self.meter.share({f"actor/{name}": value for name, value in metrics.items()})
        return loss

    # ---- helpers

    @contextmanager
    def _phase(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """Times a phase of the step and shows it while it lasts; yields a function that shows (done, total)."""
        with self.clock(name), self.console.phase(name) as show:
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
        metrics |= self.meter.totals(self.accelerator) | self._sync_metrics
        self._sync_metrics = {}
        seconds, now = self.clock.take(), time.perf_counter()
        seconds["step"], self._step_began = now - self._step_began, now
        if collected:
            metrics |= speed_metrics(collected, seconds, self.args.world_size) | load_metrics(
                collected, self.args.world_size
            )
        record = StepRecord(step, metrics, [row.sample for row in collected + validated], seconds)
        for tracker in self.trackers:
            tracker.log(record)
        self.log(record.scalars())
        return record

    def _validate(self, step: int) -> list[Scored]:
        """Scored answers to the held-out rows, of all ranks."""
        groups = validate(
            self.collector,
            self.val_set,
            sampling(self.config, validation=True),
            batch_size=self.config.data.val_batch_size,
            rank=self.args.process_index,
            world_size=self.args.world_size,
        )
        samples = to_samples(self.collector, groups, step=step, split="val")
        return self._gather(samples, groups, [sample.scores["overall"] for sample in samples])

    def _score(self, model: nn.Module, batch: PaddedBatch):
        return score_completions(
            model, batch, temperature=self.config.worker.rollout.temperature, banned_ids=self.banned_ids
        )

    @torch.no_grad()
    def _score_all(self, model: nn.Module, rollouts: RolloutBatch) -> Tensor:
        """Log-probs [B, T] of all completions, without gradient."""
        log_probs = torch.zeros_like(rollouts.mask)
        size = self.config.worker.actor.micro_batch_size_per_device_for_experience
        for rows, batch in self._micro_batches(rollouts, size):
            log_probs[rows, : batch.mask.shape[1]] = self._score(model, batch).log_probs
        return log_probs

    def _micro_batches(self, rollouts: RolloutBatch, size: int) -> Iterator[tuple[slice, PaddedBatch]]:
        return micro_batches(rollouts, size, self.padding)

    def _compare_with_sampler(self, ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
        """Counts |log p of the trainer - log p of the sampler| over the completion tokens."""
        difference = (ours - theirs).abs() * mask
        self.meter.mean("rollout/logprob_diff/mean", difference.sum(), mask.sum())
        self.meter.maximum("rollout/logprob_diff/max", difference.max())

    def _to_device(self, rollouts: RolloutBatch) -> RolloutBatch:
        move = {
            name: value.to(self.args.device) for name, value in vars(rollouts).items() if isinstance(value, Tensor)
        }
        return dataclasses.replace(rollouts, **move)

    def _gather(self, samples: list[Sample], groups: list[Group], rewards: list[float]) -> list[Scored]:
        """The samples of all ranks, in the order of the ranks."""
        lengths = [len(group.prompt.token_ids) for group in groups for _ in group.completions]
        scored = [Scored(*row) for row in zip(samples, lengths, rewards, strict=True)]
        return gather_object(scored) if self.args.world_size > 1 else scored

    def _prepare_reference(self, reference: PreTrainedModel) -> nn.Module:
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(reference, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(reference, self.accelerator)
        return self.accelerator.prepare_model(reference, evaluation_mode=True)
