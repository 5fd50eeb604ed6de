"""A reward function that hands each sample to the reward of its row's `data_source`, as verl does.

worker.reward.reward_function=grpo_vlm.rewards.by_source:compute_score is what a verl command line without a reward
function becomes; config/reward_sources.py has the table.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_vlm.config.reward_sources import check_sources, reward_file, reward_for

REWARD_TYPE = "batch"


def compute_score(reward_inputs: Sequence[Mapping[str, Any]], column: str = "data_source") -> list[dict[str, float]]:
    """Scores of samples whose rows name their source in `column`, in order.

    Where several sources are in one call, only the parts that all of them have are kept.

    Raises:
        ConfigError: a source without a known reward, or a row without the column.
    """
    sources = [item["columns"].get(column) for item in reward_inputs]
    check_sources(sources)
    scores: list[dict[str, float]] = [{} for _ in sources]
    for source in dict.fromkeys(sources):
        places = [index for index, other in enumerate(sources) if other == source]
        found = _function(source)([reward_inputs[index] for index in places])
        for index, score in zip(places, found, strict=True):
            scores[index] = dict(score)
    shared = set.intersection(*(set(score) for score in scores)) if scores else set()
    return [{name: value for name, value in score.items() if name in shared} for score in scores]


@cache
def _function(data_source: str) -> Callable[[list[Mapping[str, Any]]], list[Mapping[str, float]]]:
    """The source's reward as a function of a list, whichever way its file wants to be called."""
    source = reward_for(data_source)
    path, name = reward_file(source)
    module = _module(path)
    function = getattr(module, name)
    if module.__dict__.get("REWARD_TYPE", "batch") == "batch":
        return lambda items: function(items, **source.kwargs)
    return lambda items: [function(item, **source.kwargs) for item in items]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"grpo_vlm_source_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
