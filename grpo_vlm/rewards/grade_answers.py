"""What kind of answer a text is: a value, a list, a set, a tuple or interval, a relation, a ratio, or words.

Works on the one spelling of grade_spelling and never fails: what is nothing else is text.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from grpo_vlm.rewards.grade_spelling import OPENERS, PAIRS, closing, split_outside
from grpo_vlm.rewards.grade_syntax import (
    MAX_LENGTH,
    Node,
    Number,
    Operation,
    Unreadable,
    has_sign_choice,
    parse,
    symbols,
    with_sign,
)
from grpo_vlm.rewards.grade_units import Unit, split_unit
from grpo_vlm.rewards.grade_words import with_digits

MAX_ITEMS = 16  # of a list, set or tuple; longer ones are text
MAX_NESTING = 5
CACHED = 4096  # texts; a group of completions shares its gold

LIST_SEPARATOR = re.compile(r"\s*(?:[,;]\s*)?\b(?:and|or)\b\s*|\s*[,;]\s*")
UNION = re.compile(r"\s*(?:∪|\bU\b)\s*")
OPERATOR = re.compile(r"<=|>=|!=|==|[=<>≤≥≠≈≅∥⊥∼∈]")
SAME_OPERATOR = {"<=": "≤", ">=": "≥", "!=": "≠", "==": "="}
FLIPPED = {"<": ">", "≤": "≥"}
YEAR_FIRST = re.compile(r"([12]\d{3})[-/.](0?[1-9]|1[0-2])[-/.](0?[1-9]|[12]\d|3[01])")
YEAR_LAST = re.compile(r"(0?[1-9]|[12]\d|3[01])[-/.](0?[1-9]|[12]\d|3[01])[-/.]([12]\d{3})")
YEAR_AND_MONTH = re.compile(r"(?:19|20)\d{2}-0[1-9]")
TELEPHONE = re.compile(r"(?:\d{3}-)?\d{3}-\d{4}")
NO_SOLUTION = re.compile(
    r"∅|(?:the )?empty set|(?:(?:there )?(?:is|are) |(?:(?:the|this) (?:equation|system|problem|inequality) )?"
    r"(?:has|have) )?no (?:real )?solutions?(?: exists?)?",
    re.I,
)
ALL_REALS = re.compile(r"ℝ|(?:the set of )?all real numbers|all reals", re.I)
COLON = re.compile(r"\s*:\s*")
TIME = re.compile(r"(?:[01]?\d|2[0-4]):[0-5]\d(?::[0-5]\d)?")
THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
SPACED_THOUSANDS = re.compile(r"([-+]?)(\d{1,3}(?: \d{3})+)((?:\.\d+)?)")
LABEL = re.compile(
    r"[A-Za-zα-ω](?:_\{?\s*\w+\s*\}?)?′*|[A-Za-z]′*\s*\(\s*[a-z]\s*\)|m?\s*[∠△]\s*\w+(?: \w)*|[A-Z]+(?: [A-Z])*"
    r"|P\s*\([^()]{1,30}\)|[fgh]\s*\(\s*-?\d+(?:\.\d+)?\s*\)|\\(?:sin|cos|tan)\s*∠?\s*[A-Zα-ω]|\|\s*[A-Z]{2}\s*\|"
    r"|[A-Z]_\{\s*[△∠]\s*[A-Z]{1,5}\s*\}|(?:[A-Z]′?){2,4}"
    r"|(?:the )?[A-Za-z]{3,}(?: [A-Za-z]+){0,5}"
)
NAMES = re.compile(r"\(\s*([A-Za-zα-ω](?:\s*,\s*[A-Za-zα-ω]){1,5})\s*\)")
VARIABLE = re.compile(r"[A-Za-zα-ω](?:_\{?\s*\w+\s*\}?)?")
PREFIX = re.compile(r"(?:about|approximately|approx\.?|roughly|around|exactly|either|both|equals?|≈)\s+|≈\s*", re.I)
REPEATED = re.compile(r"([-+]?\d*)\.(\d*?)(?:(\d)\3{2,}|(\d{2,6})\4+)\.\.\.")
ARTICLE = re.compile(r"(?:the|a|an)\s+", re.I)
TEXT_NOISE = re.compile(r"[\"']|(?<!\w)\s+|\s+(?!\w)")
LONG_WORD = re.compile(r"[^\W\d_]+")
SHORT_WORDS = frozenset("no up on in if it is an at by of to or so we he me my do go as be us".split())
HYPHEN = re.compile(r"(?<=[A-Za-z][a-z][a-z])[-_](?=[^\W\d_])|(?<=[^\W\d_])[-_](?=[A-Za-z][a-z]{2})")
COMPASS = re.compile(r"\b(north|south)[- ](?=(?:east|west)\b)", re.I)
INITIALS = re.compile(r"(?<=\b[A-Z])\.\s?(?=[A-Z]\b)")  # U.S.
WORD = re.compile(r"(?:(?:an?|the)\s+)?[a-z]{3,}", re.I)
NAMED_VALUES = frozenset({"inf", "infty", "infinity"})


@dataclass(frozen=True)
class Answer:
    """kind: empty, value, list (unordered), set, union, tuple (also an interval), relation, ratio, text.

    text: the clean text. node and unit: of a value; of a relation, node is left minus right. items: the parts.
    sign: the brackets of a tuple, the operator of a relation, "and" or "or" of a list. label: x for "x = 5" and
    "x in [0, 1]".
    """

    kind: str
    text: str
    node: Node | None = None
    unit: Unit | None = None
    items: tuple["Answer", ...] = ()
    sign: str = ""
    label: str | None = None


@lru_cache(maxsize=CACHED)
def read(text: str) -> Answer:
    """The answer in a clean text."""
    return _read(text, 0)


@lru_cache(maxsize=CACHED)
def text_key(text: str) -> str:
    """What is compared of an answer in words: no case in words of three letters or more (Aa, CO, and NaCl, which has
    both within a word, keep theirs), no article and quotation marks, a hyphen as a space."""
    plain = text.strip(" ,;:!?") if text.endswith("...") else text.strip(" .,;:!?")
    plain = COMPASS.sub(r"\1", plain)
    plain = HYPHEN.sub(" ", INITIALS.sub("", ARTICLE.sub("", plain, 1)))
    return LONG_WORD.sub(_small, TEXT_NOISE.sub("", plain))


def _small(match: re.Match[str]) -> str:
    word = match[0]
    if len(word) < 3:
        return word.lower() if word[1:].islower() and word.lower() in SHORT_WORDS else word
    return word.casefold() if word.isupper() or word[1:].islower() else word


def _read(text: str, nesting: int, *, in_chain: bool = False) -> Answer:
    """in_chain: a side of 180-90-35 = 55, so what looks like a date is a difference."""
    text = PREFIX.sub("", text, count=1).strip() if PREFIX.match(text) else text
    if not text:
        return Answer("empty", text)
    if len(text) > MAX_LENGTH or nesting > MAX_NESTING:
        return Answer("text", text)
    if ALL_REALS.fullmatch(text):
        text = "(-∞,∞)"
    if NO_SOLUTION.fullmatch(text):
        return Answer("set", text)
    code = None if in_chain else _code(text)
    if code is not None:
        return Answer("text", code)
    text = with_digits(_without_thousands_marks(text))
    for reader in (_wrapped, _list, _relation, _union, _ratio, _value):
        answer = reader(text, nesting + 1)
        if answer is not None:
            return answer
    return Answer("text", text)


def _code(text: str) -> str | None:
    """A date or telephone number in one spelling; it is no difference or quotient. None for all else."""
    date = YEAR_FIRST.fullmatch(text) or YEAR_LAST.fullmatch(text)
    if date:
        return "-".join(str(int(part)) for part in date.groups())
    return text if TELEPHONE.fullmatch(text) or YEAR_AND_MONTH.fullmatch(text) else None


def _without_thousands_marks(text: str) -> str:
    """1,234,567 and 1 234 567; within brackets a comma always separates."""
    spaced = SPACED_THOUSANDS.fullmatch(text)
    if spaced:
        return spaced[1] + spaced[2].replace(" ", "") + spaced[3]
    if "," in text and OPENERS.isdisjoint(text):
        return THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    return text


def _wrapped(text: str, nesting: int) -> Answer | None:
    """{1, 2}, (1, 2), [0, 1), or brackets around one answer."""
    if text[0] not in PAIRS or closing(text, 0) != len(text) - 1:
        return None
    inside, right = text[1:-1].strip(), text[-1]
    parts = [part for _, part in split_outside(inside, re.compile(r"\s*[,;]\s*"))]
    if len(parts) > MAX_ITEMS:
        return None
    if text[0] in "{⦃":
        if right not in "}⦄":
            return None
        items = tuple(_read(part, nesting) for part in parts) if inside else ()
        return Answer("set", text, items=_flat(items))
    if len(parts) == 1:
        return _read(inside, nesting) if text[0] + right == "()" and inside else None
    return Answer("tuple", text, items=tuple(_read(part, nesting) for part in parts), sign=text[0] + right)


def _list(text: str, nesting: int) -> Answer | None:
    pieces = split_outside(text, LIST_SEPARATOR)
    parts = [part for _, part in pieces]
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts):
        return None
    joints = {joint.strip(" ,;") for joint, _ in pieces[1:]} - {""}
    if len(joints) > 1:  # p and q or r
        return None
    sign = joints.pop() if joints else ""
    items = _flat(tuple(_read(part, nesting) for part in parts))
    labels = {item.label for item in items[1:]}
    if items[0].label is not None and labels <= {None, items[0].label}:  # n = 2, 3, 4
        bare = tuple(replace(item, label=None) for item in items)
        return Answer("list", text, items=bare, sign=sign, label=items[0].label)
    return Answer("list", text, items=items, sign=sign)


def _flat(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """±3 within a list is two of its items."""
    flat: list[Answer] = []
    for item in items:
        if item.kind == "list":
            flat.extend(replace(part, label=part.label or item.label) for part in item.items)
        else:
            flat.append(item)
    return tuple(flat)


def _union(text: str, nesting: int) -> Answer | None:
    parts = [part for _, part in split_outside(text, UNION)]
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts):
        return None
    items = tuple(_read(part, nesting) for part in parts)
    return Answer("union", text, items=items) if all(i.kind in ("tuple", "set") for i in items) else None


def _relation(text: str, nesting: int) -> Answer | None:
    pieces = split_outside(text, OPERATOR)
    if len(pieces) == 1 or len(pieces) > MAX_ITEMS:
        return None
    signs = [SAME_OPERATOR.get(sign, sign) for sign, _ in pieces[1:]]
    sides = [side for _, side in pieces]
    if not sides[0] and len(sides) == 2 and signs[0] in "=≈":
        return _read(sides[1], nesting)
    if not all(sides):
        return None
    if set(signs) <= {"=", "≈"}:
        return _equation(text, signs, sides, nesting)
    if len(sides) == 2 and signs[0] == "∈":
        return replace(_read(sides[1], nesting), label=_label_key(sides[0]))
    if set(signs) <= set("<>≤≥"):
        return _interval(text, signs, sides, nesting) or _plain_relation(text, signs, sides, nesting)
    return _plain_relation(text, signs, sides, nesting)


def _equation(text: str, signs: list[str], sides: list[str], nesting: int) -> Answer | None:
    """x = 5, a chain whose sides agree, or an equation."""
    if len(sides) == 2 and VARIABLE.fullmatch(sides[1]) and not LABEL.fullmatch(sides[0]):
        sides = sides[::-1]  # 5 = x
    if len(sides) == 2 and NAMES.fullmatch(sides[0]):
        return _named_tuple(sides, nesting) or _plain_relation(text, signs, sides, nesting)
    if LABEL.fullmatch(sides[0]):
        rest, label = sides[1:], _label_key(sides[0])
    else:
        rest, label = sides, None
    while len(rest) > 1 and label is not None and LABEL.fullmatch(rest[0]):  # AB = CD = 5
        rest = rest[1:]
    if len(rest) == 1:
        return replace(_read(rest[0], nesting), label=label)
    values = [_read(side, nesting, in_chain=True) for side in rest]
    before = signs[-len(rest) :] if label is not None else ["", *signs]
    if label is not None and _constant_chain(values[-1:]):
        parts = [part for part in zip(before, rest, values, strict=True) if not _says_no_value(*part[1:])]
        before, rest, values = (list(column) for column in zip(*parts, strict=True))
    if label is None and len(rest) == 2 and signs == ["="] and not _constant_chain(values):
        return _plain_relation(text, signs, sides, nesting)
    if not _constant_chain(values):
        return None
    if len(values) == 1:
        return replace(values[0], label=label)
    return Answer("chain", text, items=tuple(values), sign="".join(before[1:]), label=label)


def _says_no_value(side: str, value: Answer) -> bool:
    """πr² and an ellipsis in A = πr² = ... = 9π."""
    return side == "..." or (value.kind == "value" and bool(symbols(value.node)))


def _named_tuple(sides: list[str], nesting: int) -> Answer | None:
    """(x, y) = (1, 2); only with the names in the alphabet's order, which is that of a tuple without names."""
    names = re.sub(r"[\s()]", "", sides[0]).split(",")
    value = _read(sides[1], nesting)
    if value.kind != "tuple" or value.sign != "()" or len(value.items) != len(names) or names != sorted(set(names)):
        return None
    return replace(value, label=f"({','.join(names)})")


def _constant_chain(values: list[Answer]) -> bool:
    return all(value.kind == "value" and not symbols(value.node) for value in values)


def _interval(text: str, signs: list[str], sides: list[str], nesting: int) -> Answer | None:
    """x > 3 as (3, ∞) and 0 < x <= 2 as (0, 2], both labelled x."""
    if set(signs) <= {">", "≥"}:  # read from the small end
        swap = {">": "<", "≥": "≤"}
        signs, sides = [swap[sign] for sign in signs[::-1]], sides[::-1]
    elif not set(signs) <= {"<", "≤"}:
        return None
    if len(sides) == 2:
        if VARIABLE.fullmatch(sides[0]):
            sides, signs = ["-∞", *sides], ["<", *signs]
        elif VARIABLE.fullmatch(sides[1]):
            sides, signs = [*sides, "∞"], [*signs, "<"]
    if len(sides) != 3 or not VARIABLE.fullmatch(sides[1]):
        return None
    ends = (_read(sides[0], nesting), _read(sides[2], nesting))
    if not _constant_chain(list(ends)):
        return None
    brackets = ("[" if signs[0] == "≤" else "(") + ("]" if signs[1] == "≤" else ")")
    return Answer("tuple", text, items=ends, sign=brackets, label=_label_key(sides[1]))


def _plain_relation(text: str, signs: list[str], sides: list[str], nesting: int) -> Answer | None:
    if len(sides) != 2:
        return None
    sign = signs[0]
    if sign in FLIPPED:
        sign, sides = FLIPPED[sign], sides[::-1]
    items = (_read(sides[0], nesting), _read(sides[1], nesting))
    return Answer("relation", text, node=difference(*items), items=items, sign=sign)


def difference(left: Answer, right: Answer) -> Node | None:
    """left - right of two values; None for other kinds."""
    if left.kind != "value" or right.kind != "value":
        return None
    return Operation("add", (left.node, Operation("multiply", (Number(Fraction(-1), "-1"), right.node))))


def _label_key(text: str) -> str:
    return re.sub(r"[\s{}]|^the ", "", text)


def _ratio(text: str, nesting: int) -> Answer | None:
    parts = [part for _, part in split_outside(text, COLON)]
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts):
        return None
    if len(parts) == 2 and LABEL.fullmatch(parts[0]) and len(parts[0]) > 2:  # Length: 5 cm
        return replace(_read(parts[1], nesting), label=_label_key(parts[0]))
    items = tuple(_read(part, nesting) for part in parts)
    return Answer("ratio", text, items=items) if all(item.kind == "value" for item in items) else None


def _value(text: str, nesting: int) -> Answer | None:
    if WORD.fullmatch(text) and text.lower() not in NAMED_VALUES:
        return None  # "cat", not c a t
    number, unit = split_unit(text)
    repeated = REPEATED.fullmatch(number)
    if repeated:
        return Answer("value", text, node=_repeating(repeated), unit=unit)
    number = _without_thousands_marks(number.strip())
    for formula, its_unit in ((number, unit), (text, None)):
        try:
            node = parse(formula)
        except Unreadable:
            continue
        if has_sign_choice(node):
            both = [Answer("value", text, node=with_sign(node, sign), unit=its_unit) for sign in (1, -1)]
            return Answer("list", text, items=tuple(both))
        return Answer("value", text, node=node, unit=its_unit)
    return None


def _repeating(match: re.Match[str]) -> Node:
    """0.1666... with the period 6 and 0.1212... with 12, as fractions."""
    whole, fixed, digit, block = match.groups()
    period = digit or block
    sign = -1 if whole.startswith("-") else 1
    start = int((whole.lstrip("+-") + fixed) or "0")
    value = Fraction(int(f"{start}{period}") - start, int("9" * len(period) + "0" * len(fixed)))
    top, bottom = Number(sign * Fraction(value.numerator), str(sign * value.numerator)), value.denominator
    return Operation("divide", (top, Number(Fraction(bottom), str(bottom))))
