"""checkpoint_tracker.json: which checkpoint of a run is the best and which the last, under EasyR1's keys."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_vlm.errors import ConfigError
from grpo_vlm.report.files import replace_text


@dataclass(frozen=True)
class CheckpointTracker:
    """What the file holds; the path is relative, so that a run can be moved."""

    best_global_step: int | None = None
    best_val_reward_score: float | None = None
    last_global_step: int | None = None
    last_actor_path: str | None = None

    @classmethod
    def read(cls, path: Path) -> "CheckpointTracker":
        """All None when there is none. Raises ConfigError when it is not one."""
        if not path.exists():
            return cls()
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{name: content[name] for name in names})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a checkpoint tracker ({error!r}). Delete it: the checkpoints are found "
                "without it, and the best is then taken from metrics.jsonl."
            ) from error

    def write(self, path: Path) -> None:
        """Replaces the file in one step."""
        replace_text(path, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def best_of(self, scores: Mapping[int, float]) -> tuple[int | None, float | None]:
        """Step and score of the best checkpoint, these {step: score} included; the earlier one of equal scores."""
        best = (self.best_global_step, self.best_val_reward_score)
        for step, score in sorted(scores.items()):
            if best[1] is None or score > best[1]:
                best = (step, float(score))
        return best
