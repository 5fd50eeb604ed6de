"""Option letters: B, (B), "B. 12 cm", "option B", "B because ..."; and not "A or B", "not A", "A car"."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

LETTER = re.compile(
    r"(?:(?:the|correct|option|choice|answer|is)\s*:?\s+){0,6}(?P<open>[(\[{]?)\s?(?P<letter>[A-Za-z])"
    r"(?:\s?(?P<close>[)\]}]))?(?:\s?(?P<stop>[.:,;]))?(?P<rest>.*)",
    re.DOTALL,
)
CASELESS_WORDS = re.compile(r"^(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\b", re.I)
REASON = re.compile(r"\s+(?:because|since|as|is\s+(?:right|correct|true)|for|due|which|so|given|[-–—(])(?=[\s\w]|$)")
HEDGED = re.compile(
    r"^\s*(?:[,/&+]|or\b|and\b|and/or\b)\s*(?:also\s+|maybe\s+|possibly\s+)?[(\[]?[A-Z](?![\w'])"
    r"|\bor\s+(?:maybe\s+|possibly\s+|perhaps\s+|even\s+|option\s+)?[(\[]?[A-Z](?![\w'])"
    r"|\b(?:could|may|might)\s+(?:also\s+)?be\s+[(\[]?[A-Z](?![\w'])"  # B (but could be C)
    r"|(?:^|[\s;,(])[(\[]?[B-HJ-Z][)\]](?:\s|[(\[]|$)"  # A) 1 B) 2: the list of options; (A)(B)
    r"|^\s*(?:[(\[]?[A-Z][)\]]?\s*[.,;]?\s*$|(?:is\s+)?(?:false|wrong|incorrect|not\s+(?:right|correct|true))\b)"
)
SINGLE = re.compile(r"[(\[]?\s?([A-Z])\s?[)\]]?[.:]?")
WITH_TEXT = re.compile(r"[(\[]?([A-Z])(?:[)\]][.:]?\s*|[.:]\s+)(?P<text>\S.*)", re.DOTALL)
BARE = re.compile(r"([A-Z])\s+(?P<text>\S.*)", re.DOTALL)
SEVERAL = re.compile(r"[A-F]{2,6}")
SEPARATED = re.compile(r"[A-F](?:(?:\s*,\s*(?:and\s+)?|\s+and\s+)[A-F]){1,5}")


@dataclass(frozen=True)
class Option:
    """letter: upper case, or None when the text names several. text: what stands behind the letter."""

    letter: str | None
    text: str = ""


def read_option(text: str) -> Option | None:
    """The option that a clean text names; None when it names none."""
    lowered = CASELESS_WORDS.sub(lambda match: match[0].lower(), text)
    match = LETTER.fullmatch(lowered)
    if match is None:
        return None
    letter, rest = match["letter"], match["rest"]
    bracketed = bool(match["open"] and match["close"])
    if not rest.strip():
        return Option(letter.upper()) if not match["open"] or bracketed else None
    if letter.islower() and not match["close"] and match["stop"] not in (".", ":"):
        return None
    if HEDGED.search(match["stop"] + rest if match["stop"] in (",", ";") else rest):
        return Option(None)
    if bracketed or match["close"]:
        return Option(letter.upper(), rest.strip())
    if match["stop"] in (".", ":") and rest[0] == " ":
        return Option(letter.upper(), rest.strip())
    if match["stop"] in (",", ";") and rest[0] == " ":
        return Option(letter)
    return Option(letter) if REASON.match(rest) else None


def gold_option(text: str) -> Option | None:
    """The option that a clean gold is: one capital letter, alone or before its text."""
    single = SINGLE.fullmatch(text)
    if single:
        return Option(single[1])
    match = WITH_TEXT.fullmatch(text)
    return Option(match[1], match["text"].strip()) if match else None


def without_letters(options: Sequence[str]) -> tuple[str, ...]:
    """The options' texts; where every one begins with its own letter, as (A) 12, (B) 15, that is no part of them."""
    matches = [WITH_TEXT.fullmatch(text) for text in options]
    if not all(match and match[1] == chr(ord("A") + index) for index, match in enumerate(matches)):
        return tuple(options)
    return tuple(match["text"].strip() for match in matches)


def letter_and_text(answer: str, options: Sequence[str]) -> Option | None:
    """The option in "B 15 cm", where 15 cm is the text of B."""
    match = BARE.fullmatch(answer)
    if match is None or not ord(match[1]) - ord("A") < len(options):
        return None
    return Option(match[1]) if options[ord(match[1]) - ord("A")] == match["text"] else None


def letters_of(gold: str, answer: str) -> bool:
    """Whether a gold BC, several letters of options in their order, is the answer "B, C" or "C and B"."""
    if not SEVERAL.fullmatch(gold) or list(gold) != sorted(set(gold)):
        return False
    return SEPARATED.fullmatch(answer) is not None and sorted(re.findall(r"[A-F]", answer)) == list(gold)
