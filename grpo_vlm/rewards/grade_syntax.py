"""Reads a formula in the one spelling of grade_spelling into a small tree. Only reading: nothing is computed here.

Nodes: Number, Symbol, and Operation(name, arguments), the name one of FUNCTIONS or add, multiply, divide, power, root,
factorial, binomial, degree, sign (a ±) and base (a number in base 3). Raises Unreadable for all else: words, unknown
LaTeX, unbalanced brackets, formulas nested too deeply.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 400  # characters of a formula; longer ones are compared as text
MAX_DEPTH = 40
FUNCTIONS = frozenset("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp abs".split())
TRIGONOMETRIC = frozenset("sin cos tan cot sec csc".split())
CONSTANTS = frozenset({"π", "e", "∞", "i"})
TOKEN = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|[A-Za-z]+|\S)")
VARIABLES = frozenset("abchkmnpqrstuvwxyz")  # letters that "3xyz" may be a product of
GREEK = frozenset("αβγδεζηθκλμνξρστφχψω")


class Unreadable(Exception):
    """The text is no formula that this grammar knows."""


@dataclass(frozen=True)
class Number:
    value: Fraction
    text: str  # as written: its decimals count when values are compared


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass(frozen=True)
class Operation:
    name: str
    arguments: tuple["Node", ...]


Node = Number | Symbol | Operation


def parse(text: str) -> Node:
    """The tree of a whole text. Raises Unreadable."""
    if len(text) > MAX_LENGTH:
        raise Unreadable(f"longer than {MAX_LENGTH} characters")
    parser = _Parser(_tokens(text))
    node = parser.sum()
    if parser.token is not None:
        raise Unreadable(f"unexpected {parser.token!r}")
    return node


def symbols(node: Node) -> frozenset[str]:
    """The names of the tree's variables; constants are none."""
    if isinstance(node, Symbol):
        return frozenset() if node.name in CONSTANTS else frozenset({node.name})
    if isinstance(node, Number):
        return frozenset()
    return frozenset().union(*(symbols(argument) for argument in node.arguments))


def has_sign_choice(node: Node) -> bool:
    """Whether a ± is in the tree."""
    return isinstance(node, Operation) and (node.name == "sign" or any(map(has_sign_choice, node.arguments)))


def with_sign(node: Node, sign: int) -> Node:
    """The tree with every ± read as `sign` (and ∓ as its opposite)."""
    if not isinstance(node, Operation):
        return node
    arguments = tuple(with_sign(argument, sign) for argument in node.arguments)
    if node.name != "sign":
        return Operation(node.name, arguments)
    factor = arguments[0].value * sign
    return Operation("multiply", (Number(factor, str(factor)), arguments[1]))


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    for token in TOKEN.findall(text):
        if not token[0].isascii() or not token[0].isalpha():
            tokens.append(token)
        elif token in FUNCTIONS or token == "sqrt":
            tokens.append("\\" + token)
        elif token == "pi":
            tokens.append("π")
        elif token in ("inf", "infty", "infinity"):
            tokens.append("∞")
        elif len(token) == 1 or token.isupper():  # AB is one name: a segment, not a product
            tokens.append(token)
        elif len(token) <= 3 and VARIABLES.issuperset(token) and len(set(token)) == len(token):
            tokens.extend(token)
        else:
            raise Unreadable(f"the word {token!r}")
    return tokens


class _Parser:
    """Recursive descent; `depth` bounds the recursion."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.position, self.depth = tokens, 0, 0

    @property
    def token(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self, *expected: str) -> str:
        token = self.token
        if token is None or (expected and token not in expected):
            raise Unreadable(f"{token!r} instead of {expected or 'something'}")
        self.position += 1
        return token

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        terms = [self.product()]
        while self.token in ("+", "-", "±", "∓"):
            sign = self.take()
            term = self.product()
            terms.append(term if sign == "+" else _signed(sign, term))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Operation("add", tuple(terms))

    def product(self) -> Node:
        node = self.unary()
        while self.token is not None:
            if self.token == "*":
                self.take()
                node = Operation("multiply", (node, self.unary()))
            elif self.token == "/":
                self.take()
                node = Operation("divide", (node, self.unary()))
            elif self._starts_factor():
                node = self._implicit(node)
            else:
                break
        return node

    def _implicit(self, node: Node) -> Node:
        """A product without a sign; a whole number before a proper fraction is a mixed number (4 4/9)."""
        adjacent_numbers = self.token[0].isdecimal() and isinstance(node, Number)
        factor = self.power()
        if adjacent_numbers:
            self.take("/")  # two numbers side by side mean nothing else
            factor = Operation("divide", (factor, self.power()))
        if isinstance(factor, Operation) and factor.name == "divide" and _mixed(node, *factor.arguments):
            return Operation("add", (node, factor))
        if adjacent_numbers:
            raise Unreadable("two numbers side by side")
        return Operation("multiply", (node, factor))

    def _starts_factor(self) -> bool:
        token = self.token
        return token[0].isdecimal() or token[0] == "." or token[0] == "\\" or token in "([{" or _names(token)

    def unary(self) -> Node:
        if self.token in ("+", "-", "±", "∓"):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise Unreadable("nested too deeply")
            sign = self.take()
            node = self.unary() if self.token in ("+", "-") else self._signed_factor()
            self.depth -= 1
            return node if sign == "+" else _signed(sign, node)
        return self.power()

    def _signed_factor(self) -> Node:
        """What a sign in front belongs to: -4 4/9 is -(4 4/9), so a mixed number is taken whole."""
        node = self.power()
        if isinstance(node, Number) and node.value.denominator == 1 and self.token is not None:
            begin = self.position
            if self.token == "\\frac":
                fraction = self.power()
                if isinstance(fraction, Operation) and fraction.name == "divide" and _mixed(node, *fraction.arguments):
                    return Operation("add", (node, fraction))
            elif self.token.isdecimal() and self.tokens[self.position + 1 : self.position + 2] == ["/"]:
                top = self.power()
                self.take("/")
                bottom = self.power()
                if _mixed(node, top, bottom):
                    return Operation("add", (node, Operation("divide", (top, bottom))))
            self.position = begin
        return node

    def power(self) -> Node:
        base = self.postfix()
        if self.token != "^":
            return base
        self.take()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        if self.token in ("*", "°", "′", "'"):
            raise Unreadable("an empty power")
        exponent = self.unary()
        self.depth -= 1
        return Operation("power", (base, exponent))

    def postfix(self) -> Node:
        node = self.atom()
        while True:
            if self.token == "!":
                self.take()
                node = Operation("factorial", (node,))
            elif self.token == "°":
                self.take()
                node = Operation("degree", (node,))
            elif self.token == "^" and self.tokens[self.position + 1 : self.position + 2] == ["°"]:
                self.position += 2
                node = Operation("degree", (node,))
            elif self.token == "^" and self.tokens[self.position + 1 : self.position + 4] == ["{", "°", "}"]:
                self.position += 4
                node = Operation("degree", (node,))
            elif self.token == "_":
                self.take()
                node = self._subscript(node)
            else:
                return node

    def _subscript(self, node: Node) -> Node:
        """x_1 is a name, 1012_3 a number in base 3."""
        if self.token == "{":
            end = self.tokens[self.position :].index("}") if "}" in self.tokens[self.position :] else 0
            inside = "".join(self.tokens[self.position + 1 : self.position + end])
            self.position += end + 1
        else:
            inside = self.take()
        if isinstance(node, Symbol) and inside.isalnum():
            return Symbol(f"{node.name}_{inside}")
        if isinstance(node, Number) and inside.isdecimal() and 2 <= int(inside) <= 36 and node.text.isdecimal():
            if all(int(digit) < int(inside) for digit in node.text):
                value = Number(Fraction(int(node.text, int(inside))), node.text)
                return Operation("base", (value, Number(Fraction(int(inside)), inside)))
        raise Unreadable(f"the subscript {inside!r}")

    def atom(self) -> Node:
        token = self.take()
        if token[0].isdecimal() or (token[0] == "." and len(token) > 1):
            return Number(Fraction(token), token)
        if token in ("(", "["):
            node = self.sum()
            self.take(")" if token == "(" else "]")
            return node
        if token == "{":
            node = self.sum()
            self.take("}")
            return node
        if token == "|":
            node = self.sum()
            self.take("|")
            return Operation("abs", (node,))
        if token == "\\frac":
            return Operation("divide", (self.argument(), self.argument()))
        if token in ("\\binom", "\\dbinom", "\\tbinom"):
            return Operation("binomial", (self.argument(), self.argument()))
        if token == "\\sqrt":
            return self._root()
        if token[1:] in FUNCTIONS and token[0] == "\\":
            return self._function(token[1:])
        if token in ("∠", "△"):
            return Symbol(token + self.take())
        if _names(token):
            return Symbol(token)
        raise Unreadable(f"unexpected {token!r}")

    def argument(self) -> Node:
        """A group in braces, or one digit or letter, as TeX takes it: \\frac12 is one half."""
        if self.token == "{":
            self.take()
            node = self.sum()
            self.take("}")
            return node
        if self.token is not None and self.token.isdecimal() and len(self.token) > 1:
            digits = self.tokens[self.position]
            self.tokens[self.position : self.position + 1] = [digits[0], digits[1:]]
        return self.atom()

    def _root(self) -> Node:
        degree: Node = Number(Fraction(2), "2")
        if self.token == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        if self.token is not None and self.token.isdecimal():  # √12 and \sqrt 12 mean the whole number
            return Operation("root", (self.atom(), degree))
        return Operation("root", (self.argument(), degree))

    def _function(self, name: str) -> Node:
        extra: list[Node] = []
        exponent: Node | None = None
        if name == "log" and self.token == "_":
            self.take()
            extra.append(self.argument())
        if self.token == "^":
            self.take()
            exponent = self.argument() if self.token == "{" else self.atom()
        argument = self._function_argument()
        if isinstance(exponent, Number) and exponent.value == -1:  # the inverse function, no quotient
            if f"arc{name}" not in FUNCTIONS:
                raise Unreadable(f"the inverse of {name}")
            return Operation(f"arc{name}", (argument,))
        node: Node = Operation(name, (argument, *extra))
        return node if exponent is None else Operation("power", (node, exponent))

    def _function_argument(self) -> Node:
        """(...) or {...}, else the product that follows without a sign: sin 2x."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        if self.token in ("(", "{", "["):
            node = self.power()
        else:
            node = self.power()
            while self.token is not None and (self.token[0].isdecimal() or _names(self.token)):
                node = Operation("multiply", (node, self.power()))
        self.depth -= 1
        return node


def _names(token: str) -> bool:
    return token in CONSTANTS or token in GREEK or token in "∠△" or (token.isascii() and token.isalpha())


def _signed(sign: str, node: Node) -> Node:
    if sign == "-":
        if isinstance(node, Number):
            return Number(-node.value, "-" + node.text)
        return Operation("multiply", (Number(Fraction(-1), "-1"), node))
    return Operation("sign", (Number(Fraction(1 if sign == "±" else -1), sign), node))


def _mixed(whole: Node, top: Node, bottom: Node) -> bool:
    """Whether three numbers make a mixed number: whole numbers, the fraction proper."""
    parts = (whole, top, bottom)
    if not all(isinstance(part, Number) and part.text.isdecimal() for part in parts):
        return False
    return 0 < top.value < bottom.value and whole.value > 0
