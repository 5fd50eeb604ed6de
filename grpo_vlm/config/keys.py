"""The keys of the schema, and the valid key that an unknown one is most like."""

import difflib
from functools import cache

from grpo_vlm.config.options import Option, options, sections
from grpo_vlm.config.schema import Config


@cache
def schema_options() -> dict[str, Option]:
    """All keys of the schema: full dotted path -> Option."""
    return options(Config)


@cache
def schema_sections() -> frozenset[str]:
    """Full dotted paths of all sections of the schema."""
    return frozenset(sections(Config))


def nearest_key(key: str) -> str:
    """The valid key or section most like an unknown one, or an empty string."""
    valid = [*schema_options(), *schema_sections()]
    parent, _, name = key.rpartition(".")
    siblings = {item.rpartition(".")[2]: item for item in valid if item.rpartition(".")[0] == parent}
    if close := difflib.get_close_matches(name, siblings, 1, 0.6):
        return siblings[close[0]]
    same_name = [item for item in valid if item.rpartition(".")[2] == name]
    if same_name:  # the right name in the wrong section
        return max(same_name, key=lambda item: difflib.SequenceMatcher(None, key, item).ratio())
    return next(iter(difflib.get_close_matches(key, valid, 1, 0.8)), "")
