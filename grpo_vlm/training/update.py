"""One optimizer update: its samples, the rows they are scored in, its loss and gradients.

`Learner.prepare` turns scored groups into an update, `Learner.accumulate` runs forward and backward through its rows.
All denominators are those of the whole update, over all rows and ranks, so that neither changes the loss. Between the
first row and the last nothing waits for the device.

Shape legend: B samples of the update on this rank, T longest completion, b and t those of one row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn

from grpo_vlm.algorithms import kl, losses, mismatch, selection
from grpo_vlm.algorithms.losses import Denominators
from grpo_vlm.algorithms.selection import SELECTING
from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.rows import Prompt
from grpo_vlm.rollout.types import Completion
from grpo_vlm.training.batch import Group, RolloutBatch
from grpo_vlm.training.credit import ranks_of
from grpo_vlm.training.observe import Meter
from grpo_vlm.training.scoring import Scorer, Scores, Work
from grpo_vlm.training.sharding import divided


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

    def row_name(self, number: int) -> str:
        """Which row, and which data rows are in it."""
        groups = sorted({self.batch.group_ids[sample] for sample in self.rows[number].samples.tolist()})
        names = ", ".join(self.batch.groups[group].prompt.row_id for group in groups) or "blank"
        return f"row {number + 1} of {len(self.rows)} ({names})"

    def of(self, groups: Sequence[Group]) -> "Update":
        """The same update with its groups' rewards and advantages from these."""
        batch, device = RolloutBatch.of(groups), self.batch.mask.device
        rewards, advantages = batch.rewards.to(device), batch.advantages.to(device)
        return dataclasses.replace(
            self, batch=dataclasses.replace(self.batch, groups=batch.groups, rewards=rewards, advantages=advantages)
        )


class Learner:
    """Log-probs and gradients; knows nothing of rollouts, rewards, steps or files."""

    def __init__(
        self,
        config: Config,
        scorer: Scorer,
        accelerator: Accelerator,
        meter: Meter,
        reference: Callable[[], AbstractContextManager[nn.Module]] | None = None,
        on_row: Callable[[str], None] = lambda text: None,
    ):
        """on_row: told which row comes next."""
        self.config, self.scorer, self.accelerator, self.meter = config, scorer, accelerator, meter
        self.reference = reference
        self.on_row = on_row
        algorithm, actor = config.algorithm, config.worker.actor
        self.loss_type, self.avg_mode = losses.resolve_loss(actor.loss_type, actor.loss_avg_mode)
        self.penalty_mode = actor.penalty_avg_mode or self.avg_mode
        self.selects = self.loss_type in SELECTING
        self.kl_in_loss = not algorithm.disable_kl and algorithm.use_kl_loss
        self.full = not algorithm.disable_kl and algorithm.kl_penalty == "full"
        self.corrects = algorithm.rollout_is != "none"
        # A sample of zero advantage adds exactly nothing to the gradient where neither KL nor entropy is in it. The
        # choice of clip_cov and kl_cov is made among all tokens.
        self.skips = algorithm.disable_kl and not actor.entropy_coeff and not self.selects

    # ---- from groups to updates

    def seconds(self, group: Group) -> float:
        """Predicted time of a group's forward and backward pass; zero where `prepare` leaves it out."""
        if self.skips and not _moves(group):
            return 0.0
        return self.scorer.seconds(group)

    def prepare(self, groups: Sequence[Group]) -> Update:
        """The samples of one update on the device, and the rows of the groups that have a gradient."""
        batch = RolloutBatch.of(groups)
        kept = self._with_gradient(groups)
        rows = self.scorer.rows(batch, kept)
        scored = torch.tensor([group in kept for group in batch.group_ids], dtype=torch.bool)
        sizes = self._gather([len(rows), len(groups) - len(kept), *_sizes(batch.mask), *_sizes(batch.mask[scored])])
        self.meter.add("actor/skipped_groups", torch.tensor(float(sum(size[1] for size in sizes))))
        rows += [self.scorer.blank() for _ in range(max(size[0] for size in sizes) - len(rows))]
        work = self.scorer.work(rows)
        self.meter.mean("perf/padding_waste", torch.tensor(work.processed - work.tokens), torch.tensor(work.processed))
        totals = [float(sum(column)) for column in zip(*sizes, strict=True)]
        longest = float(self.config.data.max_response_length)
        whole, watched = Denominators(*totals[2:4], longest), Denominators(*totals[4:6], longest)
        return Update(batch.to(self.accelerator.device), tuple(rows), whole, watched, work)

    def _with_gradient(self, groups: Sequence[Group]) -> list[int]:
        """Numbers of the groups to run. One is kept where none has a gradient, since the optimizer moves by its
        momentum too."""
        everything = list(range(len(groups)))
        if not self.skips:
            return everything
        return [number for number in everything if _moves(groups[number])] or everything[:1]

    def _gather(self, sizes: list[int]) -> list[list[int]]:
        """The given numbers of every rank."""
        return gather_object([sizes]) if self.accelerator.num_processes > 1 else [sizes]

    # ---- log-probs

    @torch.no_grad()
    def log_probs(self, model: nn.Module, update: Update) -> Tensor:
        """[B, T] under `model`, without gradient; zero for groups without one."""
        result = torch.zeros_like(update.batch.tokens)
        for number, row in enumerate(update.rows):
            self.on_row(update.row_name(number))
            scores = self.scorer.score(model, row)
            result[scores.samples, : scores.mask.shape[1]] = scores.log_probs
        divided(model)
        return result

    def compare_with_sampler(self, update: Update) -> None:
        """Counts the difference of the old log-probs from the sampler's, over the groups that were scored."""
        batch = update.batch
        self._count_difference(batch.old_log_probs, batch, slice(None), _scored_tokens(batch))

    def _count_difference(self, ours: Tensor, batch: RolloutBatch, rows: Any, mask: Tensor) -> None:
        """|log p of the trainer - log p of the sampler| over the tokens of `mask` [b, t], the samples `rows`; samples
        of earlier weights are left out."""
        mask = mask * batch.fresh[rows][:, None]
        difference = (ours - batch.sampler_log_probs[rows, : mask.shape[1]]).abs() * mask
        self.meter.mean("rollout/logprob_diff/mean", difference.sum(), mask.sum())
        self.meter.maximum("rollout/logprob_diff/max", difference.max() if difference.numel() else difference.sum())

    def penalties(self, model: nn.Module, update: Update) -> list[Tensor]:
        """KL of the old policy from the reference, per token [G, t], for each group of the update. model: the old
        policy."""
        batch = update.batch
        if not self.full:
            return batch.cut(kl.estimate(self.config.algorithm.kl_penalty, batch.old_log_probs, batch.ref_log_probs))
        result = torch.zeros_like(batch.tokens)
        for row in update.rows:
            with torch.no_grad():
                scores = self._score(model, row)
            result[scores.samples, : scores.mask.shape[1]] = scores.divergence
        return batch.cut(result)

    def _score(self, model: nn.Module, row: Any) -> Scores:
        """Where the KL is taken over the whole vocabulary, with the divergence from the reference: its distributions
        are too large to keep, so it sees each row right before the policy does."""
        if not self.full:
            return self.scorer.score(model, row)
        with torch.no_grad(), self.reference() as reference:
            outlook = self.scorer.outlook(reference, row)
        return self.scorer.score(model, row, outlook)

    def corrected(self, update: Update) -> Update:
        """With importance weights against the sampler, from the old log-probs. A collective."""
        algorithm, batch = self.config.algorithm, update.batch
        found = mismatch.correction(
            batch.old_log_probs,
            batch.sampler_log_probs,
            batch.mask * _scored_tokens(batch),
            level=algorithm.rollout_is,
            mode=algorithm.rollout_is_mode,
            low=algorithm.rollout_is_threshold_low if algorithm.rollout_is_mode == "mask" else 0.0,
            high=algorithm.rollout_is_threshold,
            ranks=ranks_of(self.accelerator),
        )
        for name, value in found.metrics.items():
            self.meter.add(f"rollout/{name}", value)
        return update.having(weights=found.weights)

    def selected(self, model: nn.Module, update: Update, number: int) -> Update:
        """With the tokens that clip_cov or kl_cov chooses in the whole update. number: of the update in the run; the
        first of a rollout step has its log-probs already. A collective."""
        actor, batch = self.config.worker.actor, update.batch
        current = self.log_probs(model, update) if number % updates_per_step(self.config) else batch.old_log_probs
        keys = [
            group.index * self.config.worker.rollout.n + completion
            for group in batch.groups
            for completion in range(len(group.completions))
        ]
        found = selection.select(
            self.loss_type,
            batch.old_log_probs,
            current,
            batch.advantages,
            batch.mask,
            sample_keys=keys,
            seed=self.config.worker.rollout.seed + number,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_cov_ratio=actor.clip_cov_ratio,
            clip_cov_lb=actor.clip_cov_lb,
            clip_cov_ub=actor.clip_cov_ub,
            kl_cov_ratio=actor.kl_cov_ratio,
            ranks=ranks_of(self.accelerator),
        )
        return update.having(selected=found)

    @torch.no_grad()
    def score_one(self, model: nn.Module, prompt: Prompt, completion: Completion) -> list[float]:
        """Log-probs of one completion, a collective where weights are sharded."""
        batch = RolloutBatch.of([Group(prompt, (completion,), ({},))])
        (row,) = self.scorer.rows(batch, [0])
        log_probs = self.scorer.score(model, row).log_probs[0].tolist()
        divided(model)
        return log_probs

    # ---- gradients

    def accumulate(self, model: nn.Module, update: Update, *, unmoved: bool) -> Tensor:
        """Backward through all rows; gradients are reduced over the ranks at the last. Returns this rank's loss.

        unmoved: the weights are still those of the rollout, so that the old log-probs are the current ones.
        """
        model.train()
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        # ZeRO and FSDP2 reduce after each row, so that no rank ever holds a whole gradient
        reduces = deepspeed or self.accelerator.is_fsdp2
        options = {"scale_wrt_gas": False} if deepspeed else {}
        total = torch.zeros((), device=self.accelerator.device)
        for number, row in enumerate(update.rows):
            last = number == len(update.rows) - 1
            self.on_row(update.row_name(number))
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last or reduces else self._local(model):
                loss = self.loss(update, self._score(model, row), unmoved)
                # the ranks' gradients are averaged, but each loss is already a share of the global mean
                self.accelerator.backward(loss * self.accelerator.num_processes, **options)
            total += loss.detach()
        self.meter.close_update()
        return total

    def _local(self, model: nn.Module) -> AbstractContextManager:
        return self.accelerator.no_sync(model)

    def loss(self, update: Update, scores: Scores, unmoved: bool) -> Tensor:
        """This row's share of the update's loss."""
        actor, batch = self.config.worker.actor, update.batch
        of_row = lambda values: None if values is None else values[scores.samples, : scores.mask.shape[1]]  # noqa: E731
        mask, log_probs = of_row(batch.mask), scores.log_probs
        old = log_probs.detach() if unmoved else of_row(batch.old_log_probs)
        if batch.old_log_probs is None:
            self._count_difference(old, batch, scores.samples, scores.mask)
        loss, metrics = losses.policy_loss(
            self.loss_type,
            old,
            log_probs,
            of_row(batch.advantages),
            mask,
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_dual=actor.clip_ratio_dual,
            tau_positive=actor.tau_positive,
            tau_negative=actor.tau_negative,
            kl_cov_coef=actor.kl_cov_coef,
            vespo_k_positive=actor.vespo_k_positive,
            vespo_lambda_positive=actor.vespo_lambda_positive,
            vespo_k_negative=actor.vespo_k_negative,
            vespo_lambda_negative=actor.vespo_lambda_negative,
            loss_avg_mode=self.avg_mode,
            whole=update.whole,
            watched=update.scored,
            weights=of_row(batch.weights),
            selected=of_row(batch.selected),
        )
        entropy = losses.average(scores.entropy.detach(), mask, "token", update.scored)
        metrics |= {"pg_loss": loss.detach(), "entropy": entropy}
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * losses.average(scores.entropy, mask, self.penalty_mode, update.whole)
        if self.kl_in_loss:
            loss = loss + self._kl_loss(scores, of_row(batch.ref_log_probs), mask, update.whole, metrics)
        self.meter.share({f"actor/{name}": value for name, value in metrics.items()})
        return loss

    def _kl_loss(
        self,
        scores: Scores,
        ref_log_probs: Tensor | None,
        mask: Tensor,
        whole: Denominators,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        algorithm, per_token = self.config.algorithm, scores.divergence
        if not self.full:
            per_token = kl.estimate(algorithm.kl_penalty, scores.log_probs, ref_log_probs)
        divergence = losses.average(per_token, mask, self.penalty_mode, whole)
        metrics["kl_loss"] = divergence.detach()
        self.meter.add("actor/kl_coef", torch.tensor(algorithm.kl_coef))
        return algorithm.kl_coef * divergence


def _moves(group: Group) -> bool:
    """Whether any advantage of a sample that counts is not zero."""
    if group.advantages is None:
        return True
    counted = group.counted or [True] * len(group.completions)
    return bool(group.advantages[torch.tensor(counted, dtype=torch.bool)].any())


def _sizes(mask: Tensor) -> tuple[int, int]:
    """Completion tokens and sequences of a mask [B, T]."""
    lengths = mask.sum(-1)
    return int(lengths.sum()), int((lengths > 0).sum())


def _scored_tokens(batch: RolloutBatch) -> Tensor:
    """[B, T]: the tokens of the samples that `log_probs` has scored; it leaves zeros where there is no gradient."""
    return batch.tokens * batch.old_log_probs.ne(0).any(-1, keepdim=True)
