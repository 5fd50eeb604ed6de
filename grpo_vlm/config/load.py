"""Read a configuration: schema < base dict < YAML file < key=value, finding every unknown key and wrong type.

What EasyR1 and verl call otherwise is translated first (dialects.py). OmegaConf stops at its first error, so each
source is walked against the schema before it is merged.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_vlm.config.dialects import translated
from grpo_vlm.config.faults import Fault, raise_faults
from grpo_vlm.config.keys import nearest_key, schema_options, schema_sections
from grpo_vlm.config.layers import merged, read_layers
from grpo_vlm.config.options import Option
from grpo_vlm.config.schema import Config

REDACTED = "[redacted]"
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)


def load_config(
    path: str | os.PathLike | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> Config:
    """Read the configuration.

    Args:
        path: YAML file, or None.
        overrides: `key=value` items with full dotted keys; values are read as YAML.
        base: the lowest layer above the defaults, nested or with dotted keys, for notebooks.

    Raises:
        ConfigError: lists all unknown keys, wrong types and unreadable sources.
    """
    config, faults, _ = read_config(path, overrides, base)
    raise_faults(faults)
    return config


def read_config(
    path: str | os.PathLike | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> tuple[Config, list[Fault], list[str]]:
    """As load_config, but hand back the faults, and notices about what was translated; a faulty key keeps its default.

    Raises:
        ConfigError: the file cannot be read or an interpolation cannot be resolved, so that no more can be said.
    """
    tree = asdict(Config())
    layers, notices, faults = translated(read_layers(path, overrides, base))
    for layer in layers:
        good, more = walk(layer.tree, layer.source)
        faults += layer.faults + more
        tree = merged(tree, good)
    if any(layer.unreadable for layer in layers):
        raise_faults(faults)
    if "${" in repr(tree):
        try:
            tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
        except OmegaConfBaseException as error:
            raise_faults([*faults, Fault((), f"{error.full_key}: {str(error).splitlines()[0]}")])
    good, problems = walk(tree, "", interpolated=True)
    config = Config()
    fill(config, good)
    return config, faults + problems, notices


def fill(section: Any, values: Mapping[str, Any]) -> None:
    """Put values that `walk` found sound into a section and the sections below it, in place."""
    for name, value in values.items():
        if is_dataclass(getattr(section, name)):
            fill(getattr(section, name), value)
        else:
            setattr(section, name, value)


def to_yaml(config: Config, *, redact: bool = False) -> str:
    """The whole configuration as YAML, every key with its value; `load_config` reads it back to an equal Config.

    Args:
        redact: replace texts in worker.reward.reward_function_kwargs whose key sounds like a secret by [redacted].
    """
    tree = asdict(config)
    if redact:
        reward = tree["worker"]["reward"]
        reward["reward_function_kwargs"] = _redacted(reward["reward_function_kwargs"])
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def _redacted(value: Any, secret: bool = False) -> Any:
    """A copy in which every text at or below a key that sounds like a secret is replaced."""
    if isinstance(value, Mapping):
        return {key: _redacted(inner, secret or bool(_SECRET.search(key))) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted(inner, secret) for inner in value]
    return REDACTED if secret and isinstance(value, str) else value


def walk(tree: Mapping, source: str, *, interpolated: bool = False) -> tuple[dict, list[Fault]]:
    """Compare a nested dict with the schema.

    Args:
        tree: nested dict.
        source: shown in messages, e.g. the file's name; may be empty.
        interpolated: False leaves `${...}` strings alone, because their values are not known yet.

    Returns: the sound part with values converted to their types, and a fault for each unknown key and wrong type.
    """
    return _walk(tree, "", f" ({source})" if source else "", interpolated)


def _walk(tree: Mapping, prefix: str, source: str, interpolated: bool) -> tuple[dict, list[Fault]]:
    good: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in schema_sections():
            if isinstance(value, Mapping):
                good[name], problems = _walk(value, f"{key}.", source, interpolated)
                faults += problems
            elif value is not None:  # `actor:` with nothing below it is an empty section
                faults.append(
                    Fault((key,), f"{key}{source}: is a section and cannot be {value!r}; set the keys below it")
                )
        elif key not in schema_options():
            faults.append(_unknown(key, source))
        elif isinstance(value, str) and "${" in value and not interpolated:
            good[name] = value
        else:
            option = schema_options()[key]
            good[name] = convert(value, option.kind, option.optional)
            if good[name] is _WRONG:
                del good[name]
                text = f"{key}{source}: is {_shown(value)}; expected {option.type_text}{_hint(value, option)}"
                faults.append(Fault((key,), text))
    return good, faults


class _Wrong:
    """The type of the mark for a value that does not fit."""


_WRONG = _Wrong()
_TRUTHS = {"true": True, "false": False}


def fits(value: Any, kind: str, optional: bool = False) -> bool:
    """Whether a value is of a kind that Option names."""
    return convert(value, kind, optional) is not _WRONG


def convert(value: Any, kind: str, optional: bool = False) -> Any:
    """The value as its kind, or a mark.

    Text that spells a number or a truth value fits, as `${oc.env:N}` gives only text. `???` is OmegaConf's gap.
    """
    if value == "???":
        return _WRONG
    if value is None:
        return None if optional else _WRONG
    if kind.startswith("list["):
        if not isinstance(value, list | tuple):
            return _WRONG
        items = [convert(item, kind[5:-1]) for item in value]
        return _WRONG if any(item is _WRONG for item in items) else items
    if kind == "dict":
        return dict(value) if isinstance(value, Mapping) and _is_plain(value) else _WRONG
    if kind == "bool":
        return value if isinstance(value, bool) else _TRUTHS.get(str(value).lower(), _WRONG)
    if isinstance(value, bool):
        return _WRONG
    if kind == "str":
        return str(value) if isinstance(value, str | int | float | os.PathLike) else _WRONG
    if not isinstance(value, str | int | float) or (kind == "int" and isinstance(value, float)):
        return _WRONG
    pattern = r"[+-]?\d+" if kind == "int" else r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if isinstance(value, str) and not re.fullmatch(pattern, value):
        return _WRONG
    return int(value) if kind == "int" else float(value)


def _is_plain(value: Any) -> bool:
    """Whether YAML can hold the value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, bool | int | float | str)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    kind = "a section" if isinstance(value, Mapping) else type(value).__name__
    return f"{value!r} ({kind})"


def _hint(value: Any, option: Option) -> str:
    if option.kind == "str" and isinstance(value, bool):
        return " (put quotes around it if the word is meant)"
    if option.kind == "str" and isinstance(value, list | tuple):
        return " (one value, no list)"
    if option.kind == "dict" and isinstance(value, Mapping):
        return " of values that YAML can hold (numbers, text, lists, null)"
    if option.kind.startswith("list[") and isinstance(value, str):
        return f", e.g. [{value}]"
    if value is None:
        return f" (default {option.default!r})"
    return ""


def _unknown(key: str, source: str) -> Fault:
    near = nearest_key(key)
    remedy = f"did you mean {near}?" if near else "`python train.py --help` lists every key"
    return Fault((key, near), f"{key}{source}: unknown key; {remedy}")
