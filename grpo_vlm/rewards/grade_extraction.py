"""Finds the final answer in a completion. Linear in the text's length; only its last LOOK_BACK characters are read.

In this order: the last <answer> tag behind the thinking, to the end when it is not closed; the last \\boxed{} whose
braces balance, with a unit that stands behind it, or a later "Answer: X" or "the answer is X"; bold type in the last
line; the last line itself.
"""

import re
from dataclasses import dataclass

from grpo_vlm.rewards.grade_spelling import clean
from grpo_vlm.rewards.grade_units import known_unit, split_unit

LOOK_BACK = 20_000  # characters
MAX_ANSWER = 1_000  # characters of one candidate
MAX_SENTENCE = 300

THINK_BEGIN = re.compile(r"<\s{0,4}think(?:ing)?\s{0,4}>", re.I)
THINK_END = re.compile(r"<\s{0,4}/\s{0,4}think(?:ing)?\s{0,4}>", re.I)
ANSWER_BEGIN = re.compile(r"<\s{0,4}answer\s{0,4}>", re.I)
ANSWER_END = re.compile(r"<\s{0,4}/\s{0,4}answer\s{0,4}>|<\s{0,4}/\s{0,4}[answer]{0,6}\s{0,4}$", re.I)  # or cut off
END_TOKENS = re.compile(r"(?:<\|[\w ]{1,40}\|>|</s>|<eos>)\s*$")
MOST_END_TOKENS = 4
MOST_BOXES = 16  # in a list
SENTENCE_START = re.compile(r"[.!?。]\s|\n|[,;]\s")
BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s{0,4}\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
MARKER = re.compile(
    r"(?:\b(?:answer|(?:correct|right|best)\s{1,4}(?:option|choice))(?:\(s\))?[*_\s]{0,8}"
    r"(?:(?P<is>(?:is|are|(?:will|would|should|must)\s{1,4}be)\b)[*_\s]{0,8}:?|[:：=])"
    r"|final\s{1,4}answer[*_#\s]{0,8}\n|答案(?:是|为|為)?[:：]?|(?<!\S)####)[*_\s]{0,8}",
    re.I,
)
DENIED = re.compile(r"(?:not|neither)\s{1,4}(?:the\s)?(?:option\s)?[*$(\[]{0,3}(?:[A-Z]\b|[-\d\\])")
LIKELY_ANSWER = re.compile(  # behind a box "the answer is" must go on like this to count
    r"[\s*$(\[{]{0,8}(?:[-−+±]?\s?[\d.√π]|\\(?:frac|dfrac|sqrt|boxed|text|pi)\b|[A-Z](?:[\s.,:)*\]$}]|$)|[a-z]\s?=)"
)
DENIAL = re.compile(  # ends right before the answer, or before its "is"
    r"(?:\b(?:wrong|incorrect|false|mistaken)\s+(?:final\s+)?(?:answer|option|choice|result|value|solution)s?"
    r"|(?:\bnot|n['’]t|\bnever|\bneither|\bcannot)(?:\s+(?:be|is|equal(?:\s+to)?|the|my|our|correct|right|final|best|answer|"
    r"option|choice|value|think|believe|say|claim|mean|that|it|sure|certain|if|choose|pick|select))*"
    r"|\b(?:suppose|assume|assuming|supposing|imagine|if|whether|unless|doubt)(?:\s+(?:that|the|my|our|correct|right|final|"
    r"answer|option|choice|value|it|this|x))*"
    r"|\b(?:could|might|may))$",
    re.I,
)
DENIAL_WORD = re.compile(
    r"not|n['’]t|n(?:ever|either)|wrong|incorrect|false|mistaken|suppos|assum|imagine|if|whether|unless|doubt|"
    r"could|m(?:ight|ay)",
    re.I,
)
BEFORE_ANSWER = re.compile(r"(?:\b(?:is|are|was|be|equals))?[\s$:*_(\[\\]*$", re.I)
LOOK_BEFORE = 120  # characters
DENIED_BEHIND = re.compile(
    r"[\s$*)\]\\]*(?:is|was|are|would\s+be|cannot\s+be|can't\s+be)\s+(?:(?:clearly|obviously|therefore|thus)\s+)?(?:incorrect|"
    r"invalid|wrong|false|impossible|extraneous|not\s+(?:the\s+(?:final\s+)?(?:right|correct|answer|solution)|right|correct|possible|valid|true|an?\s+(?:answer|solution)))\b",
    re.I,
)
BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[\dA-Z+-])([-+]?\d+(?:[./]\d+)?|[A-Z])(?![\w{^/])")
TEXT_BOX = re.compile(  # \boxed{\text{The answer is }5}
    r"\\text(?:bf|rm)?\s*\{\s*(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:\bis\b|:)\s*:?\s*([^{}]*)\}\s*(.*)",
    re.I | re.DOTALL,
)
JOINED = re.compile(r"[\s$]*(?:\\text\s*\{)?\s*(,\s*and\b|\band\b|[,;])\s*\}?[\s$]*|()", re.I)  # boxes side by side
FENCE = re.compile(r"\s*`{3}\w*\s*")
JSON_ANSWER = re.compile(r'\{[^{}]{0,200}"(?:final_)?answer"\s*:\s*(?:"([^"]{1,200})"|([-+]?[\d.]{1,40}))\s*\}')
CHOSEN = re.compile(
    r"(?:so|thus|therefore|hence)?,?\s*I(?:['’]d|['’]ll|\s+would|\s+will)?\s+(?:choose|pick|select)\s+(?:option\s+|answer\s+)?([A-Z])",
    re.I,
)
DISPLAY = re.compile(r"\s{0,8}(?:\\\[(?P<bracket>.{1,300}?)\\\]|\$\$(?P<dollars>.{1,300}?)\$\$)", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?。](?:\*\*)?\s+(?=[A-Z*(\\$])")
ABBREVIATION = re.compile(r"(?:^[\s*(\[$]*[A-Z]|\b(?:sq|cu|approx|vs|e\.g|i\.e|ft|in|St|Dr|Mr|Mrs|No))$")
HEDGE = re.compile(r"\W*(?:or|alternatively|maybe|perhaps|possibly|otherwise|(?:it )?(?:could|might|may))\b", re.I)
EXPLANATION = re.compile(
    r"[,;.]?\s+(?:because|since|as|which|where|so|due\s+to|given)\s|\s*[,;]\s*(?:and\s+)?(?:not|rather\s+than|instead\s+of)\b"
    r"|\s+(?:rather\s+than|instead\s+of)\b|\s+\((?![^)]*(?:\bnot?\b|wrong|"
    r"incorrect|false|invalid|reject|impossible|extraneous))[A-Za-z ]{3,60}\)\s*$",
    re.I,
)
PREDICATE = re.compile(
    r"(?<!not)(?<!n't)(?<!n’t)\s(?:is|are|was|be|equals|becomes|gives|get|yields)(?:\s+equal\s+to|\s+exactly)?:?\s+",
    re.I,
)
CONNECTIVE = re.compile(
    r"(?:(?:so|thus|therefore|hence|then|finally|and|it['’]s|its|it|we|have|get|is|are|find|that|this|means)\b[,:]?\s*){1,6}"
    r"(?=\S)",
    re.I,
)
BEHIND_BOX = re.compile(r"(?:\\[,;!]|[^,;!?\n]){1,60}")
UNIT_SIGN = re.compile(r"[^\W\d_]|[°%]")
MATHS_END = re.compile(r"^\s*\\\)|\\\)\s*$|[$*]+")
END_OF_UNIT = re.compile(
    r"\.(?:[\s$*]|$)|\s(?:because|since|as|which|where|so|and|for|is|was|by|to|from|when|if|that)\s|\\boxed"
)
CURRENCY_BEFORE = re.compile(r"(\\\$|[€£¥])\s*$")
NUMBER = re.compile(r"(?![\s(\[]*[(\[][^,]*,|\s*\\\{|\s*\\text)[^;]*(?:[\dπ})]|\\pi)\s*")  # no tuple, set or words
ALTERNATIVE = re.compile(r"[\s$*]*(?:\\text\s*\{)?\s*or\s*\}?[\s$*]*", re.I)
IS_THE_ANSWER = re.compile(r"(.{1,60}?)\s+is\s+the\s+(?:final\s+|correct\s+|right\s+)?answer", re.I)
YES_NO_FIRST = re.compile(r"[\s*]{0,4}(?:yes|no|true|false)[.!]\s", re.I)
BOLD = re.compile(r"\*\*([^*\n]{1,200})\*\*")


@dataclass(frozen=True)
class Found:
    """candidates: readings of the final answer, the whole first; none when there is no answer, and `reason` says why.
    place: tag, box, marker, bold or line."""

    candidates: tuple[str, ...]
    place: str
    reason: str = ""


def after_thinking(text: str) -> str | None:
    """What stands behind the last </think>; the whole text without one; None when thinking began and never ended."""
    end = None
    for end in THINK_END.finditer(text):  # noqa: B007
        pass
    if end is not None:
        return text[end.end() :]
    return None if THINK_BEGIN.search(text) else text


def with_prefill(response: str, prompt_text: str) -> str:
    """The response with the <think> that a chat template has put at the end of the prompt, where there is one: the
    format is then the same for every template."""
    return f"<think>{response}" if prompt_text.rstrip().endswith("<think>") else response


def last_box(text: str) -> str | None:
    """What is in the last \\boxed{...} whose braces balance, stripped, with a unit behind it; None without one."""
    text = text[-LOOK_BACK:]
    box = _last_box(text)
    return None if box is None else _with_unit(text, box)


def last_tag(text: str) -> str | None:
    """What is in the last <answer>...</answer>, stripped; to the end when it is not closed; None without one."""
    begin = previous = None
    for match in ANSWER_BEGIN.finditer(text):
        begin, previous = match, begin
    if begin is None:
        return None
    end = ANSWER_END.search(text, begin.end())
    content = text[begin.end() : end.start() if end else len(text)].strip()
    if not content and end is None and previous is not None:  # <answer>4<answer>: the end tag without its stroke
        between = text[previous.end() : begin.start()]
        return content if ANSWER_END.search(between) else between.strip()
    return content


def find_answer(text: str) -> Found:
    """The final answer of a completion."""
    rest = after_thinking(text)
    if rest is None:
        return Found((), "", "the thinking does not end")
    rest = _without_special_tokens(rest[-LOOK_BACK:])
    tag = last_tag(rest)
    found = _in_text(rest if tag is None else tag, tagged=tag is not None)
    if not any(candidate.strip() for candidate in found.candidates):
        return Found((), found.place, found.reason or "the answer is empty")
    return found


def _without_special_tokens(text: str) -> str:
    """GLM's box tokens as a box; without the tokens that end a turn."""
    for _ in range(MOST_END_TOKENS):
        end = END_TOKENS.search(text, max(0, len(text) - 60)) if text.rstrip().endswith(">") else None
        if end is None or end[0].startswith("<|end_of_box|>"):
            break
        text = text[: end.start()]
    if "\\boxed " in text or "\\fbox " in text or BARE_BOX.search(text):
        text = BARE_BOX.sub(r"\\boxed{\1}", text)
    if "<|" not in text:
        return text
    return text.replace("<|begin_of_box|>", "\\boxed{").replace("<|end_of_box|>", "}")


def _denied(text: str, position: int) -> bool:
    """Whether the answer at a position is one that the words before it deny or only suppose."""
    if not DENIAL_WORD.search(text, max(0, position - LOOK_BEFORE), position):  # mostly
        return False
    clause = SENTENCE_START.split(text[max(0, position - LOOK_BEFORE) : position])[-1]
    return DENIAL.search(BEFORE_ANSWER.sub("", clause, count=1).rstrip()) is not None


def _joined(text: str, box: "_Box") -> str | None:
    """Boxes side by side, such as \\boxed{5} and \\boxed{6}, as one list; None for a box alone or said twice."""
    contents, joints = [box.content], []
    while box.previous is not None:
        between = JOINED.fullmatch(text, box.previous.end, box.start)
        if between is None:
            break
        joints.append(" and " if (between[1] or "").lower().endswith("and") else ", ")
        box = box.previous
        contents.append(box.content)
    if len(set(contents)) == 1 or len(contents) > MOST_BOXES:
        return None
    return "".join(part for pair in zip(contents[::-1], [*joints[::-1], ""], strict=True) for part in pair)


def _in_text(text: str, *, tagged: bool) -> Found:
    box = _last_box(text)
    marker = _last_marker(text, after=-1 if box is None else box.end)
    if marker is not None:
        return _marked(text, marker)
    if box is not None:
        before = text[box.previous.end : box.start] if box.previous is not None else ""
        if ALTERNATIVE.fullmatch(before):
            return Found((), "box", "the answer hedges")
        if _denied(text, box.start) or DENIED_BEHIND.match(text, box.end):
            return Found((), "box", "the answer is denied")
        joined = _joined(text, box)
        if joined is not None:
            return Found((joined[:MAX_ANSWER],), "box")
        said = TEXT_BOX.fullmatch(box.content)
        if said:
            return Found((f"\\text{{{said[1]}}} {said[2]}" if said[1].strip() else said[2],), "box")
        return Found((_with_unit(text, box)[:MAX_ANSWER],), "box")
    if tagged and "\n" not in text:
        return Found(_readings(text[:MAX_ANSWER]), "tag")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not FENCE.fullmatch(line)]
    if not lines:
        return Found((), "", "there is no answer")
    if "\\boxed{" in lines[-1]:
        return Found((), "box", "the braces of \\boxed do not balance")
    record = JSON_ANSWER.fullmatch(lines[-1])
    if record:
        return Found((record[1] or record[2],), "line")
    return _unmarked(lines[-1], "tag" if tagged else "line")


@dataclass(frozen=True)
class _Box:
    """content, stripped; where the box begins and ends in the text, and the box before it."""

    content: str
    start: int
    end: int
    previous: "_Box | None"


def _last_box(text: str) -> _Box | None:
    """One pass over the braces; of nested boxes the inner one."""
    open_boxes: list[tuple[int, int] | None] = []
    last: _Box | None = None
    for match in BRACES.finditer(text):
        if match["box"]:
            open_boxes.append((match.start(), match.end()))
        elif match["open"]:
            open_boxes.append(None)
        elif match["close"] and open_boxes:
            box = open_boxes.pop()
            if box is not None and (last is None or box[0] > last.start):
                previous = None if last is None or last.end > box[0] else last
                last = _Box(text[box[1] : match.start()].strip(), box[0], match.end(), previous)
    return last


def _with_unit(text: str, box: _Box) -> str:
    """What is in the box, with a unit behind it (\\boxed{5} cm, \\boxed{25}\\%) or a currency before it."""
    behind = BEHIND_BOX.match(text, box.end)
    currency = CURRENCY_BEFORE.search(text, max(0, box.start - 4), box.start)
    if not (currency or (behind and UNIT_SIGN.search(behind[0]))) or not NUMBER.fullmatch(box.content):
        return box.content
    if split_unit(clean(box.content[:MAX_ANSWER]))[1] is not None:
        return box.content
    if behind:
        end = END_OF_UNIT.search(behind[0])
        unit = clean(MATHS_END.sub("", behind[0][: end.start()] if end else behind[0]))
        unit = unit.lstrip("^{ ").rstrip("} ") if "°" in unit else unit
        if unit and known_unit(unit):
            return f"{box.content} {unit}"
    return f"{currency[1]}{box.content}" if currency else box.content


def _last_marker(text: str, *, after: int) -> re.Match[str] | None:
    """The last "answer is" or "Answer:" that states one, behind position `after` (that of a box, or -1)."""
    last = None
    for match in MARKER.finditer(text, max(after, 0)):
        content = text[match.end() : match.end() + MAX_SENTENCE]
        if not content.strip(" \t\n*_") or DENIED.match(content) or _denied(text, match.end()):
            continue
        if after >= 0 and match["is"] and not LIKELY_ANSWER.match(content):
            continue
        last = match
    return last


def _marked(text: str, marker: re.Match[str]) -> Found:
    content = text[marker.end() :].lstrip(" \t\n*_")
    display = DISPLAY.match(content)
    if display:
        return Found(_readings(display["bracket"] or display["dollars"]), "marker")
    line, _, later = content.partition("\n")
    sentence, rest = _first_sentence(line)
    if HEDGE.match(rest or later):
        return Found((), "marker", "the answer hedges")
    return Found(_readings(sentence), "marker")


def _unmarked(line: str, place: str) -> Found:
    bold = [part for part in BOLD.findall(line) if not part.rstrip().endswith(":")]
    if bold and len(line) > MAX_SENTENCE:
        return Found(_readings(bold[-1]), "bold")
    sentence, rest = line, _first_sentence(line)[1]
    while rest:
        sentence, rest = rest, _first_sentence(rest)[1]
    readings = _readings(sentence) if len(sentence) <= MAX_SENTENCE else ()
    if bold and bold[-1] in sentence and len(set(bold)) == 1:
        readings = (*readings, *_readings(bold[-1]))
    if YES_NO_FIRST.match(line) and len(line) <= MAX_SENTENCE:  # "Yes. The lines are parallel."
        readings = (line, *readings)
    return Found(readings, place, "" if readings else "there is no marked answer")


def _first_sentence(text: str) -> tuple[str, str]:
    """The text to the end of its first sentence, and the rest. "B. 12 cm" and "sq. cm" do not end one."""
    for end in SENTENCE_END.finditer(text[:MAX_ANSWER]):
        if not ABBREVIATION.search(text[: end.start()]):
            return text[: end.start()], text[end.end() :].strip()
    return text[:MAX_ANSWER], ""


def _readings(text: str) -> tuple[str, ...]:
    """The text itself, without an explanation behind it, and what a sentence says its subject is."""
    readings = [text.strip()]
    explanation = EXPLANATION.search(text)
    short = text[: explanation.start()] if explanation and explanation.start() else text
    readings.append(short.strip())
    connective = CONNECTIVE.match(short)
    if connective:
        readings.append(short[connective.end() :].strip())
    said = PREDICATE.split(short)[-1].strip()
    if said and not DENIED.match(said) and not _denied(short, short.rfind(said)):
        readings.append(said)
    chosen = CHOSEN.fullmatch(short.strip(" .!"))
    if chosen:
        readings.append(chosen[1])
    answer = IS_THE_ANSWER.fullmatch(short.strip(" .!"))
    if answer:
        readings.append(answer[1])
    return tuple(dict.fromkeys(reading for reading in readings if reading))
