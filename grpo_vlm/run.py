"""Builds the parts from a configuration and trains. train.py and notebooks use the same object:

from grpo_vlm import Run
Run({"worker.actor.model.model_path": "...", "data.rollout_batch_size": 8}, train_rows=rows,
reward=my_function).train()
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_vlm.config import Config, check_config, load_and_check


@dataclass(frozen=True)
class Result:
    """What a run leaves: its folder, the rollout steps it has done, and the validation metrics before the first and
    after the last step (empty where there was none)."""

    folder: Path
    steps: int
    before: dict[str, float]
    after: dict[str, float]


class Run:
    """One training run.

    Args:
        config: a Config, a mapping with nested or dotted keys, or the path of a YAML file.
        overrides: `key=value` items on top of it.
        train_rows, val_rows: row dicts, or a `datasets.Dataset`, in place of data.train_files and data.val_files.
        reward: a function, or several, in place of worker.reward.reward_function.

    Raises:
        ConfigError: every fault of the configuration at once.
    """

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        overrides: Sequence[str] = (),
        *,
        train_rows: Iterable[Mapping[str, Any]] | None = None,
        val_rows: Iterable[Mapping[str, Any]] | None = None,
        reward: Callable | Sequence[Callable] | None = None,
    ):
        # a data set stays one: as a list it would hold all its pictures decoded
        self.train_rows = list(train_rows) if isinstance(train_rows, Iterator) else train_rows
        self.val_rows = list(val_rows) if isinstance(val_rows, Iterator) else val_rows
        self.reward = reward
        self.config, self.notices = self._read(config, overrides)

    def _read(
        self, config: Config | Mapping[str, Any] | str | Path, overrides: Sequence[str]
    ) -> tuple[Config, list[str]]:
        world_size, local_world_size = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        launched = {
            "world_size": world_size,
            "num_nodes": max(1, world_size // local_world_size),
            "gpus_per_node": local_world_size,
            "needs_train_files": self.train_rows is None,
            "needs_reward": self.reward is None,
            "has_val_rows": self.val_rows is not None,
            "check_port": int(os.environ.get("RANK", 0)) == 0,
        }
        if isinstance(config, Config):
            if not overrides:
                return config, check_config(config, **launched)
            config = asdict(config)
        path, base = (None, config) if isinstance(config, Mapping) else (config, None)
        return load_and_check(path, overrides, base, **launched)

    def train(self) -> Result:
        """Trains to the last step, resuming where the run folder says so.

        Everything that a user can have got wrong in the configuration, the data and the reward is found before a
        model loads; then nothing is left behind.
        """
        import torch

        if not torch.accelerator.is_available():  # DeepSpeed, once imported, would print that it found none
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from grpo_vlm.training.session import Session  # heavy: transformers, TRL

        with Session(
            self.config,
            notices=self.notices,
            train_rows=self.train_rows,
            val_rows=self.val_rows,
            reward=self.reward,
        ) as session:
            session.train()
            before, after = session.validations()
            session.show_end(before, after)
            done = max(session.resume_step or 0, session.trainer.rollout_step)
            return Result(session.folder.path, done, before, after)
