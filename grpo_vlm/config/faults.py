"""Faults of a configuration, collected so that the user sees all of them at once."""

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_vlm.errors import ConfigError


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    keys: tuple[str, ...]
    """Full dotted paths of the keys involved."""
    message: str
    """What is wrong, the value seen and the remedy; starts with the key."""


def raise_faults(faults: Iterable[Fault], closing: str = "") -> None:
    """Raise one ConfigError that numbers all faults; do nothing when there are none.

    Args:
        faults: the faults; equal messages are shown once.
        closing: a last line, e.g. a set of values that satisfies every rule.
    """
    messages = list(dict.fromkeys(fault.message for fault in faults))
    if not messages:
        return
    count = "1 fault" if len(messages) == 1 else f"{len(messages)} faults"
    lines = [f"The configuration has {count}:", *(f"  {i}. {text}" for i, text in enumerate(messages, 1))]
    if closing:
        lines.append(closing)
    raise ConfigError("\n".join(lines))
