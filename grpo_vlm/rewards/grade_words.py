"""Numbers in words as digits: "two hundred and five", "minus twenty-one", "two and a half", "a dozen", "5 million".

Only what stands at the beginning of a text is read, and only whole: what is left over must not begin with another
number word, so "five or six" and "two three" stay words.
"""

import re
from fractions import Fraction

ONES = dict(
    zip(
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
        "seventeen eighteen nineteen".split(),
        range(20),
        strict=True,
    )
)
TENS = dict(zip("twenty thirty forty fifty sixty seventy eighty ninety".split(), range(20, 100, 10), strict=True))
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
PARTS = {"half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100, "thousandth": 1000}
PARTS |= {f"{name}s": value for name, value in PARTS.items() if name not in ("half", "halves")}
WORD = re.compile(r"[-\s]*([A-Za-z]+)")
BEGIN = re.compile(r"(?:(?P<sign>minus|negative)\s+|(?P<article>the|an?)\s+)?(?=(?P<word>[A-Za-z]+))", re.I)
SCALED = re.compile(
    r"(?<![\w.,/^])(\d+(?:\.\d+)?)[ -](dozen|hundred|thousand|million|billion|trillion)\b(?!s?[ -]?(?:and\b|\d))", re.I
)
DIGITS_PART = re.compile(
    r"(\d{1,6})[ -](halves|thirds|fourths|quarters|fifths|sixths|sevenths|"
    r"eighths|ninths|tenths|hundredths|thousandths)",
    re.I,
)
SCALE = re.compile(r"dozen|hundred|thousand|illion", re.I)
MANY = {"dozen": 12, "hundred": 100, **SCALES}
NUMBER_WORDS = ONES.keys() | TENS.keys() | SCALES.keys() | PARTS.keys() | {"hundred", "dozen"}
MOST_WORDS = 16


def with_digits(text: str) -> str:
    """The text with the number at its beginning in digits; as it is when it begins with none."""
    parts = DIGITS_PART.fullmatch(text)
    if parts:
        return f"({Fraction(int(parts[1]), PARTS[parts[2].lower()] if parts[2].lower() in PARTS else 2)})"
    text = SCALED.sub(_scaled, text, count=1) if SCALE.search(text) else text
    begin = BEGIN.match(text)
    if begin is None or begin["word"].lower() not in NUMBER_WORDS:
        return text
    words, ends = _words(text, begin.end())
    value, used = _read(words, (begin["article"] or "").lower() in ("a", "an"))
    if value is None or text[ends[used - 1] :].startswith("-") or (used < len(words) and words[used] in NUMBER_WORDS):
        return text
    digits = str(value) if value.denominator == 1 else f"({value})"
    return f"{'-' if begin['sign'] else ''}{digits}{text[ends[used - 1] :]}"


def is_number(text: str) -> bool:
    """Whether a text is one number in words and nothing else."""
    digits = with_digits(text)
    return digits != text and not any(character.isalpha() for character in digits)


def _scaled(match: re.Match[str]) -> str:
    value = Fraction(match[1]) * MANY[match[2].lower()]
    return str(value) if value.denominator == 1 else match[0]


def _words(text: str, position: int) -> tuple[list[str], list[int]]:
    """The words that follow each other, in lower case, and where each ends."""
    words, ends = [], []
    while len(words) < MOST_WORDS and (match := WORD.match(text, position)):
        words.append(match[1].lower())
        ends.append(match.end())
        position = match.end()
    return words, ends


def _read(words: list[str], article: bool) -> tuple[Fraction | None, int]:
    """The number at the beginning of the words and how many of them it takes. article: "a" stands before them, which
    is a one for hundred, half and the like."""
    if article and words[0] in PARTS:
        return Fraction(1, PARTS[words[0]]), 1
    if article and (words[0] in SCALES or words[0] in ("hundred", "dozen")):
        words, offset = ["one", *words], 1
    else:
        offset = 0
    value, used = _whole(words)
    if value is None:
        return None, 0
    rest = words[used:]
    if rest[:1] == ["dozen"]:
        return Fraction(12 * value), used + 1 - offset
    if rest and rest[0] in PARTS and value > 0 and (value == 1) == (not rest[0].endswith("s")):
        return Fraction(value, PARTS[rest[0]]), used + 1 - offset
    if rest[:2] == ["and", "a"] and rest[2:3] and rest[2] in PARTS:
        return value + Fraction(1, PARTS[rest[2]]), used + 3 - offset
    if (
        rest[:1] == ["and"]
        and len(rest) > 2
        and rest[1] in ONES
        and rest[2] in PARTS
        and ONES[rest[1]] < PARTS[rest[2]]
    ):
        return value + Fraction(ONES[rest[1]], PARTS[rest[2]]), used + 3 - offset
    return Fraction(value), used - offset


def _whole(words: list[str]) -> tuple[int | None, int]:
    """A whole number: groups below a thousand, each with its scale, in falling order."""
    total, used, last = 0, 0, 10**15
    while used < len(words):
        group, taken = _below_thousand(words[used + (words[used] == "and" and used > 0) :])
        if group is None:
            break
        taken += words[used] == "and" and used > 0
        scale = SCALES.get(words[used + taken], 1) if used + taken < len(words) else 1
        if scale >= last:
            break
        total, used, last = total + group * scale, used + taken + (scale > 1), scale
        if scale == 1:
            break
    return (total, used) if used else (None, 0)


def _below_thousand(words: list[str]) -> tuple[int | None, int]:
    value, used = _below_hundred(words)
    if value is None or not 0 < value < 100 or words[used : used + 1] != ["hundred"]:
        return value, used
    value, used = 100 * value, used + 1
    joined = words[used : used + 1] == ["and"]
    more, taken = _below_hundred(words[used + joined :])
    after = words[used + joined + taken : used + joined + taken + 1]
    if more and not (after and after[0] in PARTS):  # two hundred and one third: not 201
        return value + more, used + joined + taken
    return value, used


def _below_hundred(words: list[str]) -> tuple[int | None, int]:
    if words and words[0] in TENS:
        one = ONES.get(words[1]) if len(words) > 1 else None
        return (TENS[words[0]] + one, 2) if one and one < 10 else (TENS[words[0]], 1)
    return (ONES[words[0]], 1) if words and words[0] in ONES else (None, 0)
