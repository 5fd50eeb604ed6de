"""One spelling for one answer: Unicode, LaTeX and Markdown ways to write the same thing become one plain string.

After `clean` only these LaTeX words are left: \\frac, \\sqrt, function names and what the grader does not read. Signs
are single characters (* / ± ∓ ° π ∞ ∪ ∩ ∈ ∠ ≅ ∥ ⊥ ∼ ≈ ≤ ≥ ≠), set braces are ⦃ ⦄, so that { } only group.
"""

import re
import unicodedata

SUPERSCRIPTS = {ord(a): b for a, b in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True)}
SUBSCRIPTS = {ord(a): b for a, b in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)}
RAISED = re.compile(f"[{''.join(map(chr, SUPERSCRIPTS))}]+")
LOWERED = re.compile(f"[{''.join(map(chr, SUBSCRIPTS))}]+")
SIGNS = str.maketrans(
    dict.fromkeys("−–—‒‐﹣－", "-")
    | dict.fromkeys("×·⋅∙✕✖∗", "*")
    | {"÷": "/", "∕": "/", "⁄": "/", "：": ":", "∶": ":", "º": "°", "˚": "°", "≦": "≤", "≧": "≥", "⩽": "≤", "⩾": "≥"}
    | {
        "∆": "△",
        "µ": "μ",
        "≃": "≅",
        "‖": "∥",
        "∣": "|",
        "⟨": "(",
        "⟩": ")",
        "〈": "(",
        "〉": ")",
        "％": "%",
        "，": ",",
        "。": ".",
    }
    | dict.fromkeys("“”„«»", '"')
    | dict.fromkeys("‘’`´", "'")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")
)
WORDS = {  # LaTeX words with a plain spelling
    **dict.fromkeys(("times", "cdot", "ast", "bullet"), "*"),
    **dict.fromkeys(("le", "leq", "leqslant"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    **dict.fromkeys(("approx", "thickapprox"), "≈"),
    **dict.fromkeys(("cong", "simeq"), "≅"),
    **dict.fromkeys(("ldots", "cdots", "dots", "dotsc", "dotsb"), "..."),
    **dict.fromkeys(("degree", "degrees", "circ"), "°"),
    **dict.fromkeys(("lbrace",), "⦃"),
    **dict.fromkeys(("rbrace",), "⦄"),
    **dict.fromkeys(("langle", "lparen"), "("),
    **dict.fromkeys(("rangle", "rparen"), ")"),
    **dict.fromkeys(("lbrack",), "["),
    **dict.fromkeys(("rbrack",), "]"),
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "\\frac"),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("left", "right", "bigl", "bigr", "big", "Big", "Bigl", "Bigr", "displaystyle", "textstyle"), ""),
    **dict.fromkeys(("limits", "rm", "bf", "it", "mathstrut"), ""),
    **dict.fromkeys(("quad", "qquad", "space", "enspace", "thinspace", "newline"), " "),
    **{"div": "/", "lt": "<", "gt": ">", "pm": "±", "mp": "∓", "pi": "π", "infty": "∞", "cup": "∪", "cap": "∩"},
    **{"in": "∈", "angle": "∠", "measuredangle": "∠", "parallel": "∥", "perp": "⊥", "sim": "∼", "triangle": "△"},
    **{"colon": ":", "emptyset": "∅", "varnothing": "∅", "percent": "%", "land": " and ", "lor": " or "},
    **dict.fromkeys("tiny scriptsize footnotesize small normalsize large Large LARGE huge Huge".split(), ""),
    "prime": "′",
    **{"euro": "€", "pounds": "£", "to": "→", "rightarrow": "→", "forall": "∀"},
}
WRAPPERS = (
    "text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathbb|mathcal|operatorname|mbox|hbox|bm"
)
WRAPPER = re.compile(rf"\\(?:{WRAPPERS}|boldsymbol|textnormal|underline|boxed|fbox)\s*\*?\s*\{{([^{{}}]*)\}}")
OVERLINE = re.compile(
    r"\\(?:overline|bar|widehat|hat|overrightarrow|vec|overarc|overset\s*\{\\frown\})\s*\{([^{}]*)\}"
)
COLOUR = re.compile(r"\\(?:textcolor|colorbox|color)\s*(?:\[\w*\]\s*)?\{[^{}]*\}(?:\s*\{([^{}]*)\})?")
RARE = re.compile(r"\\(?:text)?color|\\[hv]?(?:space|phantom)|\\mathbb|\\over(?![a-z])")
INVISIBLE = re.compile(r"\\(?:[hv]space|[hv]?phantom)\*?\s*\{[^{}]*\}")
OVER = re.compile(r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}")
COMMAND = re.compile(r"\\([A-Za-z]+)")
GREEK = "alpha beta gamma delta epsilon varepsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi varphi"
GREEK_LETTERS = dict(zip(GREEK.split(), "αβγδεεζηθικλμνξρστφφ", strict=True)) | {"omega": "ω", "psi": "ψ", "chi": "χ"}
LATEX_SPACE = re.compile(r"\\[,;:> ]|~")
THOUSANDS_MARK = re.compile(r"(?<=\d)(?:\{,\}|\\,|\\ |\{\\,\}|~|(?<=\d)\u202f|\u2009|')(?=\d{3}(?!\d))")
DOLLARS = re.compile(r"(?<!\\)\$(?=\s?[-+]?[\d.])")  # $5
DELIMITER = re.compile(r"\\[()\[\]]|\$+")
BOLD = re.compile(r"(?<![\w)}\]])\*\*|\*\*(?![\w(\\{])")  # not the power in 2**3
ITALIC = re.compile(r"(\*|__)([^*_]+)\1")
SPACED_NAME = re.compile(r"(?<=\b[A-Z]) (?=[A-Z]\b)")  # the segment A B
SPACES = re.compile(r"\s+")
SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})(?![\w.])")
TIMES_TEN = re.compile(r"(?<=\d)\s?[xX]\s?(?=10\s?\^)")  # 6.02 x 10^23
REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?\s*(\d{1,40})\s*\}?")
CELSIUS = re.compile(r"(?<=[\d)}])\s*\^?\s*\{?\s*°\s*\}?\s*([CF])$")  # 20^{\circ}C
VULGAR = re.compile("[¼½¾⅐-⅞↉]")
QUOTED = re.compile(r"(?<![\w)}\]'′])('+)([^']+)'+(?!\w)")
PRIME = re.compile(  # A', f''(x), 30', (3, 4)': not that of "Anya's" and "don't"
    r"(?:(?<=[\d)}\]A-Zα-ω])|(?<=(?<![A-Za-z])[a-z]))'{1,3}(?!(?:s|m|re|ve|ll|d|t)\b|[A-Z][a-z])"
)
SECONDS = re.compile(r'(?<=\d)"|(?<=(?<![A-Za-z])[A-Za-z])"(?=\()')
RAISED_PRIME = re.compile(r"\s*\^\s*(?:\{\s*(′[\s′]*)\}|(′+))")
ONE_LETTER = re.compile(r"(\\(?:bar|overline|hat|widehat))\s*(?:\{\s*([a-zA-Z])\s*\}|\s([a-zA-Z])(?![A-Za-z]))")


def clean(text: str) -> str:
    """The one spelling of an answer; the caller bounds its length."""
    if "\\begin{" in text:
        return _environment(text)
    text = RAISED.sub(lambda m: "^{" + m[0].translate(SUPERSCRIPTS) + "}", text)
    text = LOWERED.sub(lambda m: "_{" + m[0].translate(SUBSCRIPTS) + "}", text)
    text = VULGAR.sub(_vulgar, text)
    text = THOUSANDS_MARK.sub("", text).translate(SIGNS)
    text = unicodedata.normalize("NFKC", text).translate(SIGNS)
    if "'" in text or '"' in text:
        text = _with_primes(text)
    text = text.replace("√", "\\sqrt ").replace("\\\\", " ; ")
    text = BOLD.sub("", text).strip().replace("**", "^")
    italic = ITALIC.fullmatch(text)
    text = italic[2] if italic else text
    if "\\" in text or "$" in text or "~" in text:
        text = _without_latex(text)
    text = TIMES_TEN.sub("*", text)
    text = SCIENTIFIC.sub(r"(\1*10^{\2})", text)
    text = SPACED_NAME.sub("", SPACES.sub(" ", text)).strip()
    text = _without_ends(CELSIUS.sub(r"°\1", text) if "°" in text else text)
    return _without_outer_braces(text)


def _with_primes(text: str) -> str:
    """A prime as its own sign, so that it is no quotation mark."""
    text = PRIME.sub(lambda match: "′" * len(match[0]), QUOTED.sub(r"\2", text))
    return SECONDS.sub("′′", text) if text.count('"') == 1 else text


def _environment(text: str) -> str:
    """A matrix stays LaTeX, for math-verify."""
    text = re.sub(r"\\left|\\right|\\displaystyle|\\[()\[\]]|\$+", "", text).replace("\\dfrac", "\\frac")
    return SPACES.sub(" ", text).strip(" .,;")


def _without_latex(text: str) -> str:
    if text.count("$") == 1:  # one alone encloses nothing
        text = DOLLARS.sub(" dollar_ ", text)
    text = (
        text.replace("\\$", " dollar_ ")
        .replace("\\%", "%")
        .replace("\\#", "#")
        .replace("\\&", "&")
        .replace("\\_", "_")
    )
    text = DELIMITER.sub(" ", text)
    if RARE.search(text):
        text = COLOUR.sub(r"\1", INVISIBLE.sub("", text)).replace("\\mathbb{R}", "ℝ")
        text = OVER.sub(r"\\frac{\1}{\2}", text)
    text = text.replace("\\{", "⦃").replace("\\}", "⦄").replace("\\!", "").replace("\\|", "∥")
    text = LATEX_SPACE.sub(" ", text).rstrip("\\ ")
    text = REPEATING.sub(_repeating, text)
    if "bar" in text or "hat" in text or "overline" in text:
        text = ONE_LETTER.sub(_marked_letter, text)
    for _ in range(4):
        shorter = OVERLINE.sub(r" \1 ", WRAPPER.sub(_plain_words, text))
        if shorter == text:
            break
        text = shorter
    text = COMMAND.sub(_word, text)
    return RAISED_PRIME.sub(lambda m: re.sub(r"\s", "", m[1] or m[2]), text) if "′" in text else text


def _plain_words(match: re.Match[str]) -> str:
    """\\text{ cm} and \\mathrm{e}: letters keep a distance from their neighbours, numbers do not need it."""
    return f" {match[1]} "


def _marked_letter(match: re.Match[str]) -> str:
    """The mean of x is not x; a line over two letters is the segment that they alone stand for too."""
    mark = "hat" if "hat" in match[1] else "bar"
    return f" {match[2] or match[3]}_{{{mark}}} "


def _word(match: re.Match[str]) -> str:
    name = match[1]
    plain = WORDS.get(name)
    if plain is not None:
        return plain
    return GREEK_LETTERS.get(name, match[0])


def _vulgar(match: re.Match[str]) -> str:
    """½ after a digit is a mixed number, so a space goes before."""
    top, _, bottom = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return f" \\frac{{{top}}}{{{bottom}}}" if bottom else match[0]


def _repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} as the fraction (16 - 1) / 90."""
    whole, fixed, block = match.groups()
    top = int(whole + fixed + block or "0") - int(whole + fixed or "0")
    return f"(\\frac{{{top}}}{{{'9' * len(block)}{'0' * len(fixed)}}})"


def _without_ends(text: str) -> str:
    """No full stop, comma or quotation mark at the end or the beginning; an ellipsis stays."""
    while text:
        shorter = text.strip(" \t\n\"'")
        if shorter.endswith((".", ",", ";", "!", "?")) and not shorter.endswith("...") and not shorter.endswith("\\!"):
            if shorter.endswith("!") and len(shorter) > 1 and shorter[-2] in "0123456789)}]abcdefghijklmnopqrstuvwxyz":
                return shorter if shorter[-2] in "0123456789)}]" or len(shorter) == 2 else shorter[:-1]
            shorter = shorter[:-1]
        if shorter.startswith((":", ",", ";")):
            shorter = shorter[1:]
        if shorter == text:
            return text
        text = shorter
    return text


def _without_outer_braces(text: str) -> str:
    """{5} is 5; {1, 2} stays, it is a set to those who do not escape braces."""
    while text.startswith("{") and text.endswith("}") and closing(text, 0) == len(text) - 1 and "," not in text:
        text = text[1:-1].strip()
    return text


PAIRS = {"(": ")", "[": "]", "{": "}", "⦃": "⦄"}
OPENERS, CLOSERS = frozenset(PAIRS), frozenset(PAIRS.values())


def closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes; -1 when it does not. ( and [ may close each other: [0, 1)."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] in OPENERS:
            depth += 1
        elif text[position] in CLOSERS:
            depth -= 1
            if depth == 0:
                return position
    return -1


def split_outside(text: str, separator: re.Pattern[str]) -> list[tuple[str, str]]:
    """(separator before, part) pairs, split where the separator stands outside all brackets; else [("", text)]."""
    depth, parts, begin, before, position = 0, [], 0, "", 0
    while position < len(text):
        character = text[position]
        if character in OPENERS:
            depth += 1
        elif character in CLOSERS:
            depth = max(0, depth - 1)
        elif depth == 0:
            match = separator.match(text, position)
            if match and match.end() > position:
                parts.append((before, text[begin:position].strip()))
                before, begin = match[0].strip(), match.end()
                position = match.end()
                continue
        position += 1
    parts.append((before, text[begin:].strip()))
    return parts
