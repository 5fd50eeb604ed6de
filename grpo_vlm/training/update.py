"""One optimizer update: its samples, the rows they are scored in, its loss and gradients.

`Learner.prepare` turns scored groups into an update, `Learner.accumulate` runs forward and backward through its rows.
All denominators are those of the whole update, over all rows and ranks, so that neither changes the loss. Between the
first row and the last nothing waits for the device.

Shape legend: B samples of the update on this rank, T longest completion, b and t those of one row.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from grpo_vlm.algorithms import advantages, kl, losses
from grpo_vlm.algorithms.losses import Denominators
from grpo_vlm.config import Config
from grpo_vlm.data.rows import Prompt
from grpo_vlm.rollout.types import Completion
from grpo_vlm.training.batch import Group, RolloutBatch
from grpo_vlm.training.observe import Meter
from grpo_vlm.training.scoring import Scorer, Scores, Work


@dataclass(frozen=True)
class Update:
    """What one optimizer update of this rank is made of.

    rows: what the scorer made, equally many on every rank. whole: the update's sizes over all ranks; scored: those of
    the groups that are in `rows`, which the watched means are taken over.
    """

    batch: RolloutBatch
    rows: tuple[Any, ...]
    whole: Denominators
    scored: Denominators
    work: Work

    def having(self, **tensors: Tensor) -> "Update":
        """The same update with these tensors in its batch."""
        return dataclasses.replace(self, batch=dataclasses.replace(self.batch, **tensors))


class Learner:
    """Log-probs, advantages and gradients; knows nothing of rollouts, steps or files."""

    def __init__(self, config: Config, scorer: Scorer, accelerator: Accelerator, meter: Meter):
        self.config, self.scorer, self.accelerator, self.meter = config, scorer, accelerator, meter
        algorithm = config.algorithm
        self.kl_in_loss = not algorithm.disable_kl and algorithm.use_kl_loss
        self.kl_in_reward = not algorithm.disable_kl and not algorithm.use_kl_loss
        # without a KL term a group of equal rewards adds exactly nothing to the gradient
        self.skips = algorithm.disable_kl

    # ---- from groups to updates

    def seconds(self, group: Group) -> float:
        """Predicted time of a group's forward and backward pass; zero where `prepare` leaves it out."""
        if self.skips and not self.with_advantages(RolloutBatch.of([group])).advantages.any():
            return 0.0
        return self.scorer.seconds(group)

    def prepare(self, groups: Sequence[Group]) -> Update:
        """The samples of one update on the device, with advantages unless those need log-probs first, and the rows
        of the groups that have a gradient."""
        batch = RolloutBatch.of(groups)
        if not self.kl_in_reward:
            batch = self.with_advantages(batch)
        kept = self._with_gradient(batch)
        rows = self.scorer.rows(batch, kept)
        lengths = [[len(completion.token_ids) for completion in group.completions] for group in groups]
        sizes = self._gather(
            [
                len(rows),
                len(groups) - len(kept),
                *_sizes(lengths),
                *_sizes([lengths[number] for number in kept]),
            ]
        )
        self.meter.add("actor/skipped_groups", torch.tensor(float(sum(size[1] for size in sizes))))
        rows += [self.scorer.blank() for _ in range(max(size[0] for size in sizes) - len(rows))]
        work = self.scorer.work(rows)
        self.meter.mean("perf/padding_waste", torch.tensor(work.processed - work.tokens), torch.tensor(work.processed))
        totals = [float(sum(column)) for column in zip(*sizes, strict=True)]
        on_device = batch.to(self.accelerator.device)
        return Update(on_device, tuple(rows), Denominators(*totals[2:4]), Denominators(*totals[4:6]), work)

    def _with_gradient(self, batch: RolloutBatch) -> list[int]:
        """Numbers of the groups to run. One is kept where none has a gradient, since the optimizer moves by its
        momentum too."""
        everything = list(range(len(batch.groups)))
        if not self.skips:
            return everything
        moved = batch.advantages.ne(0).any(-1).tolist()
        with_gradient = {group for group, moves in zip(batch.group_ids, moved, strict=True) if moves}
        return sorted(with_gradient) or everything[:1]

    def _gather(self, sizes: list[int]) -> list[list[int]]:
        """The given numbers of every rank."""
        return gather_object([sizes]) if self.accelerator.num_processes > 1 else [sizes]

    def with_advantages(self, batch: RolloutBatch) -> RolloutBatch:
        """The score at each sample's last token, less the KL penalty per token where KL is in the reward."""
        algorithm, mask = self.config.algorithm, batch.mask
        scores = torch.tensor([score["overall"] for group in batch.groups for score in group.scores]).to(mask.device)
        rewards = torch.zeros_like(mask)
        rewards[torch.arange(len(scores), device=mask.device), mask.sum(-1).long() - 1] = scores
        if self.kl_in_reward:
            penalty = kl.estimate(algorithm.kl_penalty, batch.old_log_probs, batch.ref_log_probs) * mask
            self.meter.mean("actor/kl_penalty", penalty.sum(), mask.sum())
            self.meter.add("actor/kl_coef", torch.tensor(algorithm.kl_coef))
            rewards = rewards - algorithm.kl_coef * penalty
        estimated = advantages.estimate(algorithm.adv_estimator, rewards, mask, batch.group_ids)
        return dataclasses.replace(batch, rewards=rewards.sum(-1), advantages=estimated)

    # ---- log-probs

    @torch.no_grad()
    def log_probs(self, model: nn.Module, update: Update) -> Tensor:
        """[B, T] under `model`, without gradient; zero for groups without one."""
        result = torch.zeros_like(update.batch.mask)
        for row in update.rows:
            scores = self.scorer.score(model, row)
            result[scores.samples, : scores.mask.shape[1]] = scores.log_probs
        return result

    def compare_with_sampler(self, update: Update) -> None:
        """Counts the difference of the old log-probs from the sampler's, over the groups that were scored."""
        batch = update.batch
        mask = batch.mask * batch.old_log_probs.ne(0).any(-1, keepdim=True)
        self._count_difference(batch.old_log_probs, batch.sampler_log_probs, mask)

    def _count_difference(self, ours: Tensor, theirs: Tensor, mask: Tensor) -> None:
        """|log p of the trainer - log p of the sampler| over the tokens of `mask`."""
        difference = (ours - theirs).abs() * mask
        self.meter.mean("rollout/logprob_diff/mean", difference.sum(), mask.sum())
        self.meter.maximum("rollout/logprob_diff/max", difference.max() if difference.numel() else difference.sum())

    @torch.no_grad()
    def score_one(self, model: nn.Module, prompt: Prompt, completion: Completion) -> list[float]:
        """Log-probs of one completion, a collective where weights are sharded."""
        batch = RolloutBatch.of([Group(prompt, (completion,), ({},))])
        (row,) = self.scorer.rows(batch, [0])
        return self.scorer.score(model, row).log_probs[0].tolist()

    # ---- gradients

    def accumulate(self, model: nn.Module, update: Update) -> Tensor:
        """Backward through all rows; gradients are reduced over the ranks at the last. Returns this rank's loss."""
        model.train()
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        options = {"scale_wrt_gas": False} if deepspeed else {}
        total = torch.zeros((), device=self.accelerator.device)
        for number, row in enumerate(update.rows):
            last = number == len(update.rows) - 1
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last or deepspeed else self._local(model):
                loss = self.loss(update, self.scorer.score(model, row))
                # the ranks' gradients are averaged, but each loss is already a share of the global mean
                self.accelerator.backward(loss * self.accelerator.num_processes, **options)
            total += loss.detach()
        self.meter.close_update()
        return total

    def _local(self, model: nn.Module) -> AbstractContextManager:
        return self.accelerator.no_sync(model)

    def loss(self, update: Update, scores: Scores) -> Tensor:
        """This row's share of the update's loss."""
        actor, algorithm, batch = self.config.worker.actor, self.config.algorithm, update.batch
        of_row = lambda values: values[scores.samples, : scores.mask.shape[1]]  # noqa: E731
        mask, log_probs = scores.mask, scores.log_probs
        old = log_probs.detach() if batch.old_log_probs is None else of_row(batch.old_log_probs)
        if batch.old_log_probs is None:
            self._count_difference(old, of_row(batch.sampler_log_probs), mask)
        loss, metrics = losses.policy_loss(
            actor.loss_type,
            old,
            log_probs,
            of_row(batch.advantages),
            mask,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_dual=actor.clip_ratio_dual,
            loss_avg_mode=actor.loss_avg_mode,
            whole=update.whole,
            watched=update.scored,
        )
        entropy = losses.average(scores.entropy.detach(), mask, "token", update.scored)
        metrics |= {"pg_loss": loss.detach(), "entropy": entropy}
        if self.kl_in_loss:
            per_token = kl.estimate(algorithm.kl_penalty, log_probs, of_row(batch.ref_log_probs))
            divergence = losses.average(per_token, mask, actor.loss_avg_mode, update.whole)
            loss = loss + algorithm.kl_coef * divergence
            metrics["kl_loss"] = divergence.detach()
            self.meter.add("actor/kl_coef", torch.tensor(algorithm.kl_coef))
        self.meter.share({f"actor/{name}": value for name, value in metrics.items()})
        return loss


def _sizes(lengths: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Completion tokens and sequences of groups whose completions have these lengths."""
    return sum(map(sum, lengths)), sum(map(len, lengths))
