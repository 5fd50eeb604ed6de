"""A sound configuration in an empty working directory, to break in one place at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_vlm.config import load_and_check
from grpo_vlm.errors import ConfigError

SOUND = [
    "data.train_files=train.parquet",
    "data.val_files=val.parquet",
    "data.rollout_batch_size=64",
    "worker.actor.global_batch_size=32",
    "worker.actor.model.model_path=model",
    "worker.rollout.n=8",
    "worker.reward.reward_function=./reward.py:compute_score",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with the files that SOUND names."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.parquet", "val.parquet", "prompt.jinja"):
        (tmp_path / name).write_text("x")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "reward.py").write_text("def compute_score(samples):\n    return []\n")
    return tmp_path


@pytest.fixture
def notices(folder: Path) -> Callable[..., list[str]]:
    """Check SOUND with some changes and return the notices."""
    return lambda *items, **launch: load_and_check(None, [*SOUND, *items], **launch)[1]


@pytest.fixture
def faults(folder: Path) -> Callable[..., list[str]]:
    """Check SOUND with some changes that must be refused, and return the numbered faults (and a closing line)."""

    def run(*items: str, **launch: object) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load_and_check(None, [*SOUND, *items], **launch)
        head, *lines = str(caught.value).splitlines()
        numbered = [line for line in lines if line.startswith("  ")]
        count = "1 fault" if len(numbered) == 1 else f"{len(numbered)} faults"
        assert head == f"The configuration has {count}:"
        assert [line.split(".")[0].strip() for line in numbered] == [str(i + 1) for i in range(len(numbered))]
        return [line.strip().partition(". ")[2] if line.startswith("  ") else line for line in lines]

    return run
