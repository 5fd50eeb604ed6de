"""Values of formulas, and whether two formulas are equal.

Constants are equal when they agree in grade_numbers.AGREE digits. Formulas with variables are equal when they agree at
points drawn from the variables' names (the test of Schwartz and Zippel); points where either side has no real value do
not count, so that √(xy) is √x√y.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from grpo_vlm.rewards import grade_numbers as numbers
from grpo_vlm.rewards.grade_numbers import Real, TooLarge, Undefined, context, is_complex, same
from grpo_vlm.rewards.grade_syntax import TRIGONOMETRIC, Node, Number, Operation, Symbol, symbols

POINTS = 8  # near 0: the first half positive, the second of either sign
FAR_POINTS = ((50, 1), (2000, 1), (50, -1), (2000, -1), (2000, 0))  # magnitude and sign, 0 for either
ENOUGH_POINTS = 2
HASH_RANGE = 9973
DEGREES = Fraction(180)


def evaluate(node: Node, point: Mapping[str, Fraction] | None = None) -> Real:
    """The value of a constant, or with a point the real value of a formula there. Raises TooLarge and Undefined."""
    return _value(node, point or {}, in_angle=False)


def equal(a: Node, b: Node) -> bool:
    """Whether two formulas have the same value, or are the same function of the same variables. Raises TooLarge and
    Undefined."""
    if not symbols(a) and not symbols(b):
        return same(evaluate(a), evaluate(b))
    seen = 0
    for first, second in _at_points(a, b):
        if not same(first, second):
            return False
        seen += 1
    return seen >= ENOUGH_POINTS


def proportional(a: Node, b: Node, *, positive: bool) -> bool:
    """Whether a = c * b with one constant c other than 0 (above 0 if `positive`): equations with the same solutions,
    as 2x - 4 = 0 and x - 2 = 0. Raises TooLarge."""
    pairs = list(_at_points(a, b))
    if any(is_complex(value) for pair in pairs for value in pair):
        return False
    if any((first == 0) != (second == 0) for first, second in pairs):
        return False
    ratios = [numbers.divide(first, second) for first, second in pairs if second != 0]
    if len(ratios) < ENOUGH_POINTS or (positive and ratios[0] < 0):
        return False
    return all(same(ratio, ratios[0]) for ratio in ratios)


def _at_points(a: Node, b: Node) -> Iterator[tuple[Real, Real]]:
    names = symbols(a) | symbols(b)
    for index in range(POINTS + len(FAR_POINTS)):
        point = {name: _coordinate(name, index) for name in names}
        try:
            yield evaluate(a, point), evaluate(b, point)
        except Undefined:
            continue
        except TooLarge:  # far out only: e^(x^2)
            if index < POINTS:
                raise


def _coordinate(name: str, index: int) -> Fraction:
    """A fraction that depends on variable and point only: 0.2 <= |x| < 3.2, and far out, where |x - 4| and 4 - x
    differ, between half of the magnitude and all of it."""
    drawn = zlib.crc32(f"{name}/{index}".encode())
    if index >= POINTS:
        magnitude, sign = FAR_POINTS[index - POINTS]
        value = magnitude * (1 + Fraction(drawn % HASH_RANGE, HASH_RANGE)) / 2
        return value * (sign or (-1 if drawn & 0x10000 else 1))
    value = Fraction(1, 5) + Fraction(3 * (drawn % HASH_RANGE), HASH_RANGE)
    return -value if index >= POINTS // 2 and drawn & 0x10000 else value


def _value(node: Node, point: Mapping[str, Fraction], *, in_angle: bool) -> Real:
    """in_angle: inside sine and the like a degree is π/180, elsewhere a unit that nobody has to write."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Symbol):
        return point[node.name] if node.name in point else _constant(node.name)
    values = [_value(part, point, in_angle=in_angle or node.name in TRIGONOMETRIC) for part in node.arguments]
    if node.name == "degree":
        return numbers.divide(numbers.multiply(values[0], _constant("π")), DEGREES) if in_angle else values[0]
    value = OPERATIONS[node.name](*values) if node.name in OPERATIONS else numbers.call(node.name, *values)
    if point and is_complex(value) and not _mentions_i(node):
        raise Undefined("not real")
    return value


def _constant(name: str) -> Real:
    mp = context()
    if name == "i":
        return mp.mpc(0, 1)
    return +{"π": mp.pi, "e": mp.e, "∞": mp.inf}[name]


def _mentions_i(node: Node) -> bool:
    if isinstance(node, Operation):
        return any(map(_mentions_i, node.arguments))
    return isinstance(node, Symbol) and node.name == "i"


OPERATIONS: dict[str, Callable[..., Real]] = {
    "add": numbers.add,
    "multiply": numbers.multiply,
    "divide": numbers.divide,
    "power": numbers.power,
    "root": numbers.root,
    "factorial": numbers.factorial,
    "binomial": numbers.binomial,
    "abs": abs,
    "log": numbers.logarithm,
    "lg": numbers.logarithm,
    "ln": lambda value: numbers.logarithm(value, _constant("e")),
    "base": lambda value, base: value,
}
