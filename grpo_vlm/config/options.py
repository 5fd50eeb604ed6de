"""What one configuration key is: its default, its help, what it accepts and whether it works in this version.

The schema's dataclasses carry this as field metadata; the loader, the checks, --help and docs/options.md all read it
from here, so that nothing is described twice. Standard library only.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any

WORKS = "works"
NEUTRAL = "neutral"  # accepted, changes no result in this version; a startup line says so when it is set
PLANNED = "planned"  # refused with its reason when it is set to anything but the default


@dataclass(frozen=True)
class Rule:
    """A condition on one value: `text` completes "must be ..."."""

    text: str
    holds: Callable[[Any], bool]


def above(low: float) -> Rule:
    return Rule(f"greater than {low:g}", lambda value: value > low)


def at_least(low: float) -> Rule:
    return Rule(f"at least {low:g}", lambda value: value >= low)


def between(low: float, high: float) -> Rule:
    return Rule(f"between {low:g} and {high:g}", lambda value: low <= value <= high)


def from_to_below(low: float, high: float) -> Rule:
    return Rule(f"at least {low:g} and below {high:g}", lambda value: low <= value < high)


def above_to(low: float, high: float) -> Rule:
    return Rule(f"above {low:g} and at most {high:g}", lambda value: low < value <= high)


def off_or_at_least(low: int) -> Rule:
    return Rule(f"-1 or at least {low}", lambda value: value == -1 or value >= low)


@dataclass(frozen=True)
class Option:
    """One key of the configuration, as `options()` lists it."""

    key: str
    """Full dotted path, e.g. `worker.actor.optim.lr`."""
    kind: str
    """int, float, bool, str, list[str], list[float] or dict."""
    optional: bool
    """True when null is a value."""
    default: Any
    help: str
    status: str
    reason: str
    """Why a planned key or a value outside `choices` is refused, or why a neutral key changes nothing."""
    choices: tuple
    refused: dict[str, str]
    """Values that other trainers know and this version refuses -> reason."""
    rule: Rule | None
    common: bool
    example: str

    @property
    def type_text(self) -> str:
        return f"{self.kind} or null" if self.optional else self.kind


def option(
    default: Any,
    help: str,
    *,
    status: str = WORKS,
    reason: str = "",
    choices: tuple = (),
    refused: dict[str, str] | None = None,
    rule: Rule | None = None,
    common: bool = False,
    example: str = "",
) -> Any:
    """Declare a key of the schema. Lists and dicts are copied for each instance."""
    metadata = {
        "help": help,
        "status": status,
        "reason": reason,
        "choices": choices,
        "refused": refused or {},
        "rule": rule,
        "common": common,
        "example": example,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def planned(default: Any, help: str, reason: str) -> Any:
    """Declare a key that is refused, with the reason, unless it keeps its default."""
    return option(default, help, status=PLANNED, reason=reason)


def neutral(default: Any, help: str, reason: str) -> Any:
    """Declare a key that is accepted with any value of its type and changes nothing, for the reason given."""
    return option(default, help, status=NEUTRAL, reason=reason)


def section(cls: type, *, reason: str = "", status: str = PLANNED) -> Any:
    """Declare a nested section. With a reason, every key below it has that status, whatever the section's class
    says."""
    return field(default_factory=cls, metadata={"reason": reason, "status": status})


def options(cls: type, prefix: str = "", above: tuple[str, str] = ("", "")) -> dict[str, Option]:
    """All keys of a schema dataclass in order of declaration: full dotted path -> Option. above: status and reason of
    the section that holds it, when it has a reason."""
    hints = typing.get_type_hints(cls)
    found: dict[str, Option] = {}
    for item in fields(cls):
        key = f"{prefix}{item.name}"
        if is_dataclass(hints[item.name]):
            own = (item.metadata["status"], item.metadata["reason"])
            found |= options(hints[item.name], f"{key}.", own if own[1] else above)
        else:
            found[key] = _read(key, item, hints[item.name], *above)
    return found


def sections(cls: type, prefix: str = "") -> list[str]:
    """Full dotted paths of all nested sections."""
    hints = typing.get_type_hints(cls)
    found = []
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            found += [f"{prefix}{item.name}", *sections(hints[item.name], f"{prefix}{item.name}.")]
    return found


def _read(key: str, item: Field, hint: Any, status: str, reason: str) -> Option:
    about = dict(item.metadata)
    if reason:
        about |= {
            "status": status,
            "reason": reason,
            "choices": (),
            "refused": {},
            "rule": None,
            "common": False,
        }
    kind, optional = _kind(hint)
    default = item.default if item.default is not MISSING else item.default_factory()
    return Option(key=key, kind=kind, optional=optional, default=default, **about)


def _kind(hint: Any) -> tuple[str, bool]:
    """Name of a field's type, and whether null is allowed."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (inner,) = (part for part in typing.get_args(hint) if part is not type(None))
        return _kind(inner)[0], True
    if typing.get_origin(hint) is list:
        return f"list[{typing.get_args(hint)[0].__name__}]", False
    if typing.get_origin(hint) is dict:
        return "dict", False
    return hint.__name__, False
