"""Grades a final answer against the right one. Safe from any thread; its time and memory are bounded for any input.

    >>> grade("<think>...</think> so \\boxed{2\\sqrt{3}}", "\\sqrt{12}").correct
    True

The policies, each with a test in tests/rewards/test_grade_policies.py:

- Which answer: see grade_extraction; the last one counts, with a unit that stands behind its box. An answer inside the
  thinking, an empty one, a box that does not close, an answer that hedges ("A or B", "3 or 4") and one that is denied
  or only supposed ("not \\boxed{5}", "suppose the answer is 5") are wrong. Boxes side by side are a list. An
  <answer> that is not closed reaches to the end. The gold is read the same way.
- Numbers are compared exactly: 1/2, 0.5, 2/4 and 50% are equal, 0.33 is not 1/3. A decimal with 10 or more significant
  digits stands for the exact number next to it. A decimal gold with 3 or more significant digits was rounded: an exact
  answer (a fraction, a root, π) that rounds to it is right, 100/3 for 33.3; another decimal never is.
- tolerance: absolute, for every number in the answer, in the gold's unit: |answer - gold| <= tolerance; not for
  numbers in another base.
- Percent: 50% is 50 and 0.5; without a sign nothing is scaled, 28 is not 0.28.
- Degrees and units: what one side leaves out is not compared (31° is 31, 5 cm is 5); what both write is: 5 cm is 50
  mm, not 5 m, and 5 apples are not 5 pears. The case of a unit counts: 5 mm is not 5 Mm. Only a noun in the plural
  is left out: 5 lakh, 5 tens and 5 doubled are not 5. A gold 100m (m, g or N behind a number) is 100 m.
- Dates (2024-01-05 is 2024/1/5) and telephone numbers are no differences; 180-90-35 is one.
- 4 4/9 and 4\\frac{4}{9} are mixed numbers when the fraction is proper.
- 7,425,000, 7 425 000 and 7{,}425{,}000 are one number; within brackets a comma separates: (1,000) is the pair 1, 0. A
  decimal comma is read only where the gold has a decimal point: 1000,99 for 1000.99; a gold 1,2 is never 1.2.
- Unbracketed lists and sets are unordered, tuples ordered; brackets of tuples and intervals must agree; an interval
  may be written as an inequality. ±3 is the list 3, -3. A list is wrong where one value is wanted. (x, y) = (1, 2) is
  (1, 2) with the names in the alphabet's order, and so is x = 1, y = 2. "No solution" is the empty set. "And" is not
  "or", but for the values of one unknown: x = 2 or x = -2.
- x = 5 is 5; a different name on the other side is wrong. Equations agree when one is a multiple of the other; what
  else stands beside a relation (for all x > 0, ...) makes it another one. A chain such as 26/2 = 13 counts as its
  value if its sides agree; in A = πr² = 9π the side with variables is not compared.
- Ratios agree in proportion and with the fraction; times of day such as 12:00 part by part.
- Formulas with variables agree when they are equal wherever both have real values. e and i are constants, \\log is to
  base 10, \\sin^{-1} is the arcsine. A prime belongs to its letter: A' is not A.
- Words agree without regard to case (from three letters on: CO is not Co), articles, quotation marks, and whether a
  hyphen or a space joins them; numbers may be spelled. "No, because ..." is no; "no idea" and "no answer" are not. A
  gold of several sentences or more than 20 words cannot be graded: nothing is right.
- Option letters: with `choices` gold and prediction may each be the letter or the text of an option; "B. 12 cm" must
  not contradict the option's text. Without, a letter is read where the gold is one capital letter.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards import grade_symbolic
from grpo_vlm.rewards.grade_answers import read, text_key
from grpo_vlm.rewards.grade_comparison import agree
from grpo_vlm.rewards.grade_extraction import MAX_ANSWER, find_answer, last_box, last_tag, with_prefill
from grpo_vlm.rewards.grade_letters import (
    WITH_TEXT,
    gold_option,
    letter_and_text,
    letters_of,
    read_option,
    without_letters,
)
from grpo_vlm.rewards.grade_numbers import TooLarge, Undefined, is_complex
from grpo_vlm.rewards.grade_spelling import clean
from grpo_vlm.rewards.grade_syntax import symbols
from grpo_vlm.rewards.grade_values import evaluate

__all__ = ["Verdict", "grade", "last_box", "last_tag", "value_of", "with_prefill"]

MAX_GOLD = 400  # characters
MAX_WORDS = 20  # of a gold in words
MAX_CHOICES = 26
CACHED = 4096
SENTENCES = re.compile(r"(?:\d|[a-z]{4}|\))[.!?]\s+[A-Z][a-z]")
STUCK_UNIT = re.compile(r"(?P<number>.*[\d)}π])(?P<unit>[mgN](?:\s*\^\s*\{?\s*[23]\s*\}?)?)")
GAP = re.compile(r"(?<![\w.])\s+|\s+(?![\w.])")  # a space that separates nothing: not that of "4 4/9"
YES_NO = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
YES_NO_ANSWER = re.compile(  # "no, they cross", "no because ..."; "no idea", "no. 5" and "true love" are other answers
    r"(yes|no|true|false)(?P<rest>(?:\s*[,.:;!(]\s*(?=[^\W\d])|\s+-+\s+|\s+(?:because|since|as|it|they|he|she|we|you|this|that|"
    r"these|those|there|the)\b)(?!(?:or|and)\b).*)?",
    re.I | re.DOTALL,
)
UNSURE = re.compile(
    r"\b(?:idea|clue|unsure|unclear|unknown|maybe|perhaps|not\s+(?:sure|certain|clear)|(?:do\s+not|don't|can't|cannot|could\s+not|"
    r"couldn't)\s+(?:know|tell|say|determine|be\s+determined))\b",
    re.I,
)


@dataclass(frozen=True)
class Verdict:
    """correct: right or wrong. extracted: what was graded; None when no answer was found. reason: why, for people."""

    correct: bool
    extracted: str | None
    reason: str

    def __bool__(self) -> bool:
        return self.correct


def grade(prediction: str, gold: str, *, choices: Sequence[str] | None = None, tolerance: float = 0.0) -> Verdict:
    """Whether the final answer in `prediction`, a whole completion or an answer alone, is `gold`.

    choices: the texts of the options A, B, C, ... tolerance: absolute, 0 for exact.
    Raises RewardError for arguments that are not of these types; for no text whatsoever.
    """
    _check(prediction, gold, choices, tolerance)
    wanted = _gold(gold)
    if isinstance(wanted, Verdict):
        return wanted
    found = find_answer(prediction)
    if not found.candidates:
        return Verdict(False, None, found.reason)
    limit = Fraction(str(float(tolerance)))
    grade_symbolic.start_budget()
    options = None if choices is None else without_letters([clean(choice[:MAX_ANSWER]) for choice in choices])
    for candidate in found.candidates:
        reason = _judge(clean(candidate[:MAX_ANSWER]), wanted, options, limit)
        if reason is not None:
            return Verdict(reason.right, candidate, reason.text)
    return Verdict(False, found.candidates[0], f"not equal to the gold {wanted!r}")


def value_of(text: str) -> float | None:
    """The number in a final answer or a whole completion, its unit left out; None when it has none."""
    for candidate in find_answer(text).candidates:
        answer = read(clean(candidate[:MAX_ANSWER]))
        if answer.kind == "value" and not symbols(answer.node):
            try:
                value = evaluate(answer.node)
                return None if is_complex(value) else float(value)
            except (TooLarge, Undefined, OverflowError):
                return None
    return None


@dataclass(frozen=True)
class _Decision:
    right: bool
    text: str


def _check(prediction: str, gold: str, choices: Sequence[str] | None, tolerance: float) -> None:
    problems = [
        f"{name} must be a string, it is {type(value).__name__} {str(value)[:60]!r}"
        for name, value in (("prediction", prediction), ("gold", gold))
        if not isinstance(value, str)
    ]
    if choices is not None:
        if isinstance(choices, str) or not all(isinstance(choice, str) for choice in choices):
            problems.append(f"choices must be a list of strings, one an option, it is {str(choices)[:60]!r}")
        elif not 0 < len(choices) <= MAX_CHOICES:
            problems.append(f"choices must be 1 to {MAX_CHOICES} options, there are {len(choices)}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < math.inf:
        problems.append(f"tolerance must be a finite number of at least 0, it is {tolerance!r}")
    if problems:
        raise RewardError(f"grade: {'; '.join(problems)}")


@lru_cache(maxsize=CACHED)
def _gold(gold: str) -> str | Verdict:
    """The clean answer in a gold, or the verdict that nothing can be graded against it."""
    found = find_answer(gold)
    text = found.candidates[0] if found.place in ("tag", "box", "marker") and found.candidates else gold
    if not found.candidates or len(text) > MAX_GOLD:
        return Verdict(
            False, None, "the gold is empty" if not gold.strip() else f"the gold has no answer: {gold[:60]!r}"
        )
    wanted = clean(text)
    if not wanted:
        return Verdict(False, None, "the gold is empty")
    words = read(wanted).kind in ("text", "list") and len(wanted.split()) > MAX_WORDS
    if words or SENTENCES.search(text):
        return Verdict(False, None, f"the gold has no short answer: {gold[:60]!r}")
    return wanted


def _judge(answer: str, gold: str, options: tuple[str, ...] | None, tolerance: Fraction) -> _Decision | None:
    """The decision on one reading of the answer; None when this reading does not match."""
    if not answer:
        return _Decision(False, "the answer is empty")
    if options is not None:
        index = _option_index(gold, options)
        if index is not None:
            return _judge_choice(answer, index, options, tolerance)
    wanted = gold_option(gold) if options is None else None
    if wanted is not None:
        option = read_option(answer)
        if option is not None and option.letter is None:
            return _Decision(False, "several options are named")
        if option is not None:
            right = option.letter == wanted.letter
            return _Decision(right, f"option {option.letter}" + ("" if right else f", not {wanted.letter}"))
        if wanted.text and equal_answers(wanted.text, answer, tolerance):
            return _Decision(True, "the option's text")
    if equal_answers(gold, answer, tolerance):
        return _Decision(True, "equal to the gold")
    if options is None and letters_of(gold, answer):
        return _Decision(True, "the gold's letters")
    lettered = WITH_TEXT.fullmatch(answer)
    if lettered and wanted is None and equal_answers(gold, lettered["text"], tolerance):
        return _Decision(True, "equal to the gold behind an option letter")
    return None


def _judge_choice(answer: str, index: int, options: tuple[str, ...], tolerance: Fraction) -> _Decision | None:
    option = None
    if len(answer) == 1 or answer not in options:
        option = letter_and_text(answer, options) or read_option(answer)
    if option is None:
        if equal_answers(options[index], answer, tolerance):
            return _Decision(True, f"the text of option {_letter(index)}")
        return None
    if option.letter is None:
        return _Decision(False, "several options are named")
    if option.letter > _letter(len(options) - 1):
        return None
    given = ord(option.letter) - ord("A")
    if option.text:
        meant = [i for i, text in enumerate(options) if equal_answers(text, option.text, Fraction(0))]
        if meant and given not in meant:
            return _Decision(False, f"option {option.letter} is named with the text of option {_letter(meant[0])}")
    if given == index:
        return _Decision(True, f"option {option.letter}")
    return _Decision(False, f"option {option.letter}, not {_letter(index)}")


def _letter(index: int) -> str:
    return chr(ord("A") + index)


@lru_cache(maxsize=CACHED)
def _option_index(gold: str, options: tuple[str, ...]) -> int | None:
    """Which option the gold is: its letter, its text, or one of equal value."""
    option = gold_option(gold)
    if option is not None and option.letter <= _letter(len(options) - 1):
        return ord(option.letter) - ord("A")
    if gold in options:
        return options.index(gold)
    return next((i for i, text in enumerate(options) if equal_answers(gold, text, Fraction(0))), None)


def _is_stuck(gold: re.Match[str], answer: str) -> bool:
    """Whether a gold 100m is 100 metres: a number and one unit, of which the answer makes no variable."""
    number, given = read(gold["number"]), read(answer)
    if number.kind != "value" or number.unit is not None or symbols(number.node) or given.kind != "value":
        return False
    return not symbols(given.node)


def equal_answers(gold: str, answer: str, tolerance: Fraction) -> bool:
    """Whether two clean texts are the same answer."""
    if GAP.sub("", gold) == GAP.sub("", answer):
        return True
    if agree(read(gold), read(answer), tolerance):
        return True
    apart = STUCK_UNIT.fullmatch(gold)
    if apart and _is_stuck(apart, answer):
        return agree(read(f"{apart['number']} {apart['unit']}"), read(answer), tolerance)
    wanted = text_key(gold).lower()
    opposite = YES_NO.get(wanted)
    if opposite is not None:
        match = YES_NO_ANSWER.fullmatch(answer)
        if match is None or match[1].lower() != wanted:
            return False
        rest = match["rest"] or ""
        return not UNSURE.search(rest) and not re.search(rf"\b{opposite}\b", rest, re.I)
    return grade_symbolic.agree(gold, answer)
