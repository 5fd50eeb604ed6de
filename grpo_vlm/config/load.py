"""Read a configuration: schema < base dict < YAML file < key=value, finding every unknown key and wrong type.

OmegaConf stops at its first error, so each source is walked against the schema before it is merged.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from functools import cache
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_vlm.config.faults import Fault, raise_faults
from grpo_vlm.config.options import Option, options, sections
from grpo_vlm.config.schema import Config

# Keys of older EasyR1 versions and common slips -> what to write now.
MOVED = {
    "worker.actor.ulysses_sequence_parallel_size": "worker.actor.ulysses_size",
    "worker.reward.score_function": "worker.reward.reward_function",
    "worker.reward.compute_score": "worker.reward.reward_function",
    "worker.reward.score_function_kwargs": "worker.reward.reward_function_kwargs",
    "trainer.total_episodes": "trainer.total_epochs",
    "trainer.n_nodes": "trainer.nnodes",
    "data.format_prompt_path": "data.format_prompt",
}
REDACTED = "[redacted]"
_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
GONE = {
    "worker.reward.reward_type": "the constant REWARD_TYPE (batch or sequential) of the reward file says it; drop it",
}


@cache
def schema_options() -> dict[str, Option]:
    """All keys of the schema: full dotted path -> Option."""
    return options(Config)


@cache
def schema_sections() -> frozenset[str]:
    """Full dotted paths of all sections of the schema."""
    return frozenset(sections(Config))


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
    config, faults = read_config(path, overrides, base)
    raise_faults(faults)
    return config


def read_config(
    path: str | os.PathLike | None = None, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None
) -> tuple[Config, list[Fault]]:
    """As load_config, but hand the faults back; a faulty key keeps its default.

    Raises:
        ConfigError: the file cannot be read or an interpolation cannot be resolved, so that no more can be said.
    """
    merged, faults = asdict(Config()), []
    file_layer = _read_file(path)
    for source, tree, problems in (_read_base(base), file_layer, *map(_read_override, overrides)):
        good, more = walk(tree, source)
        faults += problems + more
        merged = _merged(merged, good)
    if file_layer[2]:
        raise_faults(faults)
    if "${" in repr(merged):
        try:
            merged = OmegaConf.to_container(OmegaConf.create(merged), resolve=True)
        except OmegaConfBaseException as error:
            raise_faults([*faults, Fault((), f"{error.full_key}: {str(error).splitlines()[0]}")])
    good, problems = walk(merged, "", interpolated=True)
    config = Config()
    fill(config, good)
    return config, faults + problems


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
    if key in GONE:
        return Fault((key,), f"{key}{source}: is no key; {GONE[key]}")
    near = nearest_key(key)
    remedy = f"did you mean {near}?" if near else "`python train.py --help` lists every key"
    return Fault((key, near), f"{key}{source}: unknown key; {remedy}")


def nearest_key(key: str) -> str:
    """The valid key or section most like an unknown one, or an empty string."""
    if key in MOVED:
        return MOVED[key]
    valid = [*schema_options(), *schema_sections()]
    parent, _, name = key.rpartition(".")
    siblings = {item.rpartition(".")[2]: item for item in valid if item.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(name, siblings, 1, 0.6):
        return siblings[close[0]]
    same_name = [item for item in valid if item.rpartition(".")[2] == name]
    if same_name:  # the right name in the wrong section
        return max(same_name, key=lambda item: difflib.SequenceMatcher(None, key, item).ratio())
    return next(iter(difflib.get_close_matches(key, valid, 1, 0.8)), "")


def _read_base(base: Mapping[str, Any] | None) -> tuple[str, dict, list[Fault]]:
    tree: dict[str, Any] = {}
    for key, value in (base or {}).items():
        if isinstance(key, str) and "." in key:
            value = _nest(key, value)
            key = next(iter(value))
            value = value[key]
        tree[key] = _merged(tree.get(key), value)
    return "", tree, []


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {key: _merged(old.get(key), new[key]) if key in new else old[key] for key in {**old, **new}}


def _nest(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _read_file(path: str | os.PathLike | None) -> tuple[str, dict, list[Fault]]:
    if path is None:
        return "", {}, []
    name = os.fspath(path)
    file = os.path.expanduser(name)
    if not os.path.isfile(file):
        return name, {}, [Fault((), f"--config {name}: there is no such file; configs/ has examples")]
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        return name, {}, [Fault((), f"--config {name}: is not a YAML file: {' '.join(str(error).split())}")]
    if not isinstance(tree, dict):
        return (
            name,
            {},
            [Fault((), f"--config {name}: is a {type(tree).__name__}; expected sections such as data:")],
        )
    return name, tree, []


def _read_override(item: str) -> tuple[str, dict, list[Fault]]:
    source = "command line"
    key, equals, _ = item.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        bare = key.lstrip("+-~")
        wanted = f"{bare}=VALUE" if not equals else f"{bare}={item.partition('=')[2]}"
        return source, {}, [Fault((bare,), f"{item} ({source}): is not of the form key=value; write e.g. {wanted}")]
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={item.partition('=')[2]}"]))["value"]
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        return source, {}, [Fault((key,), f"{item} ({source}): the value is not YAML, quotes may help: {problem}")]
    return source, _nest(key, value), []
