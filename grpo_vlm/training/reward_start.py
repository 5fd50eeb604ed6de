"""The reward of a run: its workers, the checks before anything heavy is loaded, and what is said of its faults."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_vlm.config import Config
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.errors import ConfigError
from grpo_vlm.report.console import Console
from grpo_vlm.report.record import StepRecord
from grpo_vlm.report.run_folder import FAULTS_NAME
from grpo_vlm.rewards.pool import Fault, Limits, RewardPool
from grpo_vlm.training.collect import reward_sample

TRIALS = 4  # rows on which the reward is called
GOLDS_BUDGET_S = 20.0
LISTED = 5
SHOWN_FAULTS = 10  # on the console; the file has all


class FaultLog:
    """Tells of each sample that could not be scored: on the console, and in reward_faults.jsonl of the run folder."""

    def __init__(self, console: Console):
        self.console = console
        self.folder: Path | None = None
        self._shown: set[str] = set()

    def write_to(self, folder: Path) -> None:
        """From here on the faults are written into this folder, where it exists: on the other machines of a run it
        does not unless they share their files."""
        self.folder = folder if folder.is_dir() else None

    def __call__(self, fault: Fault) -> None:
        if self.folder is not None:
            with (self.folder / FAULTS_NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(fault.record(), ensure_ascii=False) + "\n")
        if fault.row_id in self._shown or len(self._shown) >= SHOWN_FAULTS:
            return
        self._shown.add(fault.row_id)
        more = f"; further ones are in {FAULTS_NAME} alone" if len(self._shown) == SHOWN_FAULTS else ""
        self.console.warn(f"{fault.text} (worker.reward.on_error: {fault.policy}){more}")


def start_rewards(config: Config, given: Callable | Sequence[Callable] | None, on_fault: FaultLog) -> RewardPool:
    """The workers of this process, which load the functions in the background. `given`: in place of the
    configuration's. Raises RewardError."""
    reward = config.worker.reward
    limits = Limits(
        num_workers=reward.num_workers,
        timeout_s=reward.timeout_s,
        memory_limit_gb=reward.memory_limit_gb,
        concurrency=reward.max_concurrency,
        on_error=reward.on_error,
    )
    specs = given if given is not None else reward.reward_functions or reward.reward_function
    kwargs = dict(reward.reward_function_kwargs)
    return RewardPool(specs, kwargs, weights=reward.reward_weights, limits=limits, on_fault=on_fault)


def wanted_scores(config: Config) -> dict[str, str]:
    """Names of scores that other settings than the reward's ask for: score -> the setting."""
    algorithm = config.algorithm
    wanted = {}
    if algorithm.adv_estimator == "gdpo":
        wanted |= dict.fromkeys(algorithm.gdpo_reward_keys, "algorithm.gdpo_reward_keys")
    if algorithm.online_filtering:
        wanted[algorithm.filter_key] = "algorithm.filter_key"
    return wanted


def try_reward(
    reward: RewardPool, rows: PromptDataset, tokenizer: Any, n: int, wanted: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Calls the reward on the first rows with their own answers, n times each as a reward may count on groups, so that
    a broken function is found now and not after the first generation. Returns the scores as a line of text.

    Raises RewardError, whatever worker.reward.on_error says; ConfigError when a score of `wanted` is not among them.
    """
    prompts = rows.prompts(range(min(TRIALS, len(rows))))
    end = tokenizer.eos_token_id
    answered = [reward_sample(p, p.ground_truth, (*tokenizer.encode(p.ground_truth), end)) for p in prompts]
    began = time.perf_counter()
    scores = reward([sample for sample in answered for _ in range(n)], strict=True)[::n]
    seconds = time.perf_counter() - began
    keys = list(dict.fromkeys(key for score in scores if score is not None for key in score))
    if missing := [name for name in wanted if keys and name not in keys]:
        raise ConfigError(
            f"{wanted[missing[0]]}: the reward gives the first rows no score {missing[0]!r}; it gives "
            f"{', '.join(keys)}"
        )
    parts = [f"{key} {', '.join('-' if s is None or key not in s else f'{s[key]:g}' for s in scores)}" for key in keys]
    return (
        f"reward of the bare gold answers of the first {len(prompts)} rows ({seconds:.2f} s): "
        f"{'; '.join(parts) or 'not scored'}"
    )


def check_golds(reward: RewardPool, sets: Sequence[PromptDataset]) -> list[str]:
    """Warnings about gold answers that grpo_vlm.rewards.grade does not find equal to themselves; [] where the reward
    functions do not use it, since others grade by rules of their own."""
    if not reward.uses_grader:
        return []
    until = time.monotonic() + GOLDS_BUDGET_S
    rows_of: dict[str, list[str]] = {}
    for rows in sets:
        for row_id, gold in rows.answers():
            rows_of.setdefault(gold, []).append(row_id)
            if time.monotonic() > until:
                break
    verdicts = reward.grade_golds(list(rows_of), max(until - time.monotonic(), 0.0))
    bad = [(ids, gold) for (gold, ids), right in zip(rows_of.items(), verdicts, strict=True) if right is False]
    if not bad:
        return []
    checked = sum(len(ids) for ids, right in zip(rows_of.values(), verdicts, strict=True) if right is not None)
    rows = [(row_id, gold) for ids, gold in bad for row_id in ids]
    listed = ", ".join(f"{row_id} {gold[:40]!r}" for row_id, gold in rows[:LISTED])
    more = f" and {len(rows) - LISTED} more" if len(rows) > LISTED else ""
    return [
        f"{len(rows)} of {checked} golds cannot be graded: {listed}{more}; grpo_vlm.rewards.grade finds no answer to "
        "them right, not even the same text"
    ]


class ConstantReward:
    """A tracker that warns of steps in which every sample got the same reward: no group of them teaches anything."""

    def __init__(self, console: Console):
        self.console, self.count = console, 0

    def log(self, record: StepRecord) -> None:
        low, high = (record.metrics.get(f"critic/score/{name}") for name in ("min", "max"))
        if low is None or low != high:
            return
        self.count += 1
        if self.count & (self.count - 1) == 0:  # the 1st, 2nd, 4th, 8th ... time
            self.console.warn(
                f"step {record.step}: every sample got the reward {low:g}, so there was nothing to learn from "
                f"({self.count} such step(s) so far); see the answers in samples.jsonl and try "
                "`grpo-vlm reward FILE:FUNCTION --data FILE --completions samples.jsonl`"
            )

    def close(self) -> None:
        """Nothing is open."""
