"""Which reward a row's `data_source` has, for runs that name none: verl chooses by that column.

The reward function `BY_DATA_SOURCE` looks each row's source up here; worker.reward.reward_function may name it in any
configuration. Standard library only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_vlm.errors import ConfigError

BY_DATA_SOURCE = "grpo_vlm.rewards.by_source:compute_score"


@dataclass(frozen=True)
class Source:
    """A reward file's function, and its arguments."""

    function: str
    kwargs: dict[str, Any] = field(default_factory=dict)


# Answers in \boxed{} without a format to keep to: verl scores these by the answer alone.
_BOXED = Source("./rewards/geo3k.py:compute_score", {"format_weight": 0.0})
SOURCES: dict[str, Source] = {
    "hiyouga/geometry3k": Source("./rewards/geo3k.py:compute_score"),
    "hiyouga/math12k": Source("./rewards/geo3k.py:compute_score"),
    "lmms-lab/multimodal-open-r1-8k-verified": Source("./rewards/r1v.py:compute_score"),
    "leonardPKU/clevr_cogen_a_train": Source("./rewards/r1v.py:compute_score"),
    "Zhang199/TinyLLaVA-Video-R1-training-data": Source("./rewards/choice.py:compute_score"),
    "easy-vqa": Source("./rewards/easyvqa.py:compute_score"),
    "lighteval/MATH": _BOXED,
    "DigitalLearningGmbH/MATH-lighteval": _BOXED,
    "HuggingFaceH4/MATH-500": _BOXED,
}


def reward_for(data_source: str) -> Source:
    """The reward of a data source.

    Raises:
        ConfigError: no reward is known for it; the message lists those that are.
    """
    check_sources([data_source])
    return SOURCES[data_source]


def check_sources(data_sources: Iterable[Any]) -> None:
    """Refuse data sources for which no reward is known, all of them in one ConfigError."""
    unknown = sorted({str(source) for source in data_sources if source not in SOURCES})
    if unknown:
        raise ConfigError(
            f"data_source {', '.join(map(repr, unknown))}: no reward is known for it, and the configuration names "
            f"none. Known: {', '.join(SOURCES)}. Name a function: worker.reward.reward_function=FILE.py:function, or "
            "verl's custom_reward_function.path and .name"
        )


def reward_file(source: Source) -> tuple[Path, str]:
    """The file of a source's reward and the function in it: under the working directory, else beside this package.

    Raises:
        ConfigError: it is in neither place.
    """
    name, _, function = source.function.rpartition(":")
    places = [Path(name), Path(__file__).parents[2] / name]
    for place in places:
        if place.is_file():
            return place, function
    raise ConfigError(f"{source.function}: there is no such file in {Path.cwd()}; start in the repository's folder")
