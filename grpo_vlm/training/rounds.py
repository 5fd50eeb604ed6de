"""The scored groups of a rollout step: one round of generation, or with online filtering as many as fill the batch.

DAPO's online filtering (arXiv 2503.14476): a group that every answer solves, or none, teaches nothing; it is left out
and others take its place. What a round has beyond the batch is kept for the next step. Which rows a round draws
depends on how many prompts the run has drawn, and that number and the kept groups are part of a checkpoint, so that a
resumed run draws what the unbroken one would have drawn.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_vlm.algorithms import filtering
from grpo_vlm.config import Config
from grpo_vlm.data.rows import Prompt
from grpo_vlm.errors import DataError
from grpo_vlm.rollout.types import Completion, Sampling
from grpo_vlm.training.batch import Group
from grpo_vlm.training.collect import Collector, sampling
from grpo_vlm.training.plan import RolloutPlan

Phase = Callable[[str], AbstractContextManager[Callable[[int, int], None]]]


class Rounds:
    """Generates and scores until a rollout step has its groups. phase: times and shows a phase of the step."""

    def __init__(
        self, config: Config, collector: Collector, plan: RolloutPlan, accelerator: Accelerator, phase: Phase
    ):
        self.config, self.collector, self.plan = config, collector, plan
        self.accelerator, self.phase = accelerator, phase
        self.drawn = 0  # prompts of the run so far, with online filtering
        self.kept: list[tuple[int, Group]] = []  # groups beyond the last batch, with their rows' numbers
        self.metrics: dict[str, float] = {}

    def collect(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """This rank's groups of rollout step `step` (from 1); with online filtering `prompts` is empty, and ranks may
        get unequal numbers of groups. `Group.index` numbers them over all ranks.

        Raises DataError when `trainer.max_try_make_batch` rounds do not fill the batch.
        """
        if self.config.algorithm.online_filtering:
            # a run that was begun without filtering has drawn its steps' prompts
            self.drawn = max(self.drawn, (step - 1) * self.config.data.rollout_batch_size)
            return self._fill(step)
        return self._round(prompts, self.plan.places, step, "train")

    def _round(self, prompts: Sequence[Prompt], places: Sequence[int], step: int, purpose: str) -> list[Group]:
        drawn = sampling(self.config)
        completions = self._generate(prompts, drawn, step, purpose)
        if self.config.algorithm.adv_estimator != "remax":
            with self.phase("reward"):
                return self.collector.score(prompts, completions, places)
        greedy = dataclasses.replace(drawn, n=1, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        answers = self._generate(prompts, greedy, step, f"{purpose}/greedy")
        with self.phase("reward"):
            groups = self.collector.score(prompts, completions, places)
            baselines = self.collector.score(prompts, answers, places)
        return [
            dataclasses.replace(group, baseline=None if score is None else score["overall"])
            for group, (score,) in zip(groups, (baseline.scores for baseline in baselines), strict=True)
        ]

    def _generate(self, prompts: Sequence[Prompt], drawn: Sampling, step: int, purpose: str) -> list[list[Completion]]:
        with self.phase("gen") as show:
            return self.collector.generate(
                prompts, drawn, step=step, purpose=purpose, on_progress=lambda done: show(done, len(prompts))
            )

    # ---- online filtering

    def _fill(self, step: int) -> list[Group]:
        wanted, size = self.config.data.rollout_batch_size, self.plan.round_size
        limit = self.config.trainer.max_try_make_batch
        counts = [self._total(len(self.kept)), 0, 0]  # groups at hand, rounds, groups generated
        kept = [
            (row, dataclasses.replace(group, index=group.index - counts[0], stale=True)) for row, group in self.kept
        ]
        while counts[0] < wanted:
            if 0 < limit <= counts[1]:
                raise DataError(self._too_few(counts, wanted))
            number = -(-self.drawn // size)
            rows, prompts = self.plan.round(number)
            places = [counts[1] * size + place for place in self.plan.round_places]
            purpose = "train" if counts[1] == 0 else f"train/{counts[1]}"  # a row may come again in one step
            groups = self._round(prompts, places, step, purpose)
            kept += [(row, group) for row, group, ok in zip(rows, groups, self._pass(groups), strict=True) if ok]
            self.drawn = (number + 1) * size
            counts = [self._total(len(kept)), counts[1] + 1, counts[2] + size]
        self.metrics = {
            "filter/rounds": float(counts[1]),
            "filter/generated_groups": float(counts[2]),
            "filter/kept_share": (counts[0] - self._total(len(self.kept))) / max(counts[2], 1),
        }
        return self._cut(kept, wanted)

    def _pass(self, groups: Sequence[Group]) -> list[bool]:
        """Which groups are trained on."""
        algorithm = self.config.algorithm
        scores = [[None if score is None else self._score(group, score) for score in group.scores] for group in groups]
        inside = filtering.keep(scores, algorithm.filter_low, algorithm.filter_high)
        if not algorithm.filter_zero_variance:
            return inside
        return [a and b for a, b in zip(inside, filtering.keep_varied(scores), strict=True)]

    def _score(self, group: Group, score: dict[str, float]) -> float:
        key = self.config.algorithm.filter_key
        if key not in score:
            raise DataError(
                f"algorithm.filter_key: the reward of row {group.prompt.row_id} has no {key!r}; it has"
                f" {', '.join(score)}"
            )
        return score[key]

    def _cut(self, kept: list[tuple[int, Group]], wanted: int) -> list[Group]:
        """The first `wanted` groups over all ranks, numbered anew; the rest is kept for the next step."""
        order = sorted(self._gather([group.index for _, group in kept]))
        place = {index: number for number, index in enumerate(order)}
        batch, self.kept = [], []
        for row, group in sorted(kept, key=lambda item: item[1].index):
            number = place[group.index]
            moved = dataclasses.replace(group, index=number if number < wanted else number - wanted)
            if number < wanted:
                batch.append(moved)
            else:
                self.kept.append((row, moved))
        self.metrics["filter/kept_for_next_step"] = float(len(order) - wanted)
        return batch

    def _total(self, count: int) -> int:
        return sum(self._gather([count]))

    def _gather(self, items: list[Any]) -> list[Any]:
        return gather_object(items) if self.accelerator.num_processes > 1 else items

    def _too_few(self, counts: Sequence[int], wanted: int) -> str:
        algorithm = self.config.algorithm
        return (
            f"online filtering: {counts[1]} rounds (trainer.max_try_make_batch) of {self.plan.round_size} prompts gave"
            f" {counts[0]} of {wanted} groups whose mean {algorithm.filter_key!r} lies above"
            f" algorithm.filter_low={algorithm.filter_low:g} and below filter_high={algorithm.filter_high:g}. The data"
            " are too easy or too hard for the model: widen the bounds, lower data.rollout_batch_size, raise"
            " data.mini_rollout_batch_size, or raise trainer.max_try_make_batch (0: no limit)"
        )

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs of all ranks, as JSON can hold it, without pictures. A collective."""
        mine = [
            {
                "row": row,
                "completions": [dataclasses.asdict(completion) for completion in group.completions],
                "scores": group.scores,
                "index": group.index,
                "baseline": group.baseline,
            }
            for row, group in self.kept
        ]
        return {"drawn": self.drawn, "kept": self._gather(mine)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes up where `state` was taken, with any number of ranks; without online filtering nothing that was kept
        is trained on."""
        self.drawn = state["drawn"]
        kept = state["kept"] if self.config.algorithm.online_filtering else []
        mine = kept[self.accelerator.process_index :: self.accelerator.num_processes]
        prompts = self.plan.build([item["row"] for item in mine])
        self.kept = [(item["row"], _group(prompt, item)) for item, prompt in zip(mine, prompts, strict=True)]


def _group(prompt: Prompt, item: dict[str, Any]) -> Group:
    completions = tuple(
        Completion(**made | {name: tuple(made[name]) for name in ("token_ids", "logprobs")})
        for made in item["completions"]
    )
    return Group(prompt, completions, tuple(item["scores"]), item["index"], baseline=item["baseline"])
