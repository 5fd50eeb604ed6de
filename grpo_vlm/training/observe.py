"""Counts and clocks of the training loop, reduced over the ranks once per rollout step so that nothing waits for the
device inside one."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_vlm.config import Config, sampling_values
from grpo_vlm.report import metrics
from grpo_vlm.report.record import Sample
from grpo_vlm.rewards.grade_extraction import find_answer
from grpo_vlm.training.batch import Group
from grpo_vlm.training.optimizer import local

GIB = 1024**3


class Meter:
    """Numbers of one rollout step. `totals` reduces and clears them; every rank must have met the same names."""

    def __init__(self):
        self._clear()

    def _clear(self) -> None:
        self._open: dict[str, Tensor] = {}  # shares of the update in progress
        self._updates: dict[str, list[Tensor]] = defaultdict(list)
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._ratios: dict[str, tuple[Tensor, Tensor]] = {}
        self._maxima: dict[str, Tensor] = {}

    def share(self, values: dict[str, Tensor]) -> None:
        """Shares that add up to the update's value over its micro-batches and ranks; updates are averaged."""
        for name, value in values.items():
            self._open[name] = self._open[name] + value if name in self._open else value

    def close_update(self) -> None:
        """Ends the update whose shares were given."""
        for name, value in self._open.items():
            self._updates[name].append(value)
        self._open = {}

    def add(self, name: str, value: Tensor) -> None:
        """A value of this rank; averaged over calls and ranks."""
        self._values[name].append(value)

    def mean(self, name: str, numerator: Tensor, denominator: Tensor) -> None:
        """Parts of a mean over all calls and ranks."""
        above, below = self._ratios.get(name, (0, 0))
        self._ratios[name] = (above + numerator.detach(), below + denominator.detach())

    def maximum(self, name: str, value: Tensor) -> None:
        """Largest value over all calls and ranks."""
        value = value.detach()
        self._maxima[name] = torch.maximum(self._maxima[name], value) if name in self._maxima else value

    def totals(self, accelerator: Accelerator) -> dict[str, float]:
        """The step's numbers, equal on all ranks."""
        sums = {name: torch.stack(values).mean() for name, values in self._updates.items()}
        means = {
            name: torch.stack([value.float() for value in values]).mean() for name, values in self._values.items()
        }
        sums = _reduce(accelerator, sums, "sum")
        means = _reduce(accelerator, means, "mean")
        above = _reduce(accelerator, {name: pair[0] for name, pair in self._ratios.items()}, "sum")
        below = _reduce(accelerator, {name: pair[1] for name, pair in self._ratios.items()}, "sum")
        maxima = {name: accelerator.gather(value.reshape(1)).max().item() for name, value in self._maxima.items()}
        self._clear()
        return sums | means | {name: above[name] / max(below[name], 1.0) for name in above} | maxima


def _reduce(accelerator: Accelerator, values: dict[str, Tensor], how: str) -> dict[str, float]:
    """One collective for all values."""
    if not values:
        return {}
    packed = torch.stack([value.detach().to(accelerator.device, torch.float32) for value in values.values()])
    return dict(zip(values, accelerator.reduce(packed, how).tolist(), strict=True))


class Stopwatch:
    """Seconds per phase of a rollout step."""

    def __init__(self):
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `phase`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """The phases so far, cleared."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds


@dataclass(frozen=True)
class Scored:
    """A sample of a record with the numbers that samples.jsonl does not hold. advantages, returns: of its tokens, None
    where it has none."""

    sample: Sample
    prompt_length: int
    reward: float  # after a KL penalty, if any
    advantages: metrics.Spread | None = None
    returns: metrics.Spread | None = None


@dataclass(frozen=True)
class Placed:
    """A scored sample with its prompt's place in the rollout step or the validation set, over all ranks."""

    place: int
    scored: Scored


def placed(samples: Sequence[Sample], groups: Sequence[Group], rewards: Sequence[float]) -> list[Placed]:
    """The samples of these groups, in order; one reward for each."""
    of_groups = [
        (group.index, len(group.prompt.token_ids), number, group)
        for group in groups
        for number in range(len(group.completions))
    ]
    return [
        Placed(place, Scored(sample, length, reward, *_spreads(group, number)))
        for sample, (place, length, number, group), reward in zip(samples, of_groups, rewards, strict=True)
    ]


def _spreads(group: Group, number: int) -> tuple[metrics.Spread | None, metrics.Spread | None]:
    """Of the advantages and the returns over the tokens of a completion."""
    tokens = len(group.completions[number].token_ids)
    if group.advantages is None or not tokens:
        return None, None
    advantages = metrics.Spread.of(group.advantages[number, :tokens].tolist())
    if group.returns is None:
        return advantages, advantages
    return advantages, metrics.Spread.of(group.returns[number, :tokens].tolist())


def in_order(ranks: Sequence[Sequence[Placed]]) -> list[Scored]:
    """The samples of all ranks in the order of their prompts."""
    return [row.scored for row in sorted((row for rank in ranks for row in rank), key=lambda row: row.place)]


def rollout_metrics(rows: Sequence[Scored], config: Config) -> dict[str, float]:
    """Metrics of a rollout step's samples (all ranks), under EasyR1's names."""
    scored = [row for row in rows if row.sample.scores]
    lengths = [row.sample.response_length for row in rows]
    return {
        **metrics.reward_metrics([row.sample.scores for row in scored]),
        **metrics.critic_metrics(
            scores=[row.sample.scores["overall"] for row in scored],
            rewards=[row.reward for row in scored],
            advantages=[row.advantages for row in scored],
            returns=[row.returns for row in scored],
            response_lengths=[row.sample.response_length for row in scored],
        ),
        **metrics.length_metrics(lengths, [row.prompt_length for row in rows], **_limits(config)),
        **metrics.group_metrics([[row.sample.scores["overall"] for row in group] for group in _by_row(scored)]),
    }


def _by_row(rows: Sequence[Scored]) -> list[list[Scored]]:
    """The samples of each row of the data, in order of first appearance."""
    groups: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.sample.row_id].append(row)
    return list(groups.values())


def validation_metrics(rows: Sequence[Scored], config: Config) -> dict[str, float]:
    """Metrics of the answers to the held-out rows (all ranks)."""
    limit = sampling_values(config, validation=True)["max_tokens"]
    scored = [row for row in rows if row.sample.scores]
    answers = [
        [("".join(find_answer(row.sample.response).candidates[:1]), row.sample.scores["overall"]) for row in group]
        for group in _by_row(scored)
    ]
    return {
        **metrics.validation_metrics(
            [row.sample.scores for row in scored],
            [row.sample.response_length for row in rows],
            [row.prompt_length for row in rows],
            **{**_limits(config), "max_response_length": limit},
        ),
        **metrics.answer_metrics(answers),
        **({"val/not_scored_share": 1 - len(scored) / len(rows)} if len(scored) < len(rows) else {}),
    }


def load_metrics(ranks: Sequence[Sequence[Placed]]) -> dict[str, float]:
    """How evenly the tokens lie on the ranks, from the samples of each."""
    return metrics.seqlen_metrics(
        [sum(row.scored.prompt_length + row.scored.sample.response_length for row in rank) for rank in ranks]
    )


def reward_faults(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counts of what went wrong in rewards, added up over the ranks, and the slowest call of any."""
    names = ranks[0]
    return {name: (max if name.endswith("_s") else sum)(rank[name] for rank in ranks) for name in names}


def speed_metrics(rows: Sequence[Scored], seconds: dict[str, float], num_devices: int) -> dict[str, float]:
    """Seconds and speed of a rollout step from its samples (all ranks) and this process's clock."""
    response_tokens = sum(row.sample.response_length for row in rows)
    total_tokens = response_tokens + sum(row.prompt_length for row in rows)
    memory = {}
    if torch.accelerator.is_available():
        memory = {
            "max_memory_allocated_gb": torch.accelerator.max_memory_allocated() / GIB,
            "max_memory_reserved_gb": torch.accelerator.max_memory_reserved() / GIB,
        }
    return {
        **metrics.timing_metrics(seconds, response_tokens=response_tokens, total_tokens=total_tokens),
        **metrics.perf_metrics(
            seconds, total_tokens=total_tokens, num_rollouts=len(rows), num_gpus=num_devices, **memory
        ),
    }


def _limits(config: Config) -> dict[str, int]:
    data = config.data
    return {"max_response_length": data.max_response_length, "max_prompt_length": data.max_prompt_length}


def free_bytes(device: torch.device) -> int:
    """What this process can still allocate on an accelerator."""
    backend = torch.get_device_module(device)
    free, _ = backend.mem_get_info(device)
    return free + backend.memory_reserved(device) - backend.memory_allocated(device)


def optimizer_bytes(model: nn.Module) -> int:
    """This rank's gradients and AdamW states, which exist from the first update on, in the weights' own type."""
    return 3 * sum(local(p).numel() * p.element_size() for p in model.parameters() if p.requires_grad)
