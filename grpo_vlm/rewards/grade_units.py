"""Units behind (or a currency before) a number: 5 cm is 50 mm, not 5 m.

A unit is its dimensions with their powers and the factor to the dimension's own unit. Words that are no unit known
here (`5 apples`) are a dimension of their own.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

F = Fraction
Powers = tuple[tuple[str, int], ...]
KNOWN: dict[str, tuple[Powers, Fraction]] = {}  # spelling -> dimensions with their powers, and factor
PREFIXES = {"k": F(1000), "M": F(10**6), "G": F(10**9), "m": F(1, 1000), "μ": F(1, 10**6), "n": F(1, 10**9)}
TWO_CAPITALS = frozenset("MN GN MV GV MA GA ML GL".split())  # segments MN, ... rather than units


def _define(dimensions: str | Powers, **factors: tuple[Fraction, str]) -> None:
    powers = ((dimensions, 1),) if isinstance(dimensions, str) else dimensions
    for factor, spellings in factors.values():
        KNOWN.update(dict.fromkeys(spellings.split(), (powers, factor)))


_define(
    "length",
    m=(F(1), "m meter meters metre metres"),
    cm=(F(1, 100), "cm CM centimeter centimeters centimetre centimetres"),
    mm=(F(1, 1000), "mm millimeter millimeters millimetre millimetres"),
    dm=(F(1, 10), "dm decimeter decimeters decimetre decimetres"),
    km=(F(1000), "km Km KM kilometer kilometers kilometre kilometres"),
    inch=(F(254, 10000), "in in. inch inches"),
    foot=(F(3048, 10000), "ft ft. FT foot feet"),
    yard=(F(9144, 10000), "yd yd. yard yards"),
    mile=(F(1609344, 1000), "mi mi. mile miles"),
)
_define(
    "mass",
    g=(F(1), "g gram grams gramme grammes"),
    mg=(F(1, 1000), "mg milligram milligrams"),
    kg=(F(1000), "kg Kg KG kilogram kilograms kilogramme kilogrammes"),
    t=(F(1000000), "tonne tonnes"),
    lb=(F(45359237, 100000), "lb lbs pound-mass"),
    oz=(F(28349523125, 1000000000), "oz ounce ounces"),
)
_define(
    "time",
    s=(F(1), "s sec secs second seconds"),
    ms=(F(1, 1000), "ms millisecond milliseconds"),
    minute=(F(60), "min mins minute minutes"),
    h=(F(3600), "h hr hrs hour hours"),
    day=(F(86400), "day days"),
    week=(F(604800), "week weeks"),
)
_define(
    (("length", 3),),
    litre=(F(1, 1000), "L l liter liters litre litres"),
    ml=(F(1, 10**6), "mL ml milliliter milliliters millilitre millilitres"),
)
_define((("length", 1), ("time", -1)), kph=(F(1000, 3600), "kph kmh"), mph=(F(1609344, 3600000), "mph"))
_define("dollar", dollar=(F(1), "dollar_ dollar dollars USD usd"), cent=(F(1, 100), "cent cents ¢"))
_define("euro", euro=(F(1), "€ euro euros EUR"))
_define("pound", pound=(F(1), "£ GBP"))
_define("yen", yen=(F(1), "¥ yen yuan RMB"))
_define("am", am=(F(1), "am AM a.m. A.M. a.m A.M"))
_define("pm", pm=(F(1), "pm PM p.m. P.M. p.m P.M"))
_define("degree", degree=(F(1), "° degree degrees deg deg."))
_define("radian", radian=(F(1), "rad radian radians"))
_define("percent", percent=(F(1), "% percent per-cent"))
_define("celsius", celsius=(F(1), "°C celsius"))
_define("fahrenheit", fahrenheit=(F(1), "°F fahrenheit"))
_define("kelvin", kelvin=(F(1), "K kelvin kelvins"))
_define("force", newton=(F(1), "N newton newtons"))
_define("energy", joule=(F(1), "J joule joules"), kj=(F(1000), "kJ kilojoule kilojoules"))
_define("voltage", volt=(F(1), "V volt volts"))
_define("current", ampere=(F(1), "A ampere amperes amp amps"))
_define("resistance", ohm=(F(1), "Ω ω ohm ohms"))
_define("watt", watt=(F(1), "W watt watts"), kw=(F(1000), "kW kilowatt kilowatts"))
_define("hertz", hertz=(F(1), "Hz hz hertz"))
_define("pressure", pascal=(F(1), "Pa pascal pascals"), kpa=(F(1000), "kPa"))
_define("amount", mol=(F(1), "mol mole moles"))


def _define_prefixed() -> None:
    """mA, kN, MHz: upper and lower case are different units."""
    for symbol in "m g s L N J V A Ω W Hz Pa mol".split():
        dimensions, factor = KNOWN[symbol]
        for prefix, times in PREFIXES.items():
            if prefix + symbol not in TWO_CAPITALS:
                KNOWN.setdefault(prefix + symbol, (dimensions, factor * times))


_define_prefixed()
DIMENSIONS = frozenset(name for powers, _ in KNOWN.values() for name, _ in powers)

PLAIN = frozenset({"unit", "units", "total", "altogether", "only"})  # say nothing
NO_NOUN = frozenset(  # words behind a number that change it, join it to another or deny it
    "and or not to of times plus minus over by from hundred thousand million billion trillion dozen half halves "
    "third thirds quarter quarters squared cubed sqrt root roots pi but if is are no nor than more less least "
    "most between approximately about either neither maybe perhaps possibly power factorial modulo mod sin cos "
    "tan log ln fewer below above under negative positive wrong incorrect false invalid max min maximum minimum "
    "missing doubled tripled fourth fifth sixth seventh eighth ninth tenth hundredth thousandth lakh crore "
    "gross score ago fold north south east west recurring repeating fourths fifths sixths sevenths eighths "
    "ninths tenths hundredths thousandths millionths tens hundreds thousands millions billions trillions dozens "
    "scores lakhs crores negatives powers yes always sometimes this thus was has does vs besides towards "
    "afterwards backwards basis others else except without".split()
)
PLURALS = frozenset(
    "people children men women feet teeth mice geese sheep fish dice vertices indices matrices".split()
)
ONE = re.compile(r"\s*1\s*")
SPELLING = re.compile(r"[A-Za-zΩωμ°%€£¥¢][A-Za-zΩωμ.°_]*")
PER_CENT = re.compile(r"per[ -]cent\b", re.I)
DEGREES_OF = re.compile(r"\b(?:degrees?|deg)\s+(celsius|fahrenheit)\b", re.I)
UPRIGHT_QUOTIENT = re.compile(r"\\frac\s*\{ ([^{}\d]+) \}\s*\{ ([^{}\d]+) \}$")  # the spaces are those of \text{}
POWER = re.compile(r"\s*\^\s*(?:\{\s*(-?[1-4])\s*\}|([1-4]))")
BEGIN = re.compile(r"(?<=[\d.)}\]π!])(?P<gap>\s*)(?:\^\s*\{?\s*(?=°))?(?=[°%€£¥¢ΩωμA-Za-z])")
CURRENCY = re.compile(r"(?P<sign>[-+]?)\s*(?P<unit>dollar_|[€£¥])\s*(?P<value>[-+]?[\d.].*)", re.DOTALL)
SPACE = re.compile(r"\s*")
POWERS = {"square": 2, "sq": 2, "sq.": 2, "cubic": 3, "cu": 3, "cu.": 3}
AFTER = {"squared": 2, "cubed": 3}
MAX_WORDS = 3
DEGREE = (("degree", 1),)
ANGLE_FUNCTION = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc)\b")


@dataclass(frozen=True)
class Unit:
    """dimensions: (name, power) pairs, sorted; factor: how many of the dimensions' own units one of these is."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction

    def is_percent(self) -> bool:
        return self.dimensions == (("percent", 1),)


def split_unit(text: str) -> tuple[str, Unit | None]:
    """A number's text and its unit; (text, None) without one."""
    text = UPRIGHT_QUOTIENT.sub(r" \1/\2", text)
    money = CURRENCY.fullmatch(text)
    if money:
        return money["sign"] + money["value"], _unit(money["unit"])
    for match in BEGIN.finditer(text):
        spelling = text[match.end() :].rstrip("} ") if "°" in text[match.end() :] else text[match.end() :]
        unit = _unit(spelling)
        if unit is not None and unit.dimensions == DEGREE and ANGLE_FUNCTION.search(text):
            return text, None  # the degree belongs to the sine's argument
        if unit is not None and not (ONE.fullmatch(text[: match.start()]) or _countable(unit, spelling)):
            return text, None  # 5 gross, 5 doubled, 5 south: only things can be counted
        if unit is not None and (match["gap"] or not _may_be_variable(spelling)):
            return text[: match.start()], unit if unit.dimensions else None
    return text, None


def _countable(unit: Unit, spelling: str) -> bool:
    """Whether it is a unit known here, or a noun in the plural."""
    if all(name in DIMENSIONS for name, _ in unit.dimensions):
        return True
    words = re.findall(r"[a-z]+", spelling.lower())
    return any(word in PLURALS or (word.endswith("s") and not word.endswith("ss")) for word in words)


def known_unit(text: str) -> bool:
    """Whether a clean text is one of the units above and nothing else."""
    unit = _unit(text)
    return unit is not None and bool(unit.dimensions) and {name for name, _ in unit.dimensions} <= DIMENSIONS


def _may_be_variable(spelling: str) -> bool:
    """5m and 5nm without a gap are products; 5cm is not."""
    return spelling[0].isalpha() and (not spelling[1:2].isalpha() or spelling in ("nm", "ns", "ng"))


def _unit(spelling: str) -> Unit | None:
    """The unit in words or signs, as m, cm^2, square feet, km/h, miles per hour, apples; None when it is none."""
    spelling = DEGREES_OF.sub(r"\1", PER_CENT.sub("percent", spelling.strip()))
    above, *below = re.split(r"\s*/\s*|\s+per\s+", spelling)
    if len(below) > 2:
        return None
    parts = [_product(above, 1)] + [_product(part, -1) for part in below]
    if None in parts:
        return None
    powers: Counter[str] = Counter()
    factor = Fraction(1)
    for dimensions, part_factor in parts:
        powers.update(dimensions)
        factor *= part_factor
    return Unit(tuple(sorted((name, power) for name, power in powers.items() if power)), factor)


def _product(text: str, sign: int) -> tuple[Counter[str], Fraction] | None:
    """Units side by side, such as N m; square and cubic before a unit, a power or squared and cubed behind it."""
    powers: Counter[str] = Counter()
    factor, position, wanted, nouns = Fraction(1), 0, 1, []
    while position < len(text):
        word = SPELLING.match(text, position)
        if word is None:
            return None
        name, position = word[0], word.end()
        raised = POWER.match(text, position)
        position = SPACE.match(text, raised.end() if raised else position).end()
        if name.lower() in POWERS:
            wanted = POWERS[name.lower()]
            continue
        power = int(raised[1] or raised[2]) if raised else wanted
        following = SPELLING.match(text, position)
        if following and following[0] in AFTER:
            power, position = AFTER[following[0]], SPACE.match(text, following.end()).end()
        wanted = 1
        known = KNOWN.get(name) or KNOWN.get(name.lower() if len(name) > 2 else name)
        if known:
            for dimension, its_power in known[0]:
                powers[dimension] += its_power * power * sign
            factor *= known[1] ** (power * sign)
        elif name.lower() not in PLAIN:
            nouns.append(name)
    if nouns and not _is_noun(nouns):
        return None
    if nouns:
        powers[" ".join(noun.lower().rstrip("s") for noun in nouns)] += sign
    return powers, factor


def _is_noun(words: list[str]) -> bool:
    if len(words) > MAX_WORDS or any(word.lower() in NO_NOUN for word in words):
        return False
    return all(len(word) >= 3 and word.isalpha() and word.islower() for word in words)
