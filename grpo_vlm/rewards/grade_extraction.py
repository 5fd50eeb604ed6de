"""Finds the final answer in a completion. Linear in the text's length; only its last LOOK_BACK characters are read.

In this order: the last <answer> tag behind the thinking; the last \\boxed{} whose braces balance, or a later
"Answer: X" or "the answer is X"; bold type in the last line; the last line itself.
"""

import re
from dataclasses import dataclass

LOOK_BACK = 20_000  # characters
MAX_ANSWER = 1_000  # characters of one candidate
MAX_SENTENCE = 300

THINK_BEGIN = re.compile(r"<\s{0,4}think(?:ing)?\s{0,4}>", re.I)
THINK_END = re.compile(r"<\s{0,4}/\s{0,4}think(?:ing)?\s{0,4}>", re.I)
ANSWER_BEGIN = re.compile(r"<\s{0,4}answer\s{0,4}>", re.I)
ANSWER_END = re.compile(r"<\s{0,4}/\s{0,4}answer\s{0,4}>", re.I)
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
DISPLAY = re.compile(r"\s{0,8}(?:\\\[(?P<bracket>.{1,300}?)\\\]|\$\$(?P<dollars>.{1,300}?)\$\$)", re.DOTALL)
SENTENCE_END = re.compile(r"[.!?。](?:\*\*)?\s+(?=[A-Z*(\\$])")
ABBREVIATION = re.compile(r"(?:^[\s*(\[$]*[A-Z]|\b(?:sq|cu|approx|vs|e\.g|i\.e|ft|in|St|Dr|Mr|Mrs|No))$")
HEDGE = re.compile(r"\W*(?:or|alternatively|maybe|perhaps|possibly|otherwise|(?:it )?(?:could|might|may))\b", re.I)
EXPLANATION = re.compile(
    r"[,;.]?\s+(?:because|since|as|which|where|so|due\s+to|given)\s|\s*[,;]\s*(?:and\s+)?(?:not|rather\s+than|instead\s+of)\b"
    r"|\s+(?:rather\s+than|instead\s+of)\b|\s+\([A-Za-z ]{3,60}\)\s*$",
    re.I,
)
PREDICATE = re.compile(
    r"(?<!not)(?<!n't)(?<!n’t)\s(?:is|are|was|be|equals|becomes|gives|get|yields)(?:\s+equal\s+to|\s+exactly)?:?\s+",
    re.I,
)
CONNECTIVE = re.compile(
    r"(?:(?:so|thus|therefore|hence|then|finally|and|it|it's|its|we|have|get|is|are|find|that|this|means)\b[,:]?\s*){1,6}"
    r"(?=\S)",
    re.I,
)
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
    """What is in the last \\boxed{...} whose braces balance, stripped; None without one."""
    box = _last_box(text[-LOOK_BACK:])
    return None if box is None else box[1]


def last_tag(text: str) -> str | None:
    """What is in the last <answer>...</answer>, stripped; to the end when it is not closed; None without one."""
    begin = None
    for begin in ANSWER_BEGIN.finditer(text):  # noqa: B007
        pass
    if begin is None:
        return None
    end = ANSWER_END.search(text, begin.end())
    return text[begin.end() : end.start() if end else len(text)].strip()


def find_answer(text: str) -> Found:
    """The final answer of a completion."""
    rest = after_thinking(text)
    if rest is None:
        return Found((), "", "the thinking does not end")
    rest = rest[-LOOK_BACK:]
    tag = last_tag(rest)
    found = _in_text(rest if tag is None else tag, tagged=tag is not None)
    if not any(candidate.strip() for candidate in found.candidates):
        return Found((), found.place, found.reason or "the answer is empty")
    return found


def _in_text(text: str, *, tagged: bool) -> Found:
    box = _last_box(text)
    marker = _last_marker(text, after=-1 if box is None else box[0])
    if marker is not None:
        return _marked(text, marker)
    if box is not None:
        return Found((box[1][:MAX_ANSWER],), "box")
    if tagged and "\n" not in text:
        return Found(_readings(text[:MAX_ANSWER]), "tag")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return Found((), "", "there is no answer")
    if "\\boxed{" in lines[-1]:
        return Found((), "box", "the braces of \\boxed do not balance")
    return _unmarked(lines[-1], "tag" if tagged else "line")


def _last_box(text: str) -> tuple[int, str] | None:
    """Where it begins and what is in it. One pass over the braces; of nested boxes the inner one."""
    open_boxes: list[tuple[int, int] | None] = []
    last: tuple[int, str] | None = None
    for match in BRACES.finditer(text):
        if match["box"]:
            open_boxes.append((match.start(), match.end()))
        elif match["open"]:
            open_boxes.append(None)
        elif match["close"] and open_boxes:
            box = open_boxes.pop()
            if box is not None and (last is None or box[0] > last[0]):
                last = box[0], text[box[1] : match.start()].strip()
    return last


def _last_marker(text: str, *, after: int) -> re.Match[str] | None:
    """The last "answer is" or "Answer:" that states one, behind position `after` (that of a box, or -1)."""
    last = None
    for match in MARKER.finditer(text, max(after, 0)):
        content = text[match.end() : match.end() + MAX_SENTENCE]
        if not content.strip(" \t\n*_") or DENIED.match(content):
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
    if said and not DENIED.match(said):
        readings.append(said)
    return tuple(dict.fromkeys(reading for reading in readings if reading))
