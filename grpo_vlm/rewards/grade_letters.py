"""Option letters: B, (B), "B. 12 cm", "option B", "B because ..."; and not "A or B", "not A", "A car"."""

import re
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
