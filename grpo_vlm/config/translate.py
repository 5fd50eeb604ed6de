"""`grpo-vlm translate FILE_OR_ARGS...`: a configuration of EasyR1 or verl as YAML for this package, with what became
of each option as comments.

The arguments are those of the other project's command line: a YAML file (with or without `config=` or `--config`) and
key=value items; `python3 -m verl.trainer.main_ppo` before them does no harm. Only keys that are set are printed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from grpo_vlm.config import dialect_verl
from grpo_vlm.config.check import check_values
from grpo_vlm.config.dialects import translated
from grpo_vlm.config.faults import raise_faults
from grpo_vlm.config.layers import merged, read_layers
from grpo_vlm.config.load import read_config
from grpo_vlm.errors import ConfigError

_LAUNCHERS = ("python", "python3", "-m", "--config", "train.py", "verl.trainer.main", "verl.trainer.main_ppo")
_HYDRAS = ("--config-path=", "--config-name=")  # verl's own files, whose values are its defaults


def translate(arguments: Sequence[str]) -> str:
    """The YAML text.

    Raises:
        ConfigError: every option that is unknown, refused or has a value that this version does not take.
    """
    items = [item for item in arguments if item not in _LAUNCHERS and not item.startswith(_HYDRAS)]
    items = [item if "=" in item or item[0] in "~+" else f"config={item}" for item in items]
    if not items:
        raise ConfigError("translate: name a YAML file or key=value items of EasyR1's or verl's command line")
    config, faults, _ = read_config(None, items)
    more, _ = check_values(config)
    raise_faults([*faults, *more])
    layers = read_layers(None, items, None)
    done, notices, _ = translated(layers)
    tree: dict[str, Any] = {}
    for layer in done:
        tree = merged(tree, layer.tree)
    project = "verl" if dialect_verl.is_verl(layers) else "EasyR1"
    head = [f"# From {project}'s options by grpo-vlm translate.", *(f"# {notice}" for notice in notices)]
    return "\n".join(head) + "\n" + OmegaConf.to_yaml(OmegaConf.create(_in_order(tree)))


def _in_order(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The sections as the schema has them."""
    first = [name for name in ("data", "algorithm", "worker", "trainer") if name in tree]
    return {name: tree[name] for name in (*first, *(name for name in tree if name not in first))}


def main(arguments: Sequence[str]) -> None:
    print(translate(arguments), end="")
