"""The numbers and samples of one rollout step.

Everything that is shown anywhere (console line, files, report, trackers) comes from a StepRecord, so the outputs of a
run cannot disagree with each other. Plain data, readable without this package: one JSON object per line.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_vlm.report.groups import ShownGroup


@dataclass(frozen=True)
class Sample:
    """One prompt with one answer, as written to samples.jsonl.

    `split` is "train" or "val"; `scores` holds every part the reward returned, "overall" among them, and is empty for
    a sample that was not scored; `advantage` is None where none exists (validation); `response_length` counts tokens;
    `finish_reason` is "stop" or "length".
    """

    step: int
    split: str
    row_id: str
    prompt: str
    response: str
    ground_truth: str
    scores: dict[str, float]
    advantage: float | None
    response_length: int
    finish_reason: str

    def to_json(self) -> str:
        """One line of strict JSON without its newline; non-finite numbers become null."""
        return to_line(dataclasses.asdict(self))


@dataclass(frozen=True)
class StepRecord:
    """One rollout step: its `metrics` under EasyR1's names, its `samples`, a few of its `groups` in full, and its
    `seconds` by phase.

    `step` counts from 1; 0 is the validation before training. The phases are EasyR1's (gen, reward, old, ref, adv,
    update_actor, validation, save_checkpoint) and ours (sync); "step" is the whole step with all of them.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    groups: "list[ShownGroup]" = field(default_factory=list)

    def scalars(self) -> dict[str, float]:
        """Every number of the step under its full name: the phases as timing_s/PHASE, then `metrics`."""
        return {**{f"timing_s/{phase}": value for phase, value in self.seconds.items()}, **self.metrics}

    def to_json(self) -> str:
        """One line of strict JSON without its newline: {"step": 3, "timing_s/gen": 2.1, "reward/overall": 0.4}."""
        return to_line({"step": self.step, **self.scalars()})


def spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most `count` samples of different rows, evenly out of all of them."""
    by_row = list({sample.row_id: sample for sample in samples}.values())
    return by_row[:: max(1, len(by_row) // count)][:count] if count > 0 else []


def to_line(row: dict[str, Any]) -> str:
    """One line of strict JSON without its newline; non-finite numbers become null."""
    return json.dumps(_strict(row), ensure_ascii=False, allow_nan=False)


def _strict(value: Any) -> Any:
    """JSON has no NaN: a non-finite float becomes None, so that one diverged number leaves the line readable."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
