"""From scores to advantages: which samples count, the KL penalty in the reward, and the estimator.

Estimators see a rank's whole rollout batch at once; what some of them need of the other ranks is summed on the way, so
that neither the number of ranks nor the split into updates changes an advantage.

Shape legend: B samples of the rollout batch on this rank, T longest completion, G and t those of one group.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_vlm.algorithms import advantages, kl
from grpo_vlm.algorithms.ranks import ALONE, Ranks
from grpo_vlm.config import Config
from grpo_vlm.errors import RewardError
from grpo_vlm.training.batch import Group, RolloutBatch
from grpo_vlm.training.observe import Meter


def ranks_of(accelerator: Accelerator) -> Ranks:
    """The collectives of an accelerator, for tensors that lie on any device."""
    if accelerator.num_processes == 1:
        return ALONE
    return Ranks(
        sum=lambda values: accelerator.reduce(values.to(accelerator.device), "sum").to(values.device),
        gather=lambda values: accelerator.gather(values.to(accelerator.device)).to(values.device),
    )


class Credit:
    """Gives every sample of a rollout step its reward and its advantages; knows nothing of models."""

    def __init__(self, config: Config, accelerator: Accelerator, meter: Meter):
        self.config, self.meter, self.ranks = config, meter, ranks_of(accelerator)
        algorithm = config.algorithm
        self.in_reward = not algorithm.disable_kl and not algorithm.use_kl_loss
        self.kl = kl.controller(
            algorithm.kl_type if self.in_reward else "fixed",
            coef=algorithm.kl_coef,
            target=algorithm.kl_target,
            horizon=algorithm.kl_horizon,
        )

    def flag(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with a note for each sample whether the loss counts it."""
        leaves_out = self.config.algorithm.mask_truncated_completions or self.config.algorithm.overlong_filtering
        flagged, cuts = [], []
        needs_baseline = self.config.algorithm.adv_estimator == "remax"
        for group in groups:
            truncated = [leaves_out and _truncated(completion) for completion in group.completions]
            no_baseline = needs_baseline and group.baseline is None
            unscored = [score is None or no_baseline for score in group.scores]
            counted = tuple(not (cut or none) for cut, none in zip(truncated, unscored, strict=True))
            flagged.append(dataclasses.replace(group, counted=counted))
            cuts += truncated
        if leaves_out:  # also on a rank without groups: the ranks' numbers are reduced together
            self.meter.mean(
                "response_length/masked_share", torch.tensor(float(sum(cuts))), torch.tensor(float(len(cuts)))
            )
        return flagged

    def assign(self, groups: Sequence[Group], penalties: Sequence[Tensor] | None = None) -> list[Group]:
        """The groups with rewards and advantages. penalties: KL per token [G, t] of each group, where it is in the
        reward. A collective, once per rollout step."""
        batch = RolloutBatch.of(groups)
        scored = torch.tensor([flag for group in groups for flag in self._in_statistics(group)], dtype=torch.bool)
        samples, with_score = self.ranks.sum(torch.tensor([float(len(scored)), float(scored.sum())])).tolist()
        if not with_score:
            raise RewardError(
                f"none of the {samples:.0f} samples of this step counts: the reward left all unscored (None), or all"
                " were cut at data.max_response_length under algorithm.overlong_filtering; nothing can be learned"
            )
        scores = torch.tensor([_overall(score) for group in groups for score in group.scores])
        places = _with_a_place(batch.tokens)
        rewards = torch.zeros_like(batch.tokens)
        rewards[torch.arange(len(scores)), places.sum(-1).long() - 1] = scores
        if penalties is not None:
            rewards = rewards - self._penalty(batch, penalties, scored)
        name, options = self.config.algorithm.adv_estimator, self._options(groups)
        estimated = advantages.estimate(
            name, rewards, places, batch.group_ids, scored=scored, ranks=self.ranks, **options
        )
        returns = advantages.returns(name, rewards, places, gamma=self.config.algorithm.gamma, scored=scored)
        summed = rewards.sum(-1).split([len(group.completions) for group in groups])
        own = [None] * len(groups) if returns is None else batch.cut(returns)
        return [
            dataclasses.replace(group, rewards=reward, advantages=advantage, returns=of_tokens)
            for group, reward, advantage, of_tokens in zip(
                groups, summed, batch.cut(estimated * batch.tokens), own, strict=True
            )
        ]

    def _in_statistics(self, group: Group) -> list[bool]:
        """Which samples the group's statistics are taken over."""
        drops = self.config.algorithm.overlong_filtering
        needs_baseline = self.config.algorithm.adv_estimator == "remax"
        return [
            score is not None
            and not (drops and _truncated(completion))
            and not (needs_baseline and group.baseline is None)
            for score, completion in zip(group.scores, group.completions, strict=True)
        ]

    def _penalty(self, batch: RolloutBatch, penalties: Sequence[Tensor], scored: Tensor) -> Tensor:
        """kl_coef times the divergence per token [B, T]; steers the coefficient of the next step."""
        per_token = torch.zeros_like(batch.tokens)
        for row, values in enumerate(values for penalty in penalties for values in penalty):
            per_token[row, : len(values)] = values
        per_token = per_token * batch.tokens
        coefficient = self.kl.coef
        self.meter.add("actor/kl_coef", torch.tensor(coefficient))
        of_sample = (per_token.sum(-1) / batch.tokens.sum(-1).clamp(min=1))[scored].double()
        self.meter.mean("actor/kl_penalty", of_sample.sum(), torch.tensor(float(len(of_sample))))
        total, samples = self.ranks.sum(torch.stack([of_sample.sum(), of_sample.new_tensor(len(of_sample))])).tolist()
        if samples:
            self.kl.update(total / samples, int(samples))
        return coefficient * per_token

    def _options(self, groups: Sequence[Group]) -> dict[str, Any]:
        """The estimator's own keywords."""
        algorithm = self.config.algorithm
        divides = {"normalize_std": algorithm.norm_adv_by_std_in_grpo}
        match algorithm.adv_estimator:
            case "grpo" | "grpo_passk":
                return divides
            case "reinforce_plus_plus":
                return {"gamma": algorithm.gamma}
            case "remax":
                baselines = [group.baseline or 0.0 for group in groups for _ in group.completions]
                return {"baselines": torch.tensor(baselines)}
            case "gdpo":
                return {
                    "components": self._components(groups),
                    "weights": algorithm.gdpo_reward_weights or None,
                } | divides
            case _:
                return {}

    def _components(self, groups: Sequence[Group]) -> Tensor:
        """[B, K]: the scores that gdpo normalises one by one."""
        rows = [(group.prompt.row_id, score) for group in groups for score in group.scores]
        keys = self.config.algorithm.gdpo_reward_keys or component_keys([score for _, score in rows])
        return torch.tensor([_parts(row_id, score, keys) for row_id, score in rows]).view(len(rows), len(keys))


def component_keys(scores: Sequence[dict[str, float] | None]) -> list[str]:
    """The scores beside "overall" that a reward function gives to any sample; "overall" where there is none."""
    found = dict.fromkeys(key for score in scores if score is not None for key in score)
    return [key for key in found if key != "overall"] or ["overall"]


def _parts(row_id: str, score: dict[str, float] | None, keys: Sequence[str]) -> list[float]:
    """The scores under these keys, zeros for a sample without any."""
    if score is None:
        return [0.0] * len(keys)
    if missing := [key for key in keys if key not in score]:
        raise RewardError(
            f"algorithm.adv_estimator gdpo: row {row_id} has no score {', '.join(map(repr, missing))}; it has"
            f" {', '.join(score)}. Name scores that every sample has in algorithm.gdpo_reward_keys, or return None for"
            " the whole sample"
        )
    return [score[key] for key in keys]


def _with_a_place(tokens: Tensor) -> Tensor:
    """`tokens` [B, T] with a first token in answers that have none, for their scores to stand at: they count in every
    statistic as an answer of one end token does."""
    places = tokens.clone()
    places[:, 0] = 1
    return places


def _truncated(completion: Any) -> bool:
    return completion.finish_reason == "length"


def _overall(score: dict[str, float] | None) -> float:
    return 0.0 if score is None else score["overall"]
