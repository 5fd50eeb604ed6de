"""Whether two answers are the same, kind by kind. The policies are stated in grade.py; here they are carried out."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from grpo_vlm.rewards.grade_answers import TIME, Answer, difference, read, text_key
from grpo_vlm.rewards.grade_numbers import Real, TooLarge, Undefined, at_most, distance, multiply, same
from grpo_vlm.rewards.grade_syntax import Node, Number, Operation, symbols
from grpo_vlm.rewards.grade_values import equal, evaluate, proportional

LONG_DECIMAL = 10  # significant digits that stand for the exact value
LONG_DECIMAL_ERROR = Fraction(1, 10**9)  # relative
ROUNDED_GOLD = 3  # significant digits of a decimal gold that an exact prediction may round to
SYMMETRIC = frozenset("=≠≅∥⊥∼")
DECIMAL_COMMA = re.compile(r"[-+]?\d+,(?:\d{1,2}|\d{4,})")
UNORDERED = ("list", "set", "union")


def agree(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    """Whether the answer is right. tolerance: for numbers, absolute."""
    answer = _settled(answer)
    gold = _settled(gold)
    if answer is None or gold is None:
        return False
    if gold.label and answer.label and gold.label != answer.label:
        return gold.kind == answer.kind == "value" and _relations(_as_equation(gold), _as_equation(answer), tolerance)
    if gold.kind == answer.kind or (gold.kind in UNORDERED and answer.kind in UNORDERED):
        return _SAME_KIND[gold.kind](gold, answer, tolerance)
    return _other_kind(gold, answer, tolerance)


def _settled(answer: Answer) -> Answer | None:
    """A chain such as 26/2 = 13 or 13π ≈ 40.84 as its value; None when its sides contradict each other, and for a
    sine or cosine above 1.

    Behind an ≈ there must be the value rounded or cut; the answer is the exact side.
    """
    if answer.kind == "value" and (answer.label or "").startswith(("\\sin", "\\cos")):
        return None if _above_one(answer.node) else answer
    if answer.kind != "chain":
        return answer
    value = answer.items[0]
    for sign, side in zip(answer.sign, answer.items[1:], strict=True):
        if sign == "=" and not _values(replace(value, label=None), side, Fraction(0)):
            return None
        if sign == "≈" and not _close(value, side):
            return None
        if sign == "=":
            value = side if side.unit or not value.unit else value
    return replace(value, label=answer.label)


def _above_one(node: Node) -> bool:
    if symbols(node):
        return False
    try:
        return not at_most(abs(evaluate(node)), Fraction(1))
    except (TooLarge, Undefined):
        return True


def _close(exact: Answer, rounded: Answer) -> bool:
    """Whether a decimal is a value rounded or cut at its own last digit."""
    if not isinstance(rounded.node, Number):
        return False
    try:
        return at_most(distance(evaluate(exact.node), rounded.node.value), Fraction(1, 10 ** _decimals(rounded.node)))
    except (TooLarge, Undefined):
        return False


def _other_kind(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    """An equation and x = 5, a ratio and a fraction, a decimal comma, a set of one and its item."""
    kinds = (gold.kind, answer.kind)
    if "text" in kinds:  # U.S. and US
        return _texts(gold, answer, tolerance)
    if "relation" in kinds and "value" in kinds:
        value = gold if gold.kind == "value" else answer
        if value.label is None:
            return False
        sides = (_as_equation(gold), answer) if value is gold else (gold, _as_equation(answer))
        return _relations(*sides, tolerance)
    if set(kinds) == {"list", "tuple"}:
        return _names_its_places(*((gold, answer) if gold.kind == "list" else (answer, gold)), tolerance)
    if set(kinds) == {"ratio", "value"}:
        ratio, value = (gold, answer) if gold.kind == "ratio" else (answer, gold)
        return _ratio_is_fraction(ratio, value)
    if kinds == ("value", "list") and DECIMAL_COMMA.fullmatch(answer.text) and _is_decimal(gold.node):
        return agree(gold, read(answer.text.replace(",", ".")), tolerance)
    if gold.kind == "set" and len(gold.items) == 1:
        return agree(gold.items[0], answer, tolerance)
    if answer.kind == "set" and len(answer.items) == 1:
        return agree(gold, answer.items[0], tolerance)
    return False


def _names_its_places(values: Answer, places: Answer, tolerance: Fraction) -> bool:
    """x = 2, y = 3 and (2, 3): the names in the alphabet's order, which is that of a tuple without names."""
    names = [item.label or "" for item in values.items]
    if places.sign != "()" or places.label or values.sign == "or" or len(names) != len(places.items):
        return False
    if len(set(names)) != len(names) or not all(len(name) == 1 for name in names):
        return False
    ordered = [
        replace(item, label=None) for _, item in sorted(zip(names, values.items, strict=True), key=lambda p: p[0])
    ]
    return all(agree(a, b, tolerance) for a, b in zip(ordered, places.items, strict=True))


def _ratio_is_fraction(ratio: Answer, value: Answer) -> bool:
    if len(ratio.items) != 2 or TIME.fullmatch(ratio.text) or value.unit is not None or not _is_fraction(value.node):
        return False
    quotient = Operation("divide", (ratio.items[0].node, ratio.items[1].node))
    return _numbers(quotient, value.node, Fraction(0))


def _values(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    """Numbers and formulas with units; a unit or percent sign that one side leaves out is not compared."""
    units = (gold.unit, answer.unit)
    first, second = gold.node, answer.node
    percent = [unit is not None and unit.is_percent() for unit in units]
    if any(percent) and None in units:  # 50% is 50 and 0.5
        with_sign, other = (first, second) if percent[0] else (second, first)
        scaled = _times(with_sign, Fraction(1, 100))
        if percent[0]:  # the tolerance is that of the gold, and shrinks with it
            return _numbers(with_sign, other, tolerance) or _numbers(scaled, other, tolerance / 100)
        return _numbers(other, with_sign, tolerance) or _numbers(other, scaled, tolerance)
    if None not in units and units[0] != units[1]:
        if units[0].dimensions != units[1].dimensions:
            return False
        second = _times(second, units[1].factor / units[0].factor)
    return _numbers(first, second, tolerance)


def _times(node: Node, factor: Fraction) -> Node:
    return Operation("multiply", (node, Number(factor, str(factor))))


def _numbers(gold: Node, answer: Node, tolerance: Fraction) -> bool:
    if gold == answer:
        return True
    if _is_base(gold) != _is_base(answer):
        return False
    try:
        if equal(gold, answer):
            return True
        if symbols(gold) or symbols(answer) or _is_base(gold):
            return False
        first, second = evaluate(gold), evaluate(answer)
    except (TooLarge, Undefined):
        return False
    return _close_enough(gold, answer, first, second, tolerance)


def _close_enough(gold: Node, answer: Node, first: Real, second: Real, tolerance: Fraction) -> bool:
    apart = distance(first, second)
    if tolerance and at_most(apart, tolerance):
        return True
    if _is_decimal(gold) and not isinstance(answer, Number):  # an exact answer to a rounded gold
        if _significant(gold) >= ROUNDED_GOLD and at_most(apart, Fraction(1, 2 * 10 ** _decimals(gold))):
            return True
    for decimal, exact, value in ((answer, gold, first), (gold, answer, second)):
        if _is_decimal(decimal) and not isinstance(exact, Number) and _significant(decimal) >= LONG_DECIMAL:
            return at_most(apart, LONG_DECIMAL_ERROR * abs(decimal.value)) if value != 0 else False
    return False


def _is_base(node: Node) -> bool:
    return isinstance(node, Operation) and node.name == "base"


def _is_decimal(node: Node) -> bool:
    return isinstance(node, Number) and "." in node.text


def _is_fraction(node: Node) -> bool:
    return isinstance(node, Operation) and node.name in ("divide", "multiply")


def _decimals(node: Number) -> int:
    return len(node.text.partition(".")[2])


def _significant(node: Number) -> int:
    return len(node.text.replace(".", "").lstrip("-+0"))


def _unordered(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    """The same items in any order; in a set, repeated ones count once."""
    if (gold.kind == "union") != (answer.kind == "union"):
        return False
    if gold.sign != answer.sign and not _joint_is_free(gold, answer):
        return False
    wanted, given = list(gold.items), list(answer.items)
    if "set" in (gold.kind, answer.kind):
        wanted, given = _distinct(wanted), _distinct(given)
    if len(wanted) != len(given):
        return False
    if _differently_named(wanted) and not any(item.label for item in given):  # x = 1, y = 2 is 1, 2 and not 2, 1
        return all(agree(a, b, tolerance) for a, b in zip(wanted, given, strict=True))
    for item in wanted:
        index = next((i for i, other in enumerate(given) if agree(item, other, tolerance)), None)
        if index is None:
            return False
        del given[index]
    return True


def _joint_is_free(gold: Answer, answer: Answer) -> bool:
    """Whether "and", "or" and a comma may stand for each other: for the values of one unknown (x = 2 or x = -2), and
    a comma for either between numbers. Words, letters and inequalities say another thing with each."""
    if any(item.kind != "value" for item in (*gold.items, *answer.items)):
        return "or" not in (gold.sign, answer.sign)
    if gold.label or answer.label:
        return True
    if any(symbols(item.node) or item.label for item in (*gold.items, *answer.items)):
        return "or" not in (gold.sign, answer.sign)
    return "" in (gold.sign, answer.sign)


def _differently_named(items: Sequence[Answer]) -> bool:
    """Whether all items have names, of different letters: x_1 and x_2 are two values of one."""
    letters = {item.label[0] for item in items if item.label}
    return len(letters) == len(items) > 1


def _distinct(items: Sequence[Answer]) -> list[Answer]:
    distinct: list[Answer] = []
    for item in items:
        if not any(agree(item, other, Fraction(0)) for other in distinct):
            distinct.append(item)
    return distinct


def _tuples(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    if gold.sign != answer.sign or len(gold.items) != len(answer.items):
        return False
    return all(agree(a, b, tolerance) for a, b in zip(gold.items, answer.items, strict=True))


def _as_equation(value: Answer) -> Answer:
    """x = 5, read as a labelled value, as the equation again."""
    label = read(value.label)
    items = (label, replace(value, label=None))
    return Answer("relation", value.text, node=difference(*items), items=items, sign="=")


def _relations(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    if gold.sign != answer.sign:
        return False
    if gold.sign in "=≠>≥" and gold.node is not None and answer.node is not None and symbols(gold.node):
        try:
            return proportional(gold.node, answer.node, positive=gold.sign in ">≥")
        except (TooLarge, Undefined):
            return False
    swapped = answer.items[::-1] if gold.sign in SYMMETRIC else answer.items
    return any(
        all(agree(a, b, tolerance) for a, b in zip(gold.items, sides, strict=True))
        for sides in (answer.items, swapped)
    )


def _ratios(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    """Proportional, so that 4:6 is 2:3; times of day part by part."""
    if len(gold.items) != len(answer.items):
        return False
    parts = list(zip(gold.items, answer.items, strict=True))
    if TIME.fullmatch(gold.text) and TIME.fullmatch(answer.text):
        return all(_numbers(a.node, b.node, Fraction(0)) for a, b in parts)
    if any(item.unit is not None or symbols(item.node) for pair in parts for item in pair):
        return all(_values(a, b, Fraction(0)) for a, b in parts)
    try:
        values = [(evaluate(a.node), evaluate(b.node)) for a, b in parts]
        first, second = values[0]
        if first == 0 or second == 0:
            return all(same(a, b) for a, b in values)
        return all(same(multiply(a, second), multiply(b, first)) for a, b in values)
    except (TooLarge, Undefined):
        return False


def _texts(gold: Answer, answer: Answer, tolerance: Fraction) -> bool:
    key = text_key(gold.text)
    return bool(key) and key == text_key(answer.text)


_SAME_KIND = {
    "value": _values,
    "tuple": _tuples,
    "relation": _relations,
    "ratio": _ratios,
    "text": _texts,
    "empty": lambda gold, answer, tolerance: False,
    **dict.fromkeys(UNORDERED, _unordered),
}
