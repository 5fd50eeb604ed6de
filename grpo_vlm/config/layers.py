"""The sources of a configuration before anything is known about their keys: a base dict, YAML files, key=value items.

A YAML file may name another with a top-level `base:`, a path relative to itself: that file's values come first and its
own replace them, so that a variant is a few lines. `config=FILE` among the items is EasyR1's way to name the file, and
`+key=` and `++key=` are Hydra's ways to write `key=`.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from grpo_vlm.config.faults import Fault

COMMAND_LINE = "command line"
BASE = "base"


@dataclass(frozen=True)
class Layer:
    """One source: its name for messages (may be empty), its nested values, and what could not be read of it."""

    source: str
    tree: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)
    unreadable: bool = False
    """True for a file of which nothing is known, so that nothing can be said about the keys of the others."""


def read_layers(
    path: str | os.PathLike | None, overrides: Sequence[str], base: Mapping[str, Any] | None
) -> list[Layer]:
    """All sources, the lowest first: the base dict, the file with the files under it, then the items in order."""
    files = [path] if path is not None else []
    files += [item.partition("=")[2] for item in overrides if item.startswith("config=")]
    items = [item for item in overrides if not item.startswith("config=")]
    read = [Layer("", _read_dict(base or {}))]
    if len(files) > 1:
        named = ", ".join(str(file) for file in files)
        text = (
            f"--config is given {len(files)} times ({named}); put what they share in one file and name it by `base:`"
        )
        read.append(Layer("", {}, [Fault((), text)]))
    for file in files[:1]:
        read += _read_file(os.fspath(file))
    return read + [_read_item(item) for item in items]


def merged(old: Any, new: Any) -> Any:
    """`new` on top of `old`, section by section; neither is changed."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {key: merged(old.get(key), new[key]) if key in new else old[key] for key in {**old, **new}}


def nested(key: str, value: Any) -> dict[str, Any]:
    """`a.b.c`, 1 -> {a: {b: {c: 1}}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _read_dict(base: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in base.items():
        if isinstance(key, str) and "." in key:
            value = nested(key, value)
            key = next(iter(value))
            value = value[key]
        tree[key] = merged(tree.get(key), value)
    return tree


def _read_file(name: str, seen: tuple[Path, ...] = ()) -> list[Layer]:
    """A file and, below it, the files that it and they name as their base."""
    file = Path(name).expanduser()
    shown = f"--config {name}" if not seen else f"base: {name} (in {seen[-1]})"
    if not file.is_file():
        return [_unreadable(name, f"{shown}: there is no such file; configs/ has examples")]
    if file.resolve() in [earlier.resolve() for earlier in seen]:
        return [_unreadable(name, f"{shown}: is its own base; remove one of the `base:` lines")]
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        return [_unreadable(name, f"{shown}: is not a YAML file: {' '.join(str(error).split())}")]
    if not isinstance(tree, dict):
        return [_unreadable(name, f"{shown}: is a {type(tree).__name__}; expected sections such as data:")]
    parent = tree.pop(BASE, None)
    own = [Layer(name, tree)]
    if parent is None:
        return own
    if not isinstance(parent, str):
        return [_unreadable(name, f"{shown}: base is {parent!r}; name one file, relative to this one")]
    return _read_file(str(file.parent / Path(parent).expanduser()), (*seen, file)) + own


def _unreadable(name: str, text: str) -> Layer:
    return Layer(name, {}, [Fault((), text)], unreadable=True)


def _read_item(item: str) -> Layer:
    key, equals, text = item.partition("=")
    key = re.sub(r"^\+{1,2}", "", key)
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        bare = key.lstrip("+-~")
        wanted = f"{bare}={text}" if equals else f"{bare}=VALUE"
        fault = Fault((bare,), f"{item} ({COMMAND_LINE}): is not of the form key=value; write e.g. {wanted}")
        return Layer(COMMAND_LINE, {}, [fault])
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        fault = Fault((key,), f"{item} ({COMMAND_LINE}): the value is not YAML, quotes may help: {problem}")
        return Layer(COMMAND_LINE, {}, [fault])
    return Layer(COMMAND_LINE, nested(key, value))
