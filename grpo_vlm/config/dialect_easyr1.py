"""EasyR1's configurations, today's and older ones: our schema has its keys, so that only a few words differ.

What would change a result is never dropped here. Renamed keys are read under their present name; what only Ray
knows, or a logging service that is not installed, is left out, and a notice says so once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_vlm.config.layers import Layer, merged, nested
from grpo_vlm.config.trackers import not_installed

# Keys of older EasyR1 versions and of articles about it -> the key of today.
RENAMED = {
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
    "trainer.total_episodes": "trainer.total_epochs",
    "trainer.n_nodes": "trainer.nnodes",
    "data.format_prompt_path": "data.format_prompt",
}
# Keys that older versions had and that nothing replaces -> why they may be left out.
DROPPED = {
    "worker.reward.reward_type": "the constant REWARD_TYPE (batch or sequential) of the reward file says it",
}
# Files of EasyR1's examples -> ours that do the same, taken when the former are not there.
EXAMPLES = {
    "examples/format_prompt/math.jinja": "configs/prompts/math.jinja",
    "examples/format_prompt/r1v.jinja": "configs/prompts/r1v.jinja",
    "examples/reward_function/math.py": "rewards/geo3k.py",
    "examples/score_function/math.py": "rewards/geo3k.py",
    "examples/reward_function/r1v.py": "rewards/r1v.py",
    "examples/score_function/r1v.py": "rewards/r1v.py",
    "examples/reward_function/dapo.py": "rewards/dapo.py",
}
LOGGER = "trainer.logger"


def translate(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """The layers under today's keys, and one notice for each key that was renamed, replaced or left out."""
    notices: dict[str, None] = {}  # in order, each once
    return [_layer(layer, notices) for layer in layers], list(notices)


def _layer(layer: Layer, notices: dict[str, None]) -> Layer:
    tree: dict[str, Any] = {}
    for key, value in _leaves(layer.tree):
        if key in DROPPED:
            notices[f"{key} is left out: {DROPPED[key]}"] = None
            continue
        if key in RENAMED:
            notices[f"{key} is read as {RENAMED[key]}"] = None
            key = RENAMED[key]
        if key in CHANGES:
            value = CHANGES[key](key, value, notices)
        tree = merged(tree, nested(key, value))
    return Layer(layer.source, tree, layer.faults, layer.unreadable)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted keys and their values; only what `CHANGES`, `RENAMED` and `DROPPED` look for is taken apart."""
    found = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and any(wanted.startswith(f"{key}.") for wanted in _WANTED):
            found += _leaves(value, f"{key}.")
        else:
            found.append((key, value))
    return found


def available_loggers(key: str, value: Any, notices: dict[str, None]) -> Any:
    """The loggers of a list without those whose package is not installed; never an empty list."""
    if not isinstance(value, list):
        return value
    gone = not_installed([name for name in value if isinstance(name, str)])
    for name in gone:
        notices[
            f"{key}: {name} is left out: it is not installed (pip install {name}); metrics.jsonl and report.html are "
            "always written"
        ] = None
    return [name for name in value if name not in gone] or (["file"] if gone else value)


def _example_file(key: str, value: Any, notices: dict[str, None]) -> Any:
    """Ours in place of a file of EasyR1's examples that is not there; a function's name after `:` stays."""
    if not isinstance(value, str):
        return value
    path, colon, name = value.partition(":")
    ours = EXAMPLES.get(os.path.normpath(path)) if path else None
    if ours is None or Path(path).exists() or not Path(ours).exists():
        return value
    notices[f"{key}: {path} is not here; {ours} takes its place"] = None
    return f"./{ours}{colon}{name}"


CHANGES: dict[str, Callable[[str, Any, dict[str, None]], Any]] = {
    LOGGER: available_loggers,
    "data.format_prompt": _example_file,
    "worker.reward.reward_function": _example_file,
}
_WANTED = (*CHANGES, *RENAMED, *DROPPED)
