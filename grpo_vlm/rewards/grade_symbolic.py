"""The last resort: math-verify for what our own grammar does not read (matrices, integrals, sums, limits).

math-verify bounds its time with signals, which need the main thread and cannot stop one long computation. So here its
timers are off, and instead: only short formulas come in, none with powers, factorials or numbers that could explode,
and grade_deadline stops the rest, in whatever thread it runs.
"""

import logging
import re
import threading
import time
from types import ModuleType

from grpo_vlm.rewards.grade_deadline import OutOfTime, call_within

MAX_LENGTH = 200  # characters of a formula
LIMIT_S = 0.5  # of processor time for one grading
MATHS = re.compile(r"\\(?:begin\s*\{[a-zA-Z]*matrix|int|iint|oint|sum|prod|lim|det)\b")
DANGEROUS = re.compile(r"!|\^\s*\{?[^{}]*\^|\^\s*\{?\s*-?\d{3}|\d{12}|\\(?:uparrow|pmod|zeta|Gamma)|\^\s*\{?\s*\(")

_one_at_a_time = threading.Lock()  # sympy's and the parser's caches are shared
_local = threading.local()
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timers are off


def start_budget() -> None:
    """From here on this thread may spend LIMIT_S in `agree`; called once a grading."""
    _local.left_s = LIMIT_S


def agree(gold: str, answer: str) -> bool:
    """Whether math-verify finds two LaTeX formulas equal; False when they may not be given to it or the time is up."""
    left_s = vars(_local).get("left_s", LIMIT_S)
    if left_s <= 0 or not _allowed(gold) or not _allowed(answer):
        return False
    library = _library()
    with _one_at_a_time:
        begun = time.thread_time()
        try:
            return call_within(left_s, _verify, library, gold, answer)
        except OutOfTime:
            return False
        finally:
            _local.left_s = left_s - (time.thread_time() - begun)


def _allowed(text: str) -> bool:
    return len(text) <= MAX_LENGTH and MATHS.search(text) is not None and DANGEROUS.search(text) is None


def _library() -> ModuleType:
    import math_verify  # it loads sympy: only for those who need it

    return math_verify


def _verify(library: ModuleType, gold: str, answer: str) -> bool:
    sides, configuration = [], [library.LatexExtractionConfig(boxed_match_priority=-1)]
    for text in (gold, answer):
        parsed = library.parse(f"${text}$", configuration, fallback_mode="no_fallback", parsing_timeout=None)
        if not parsed:
            return False
        sides.append(parsed)
    return library.verify(*sides, timeout_seconds=None)
