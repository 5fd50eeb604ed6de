"""Numbers of the grader: whole numbers and fractions exactly, everything else to 100 digits.

A number is a Fraction, or an mpf or mpc of mpmath. Whatever would grow past MAX_BITS or take long raises TooLarge
before it is computed. Every thread has its own mpmath context, since the precision of a context is shared state.
"""

import math
import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath

DIGITS = 100
AGREE = 70  # digits in which equal numbers agree
MAX_BITS = 40_000  # of an exact number
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 3_000
MAX_ARGUMENT = 10_000  # of exp, trigonometric and hyperbolic functions
MAX_ROOT = 100
LOG_BASE = Fraction(10)  # of \\log without a base

_local = threading.local()
Real = Any  # Fraction, mpf or mpc; mpmath makes its classes at run time


class TooLarge(Exception):
    """Computing it would take too much time or memory."""


class Undefined(Exception):
    """There is no (real) value: a division by zero, the root of a negative number, ..."""


def context() -> mpmath.MPContext:
    """This thread's own mpmath."""
    if "context" not in vars(_local):
        _local.context = mpmath.MPContext()
        _local.context.dps = DIGITS
    return _local.context


def _warm_constants() -> None:
    """mpmath keeps π, e and the logarithms for all threads and is not safe while it makes them longer: make them long
    enough once, before there are threads."""
    mp = mpmath.MPContext()
    mp.dps = 10 * DIGITS
    for constant in (mp.pi, mp.e, mp.ln2, mp.ln10, mp.degree):
        mp.mpf(constant)


_warm_constants()


def inexact(value: Real) -> Real:
    """The number as mpmath's."""
    if isinstance(value, Fraction):
        return context().mpf(value.numerator) / value.denominator
    return value


def is_complex(value: Real) -> bool:
    return isinstance(value, context().mpc)


def same(a: Real, b: Real) -> bool:
    """Equal: exactly for fractions, else to AGREE digits; next to an exact 0 in absolute terms."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    first, second = inexact(a), inexact(b)
    if first == second:
        return True
    mp = context()
    if mp.isinf(first) or mp.isinf(second):
        return False
    scale = max(abs(first), abs(second)) if first != 0 and second != 0 else 1
    return bool(abs(first - second) <= scale * mp.mpf(10) ** -AGREE)


def distance(a: Real, b: Real) -> Real:
    """|a - b|; 0 for equal infinities."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return abs(a - b)
    first, second = inexact(a), inexact(b)
    return Fraction(0) if first == second else abs(first - second)


def at_most(value: Real, limit: Fraction) -> bool:
    """value <= limit, with the last digits of an inexact value forgiven."""
    if isinstance(value, Fraction):
        return value <= limit
    return bool(value <= inexact(limit) * (1 + context().mpf(10) ** -AGREE))


def add(*values: Real) -> Real:
    if all(isinstance(value, Fraction) for value in values):
        return bounded(sum(values, Fraction(0)))
    return sum(map(inexact, values), context().mpf(0))


def multiply(a: Real, b: Real) -> Real:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return bounded(a * b)
    return inexact(a) * inexact(b)


def divide(a: Real, b: Real) -> Real:
    if b == 0:
        raise Undefined("a division by 0")
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return bounded(a / b)
    return inexact(a) / inexact(b)


def power(base: Real, exponent: Real) -> Real:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        return _whole_power(base, exponent.numerator)
    if not at_most(abs(exponent), Fraction(MAX_EXPONENT)):
        raise TooLarge("an exponent")
    if base == 0:
        raise Undefined("a power of 0")
    return context().power(inexact(base), inexact(exponent))


def _whole_power(base: Fraction, exponent: int) -> Fraction:
    if base == 0 and exponent < 0:
        raise Undefined("a division by 0")
    if base in (0, 1):
        return base if exponent else Fraction(1)
    if base == -1:
        return Fraction(-1 if exponent % 2 else 1)
    if abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("a power")
    return base**exponent


def root(value: Real, degree: Real) -> Real:
    """The principal root; of a negative number the real one when the degree is odd."""
    if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= MAX_ROOT:
        return power(value, divide(Fraction(1), degree))
    if not is_complex(value) and value < 0 and degree % 2 == 1:
        return -context().root(-inexact(value), int(degree))
    return context().root(inexact(value), int(degree))


def factorial(value: Real) -> Fraction:
    if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
        raise Undefined("a factorial of what is no whole number")
    if value > MAX_FACTORIAL:
        raise TooLarge("a factorial")
    return bounded(Fraction(math.factorial(int(value))))


def binomial(above: Real, below: Real) -> Fraction:
    for value in (above, below):
        if not isinstance(value, Fraction) or value.denominator != 1 or value < 0:
            raise Undefined("a binomial coefficient of what are no whole numbers")
    if above > MAX_FACTORIAL:
        raise TooLarge("a binomial coefficient")
    return bounded(Fraction(math.comb(int(above), int(below))))


def logarithm(value: Real, base: Real = LOG_BASE) -> Real:
    if value == 0 or base in (0, 1):
        raise Undefined("a logarithm")
    mp = context()
    return mp.ln(inexact(value)) / mp.ln(inexact(base))


def call(name: str, value: Real) -> Real:
    """A function of mpmath with a bounded argument."""
    if not at_most(abs(value), Fraction(MAX_ARGUMENT)):
        raise TooLarge(f"the argument of {name}")
    try:
        return FUNCTIONS[name](context())(inexact(value))
    except (ZeroDivisionError, ValueError):
        raise Undefined(name) from None


FUNCTIONS: dict[str, Callable[[mpmath.MPContext], Callable[[Real], Real]]] = {
    "sin": lambda mp: mp.sin,
    "cos": lambda mp: mp.cos,
    "tan": lambda mp: mp.tan,
    "cot": lambda mp: mp.cot,
    "sec": lambda mp: mp.sec,
    "csc": lambda mp: mp.csc,
    "arcsin": lambda mp: mp.asin,
    "arccos": lambda mp: mp.acos,
    "arctan": lambda mp: mp.atan,
    "sinh": lambda mp: mp.sinh,
    "cosh": lambda mp: mp.cosh,
    "tanh": lambda mp: mp.tanh,
    "exp": lambda mp: mp.exp,
}


def bounded(value: Fraction) -> Fraction:
    """The same number, or TooLarge."""
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("a number with too many digits")
    return value
