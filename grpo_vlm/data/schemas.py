"""The shapes in which people keep questions: which columns a row has, and what they say.

`detect` looks at the columns and the first rows and names the shape; the Schema then reads any row of the set into a
RawRow, which rows.py turns into a prompt. Shapes, in the order in which they are tried:

    verl      prompt (messages or text), images/videos, reward_model.ground_truth
    openai    messages whose parts carry their media: {"type": "image_url", "image_url": {"url": ...}}
    trl       prompt (messages), image/images, any columns
    r1v       image, problem, solution (<answer>...</answer>)
    easyr1    a text column with <image> and <video> marks, images/videos, an answer

Columns tell them apart, never the text of a question, in which a mark may stand or not.

data.prompt_key, answer_key, image_key and video_key come before everything that is found here; a dotted key reaches
into a struct (reward_model.ground_truth).
"""

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_vlm.data.cells import is_empty, listed, reached, without
from grpo_vlm.errors import DataError

PROMPT_NAMES = ("prompt", "messages", "problem", "question")
VERL_ANSWER = "reward_model.ground_truth"
ANSWER_NAMES = ("answer", VERL_ANSWER, "solution", "ground_truth")
FOUND_ANSWERS = (VERL_ANSWER, "answer", "solution", "ground_truth")  # in this order, unless data.answer_key names one
IMAGE_NAMES = ("images", "image")
VIDEO_NAMES = ("videos", "video")
AUDIO_NAMES = ("audio", "audios")
MEDIA_PARTS = ("image", "image_url", "video", "video_url")
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Keys:
    """What the user asked for; the defaults stand for "not set". empty_answer: data.allow_empty_answer."""

    prompt: str = "prompt"
    answer: str | None = None
    image: str = "images"
    video: str = "videos"
    empty_answer: bool = False

    @classmethod
    def of(cls, data_config: Any) -> "Keys":
        """The `data` section's keys."""
        names = data_config.prompt_key, data_config.answer_key, data_config.image_key, data_config.video_key
        return cls(*names, data_config.allow_empty_answer)


@dataclass(frozen=True)
class Turn:
    """One message. content: marked text, or a list of parts as the row has them."""

    role: str
    content: str | list[Any]


@dataclass(frozen=True)
class RawRow:
    """What a row says, whatever its shape. turns: the conversation. images, videos: the cells of the media columns,
    None without. answer: the right answer as the row has it, "" for none. columns: the row without its media. names:
    of all columns."""

    turns: list[Turn]
    images: Any
    videos: Any
    answer: Any
    columns: dict[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Schema:
    """One shape with its columns. prompt, answer, image, video: names of columns; answer None where no column has it.

    media: the columns of pictures and videos that are there. conversation: the question is a list of messages.
    media_first: pictures without a mark stand before the question (R1-V, TRL) instead of being a fault. answered:
    without an answer column, the conversation's last message is the answer; else such rows have none, and the reward
    works with the other columns. empty_answer: a row may have none. absent: keys of media that the user set and that
    are no column.
    """

    name: str
    prompt: str
    answer: str | None
    image: str
    video: str
    conversation: bool
    media_first: bool
    answered: bool = False
    empty_answer: bool = False
    media: tuple[str, ...] = ()
    absent: tuple[tuple[str, str], ...] = ()

    @property
    def description(self) -> str:
        """For logs: the name and which column is what."""
        answer = "no answers (ground_truth is empty; data.answer_key names their column)"
        if self.answer:
            answer = f"answer in {self.answer!r}"
        elif self.answered:
            answer = f"answer in the last message of {self.prompt!r}"
        media = f"media in {' and '.join(map(repr, self.media))}" if self.media else "no column of pictures or videos"
        if self.name == "openai":
            media += ", and what the messages carry"
        return f"{self.name} rows: question in {self.prompt!r}, {answer}, {media}"

    def read(self, row: Mapping[str, Any], row_id: str) -> RawRow:
        """Raises DataError naming row, column and what was found."""
        for name in AUDIO_NAMES:
            if not is_empty(row.get(name)) and name not in (self.prompt, self.answer):
                raise DataError(f"{row_id}: column {name!r} is filled, but audio is not supported; remove the column")
        check_media_keys(self.absent, row, row_id)
        turns = self._turns(self._cell(row, row_id, self.prompt), row_id)
        answer, turns = self._answer(row, row_id, turns)
        if turns[-1].role not in ("user", "tool"):
            raise DataError(
                f"{row_id}: the last message of column {self.prompt!r} is the {turns[-1].role}'s; a prompt ends with "
                "the user's (the answer goes into a column of its own)"
            )
        image, video = _filled(row, self.image, IMAGE_NAMES), _filled(row, self.video, VIDEO_NAMES)
        media = (self.image, self.video, image, video)
        kept = {key: without(key, value, media) for key, value in row.items() if key not in media}
        return RawRow(turns, reached(row, image), reached(row, video), answer, kept, tuple(row))

    def _turns(self, cell: Any, row_id: str) -> list[Turn]:
        cell = _messages(cell)
        if isinstance(cell, str) and cell.strip():
            return [Turn("user", cell)]
        if isinstance(cell, Sequence) and not isinstance(cell, (str, bytes)) and len(cell):
            return [self._turn(message, number, row_id) for number, message in enumerate(cell)]
        raise DataError(
            f"{row_id}: column {self.prompt!r} must hold the question as text or as messages, found "
            f"{type(cell).__name__} {str(cell)[:60]!r}; fix the row or set data.prompt_key"
        )

    def _turn(self, message: Any, number: int, row_id: str) -> Turn:
        place = f"{row_id}: column {self.prompt!r}, message {number}"
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise DataError(f"{place} must be {{'role', 'content'}}, found {str(message)[:80]!r}; fix it")
        role, content = message["role"], message["content"]
        if role not in ("system", "user", "assistant", "tool"):
            raise DataError(f"{place} has the role {role!r}; it must be system, user, assistant or tool")
        if isinstance(content, str):
            return Turn(role, listed(content, _is_part))
        if isinstance(content, Sequence) and not isinstance(content, bytes):
            return Turn(role, list(content))
        raise DataError(f"{place}: content must be text or a list of parts, found {type(content).__name__}; fix it")

    def _answer(self, row: Mapping[str, Any], row_id: str, turns: list[Turn]) -> tuple[Any, list[Turn]]:
        if self.answer is not None:
            place, answer = f"column {self.answer!r} is empty", self._cell(row, row_id, self.answer)
        elif (spoken := _spoken(turns)) is not None:
            place, answer, turns = "the assistant's message is empty", spoken, turns[:-1]
        elif not self.answered:
            return "", turns
        else:
            place, answer = f"column {self.prompt!r} does not end with the assistant's answer, as other rows do", None
        if self.name == "r1v" and isinstance(answer, str) and (tagged := ANSWER_TAG.findall(answer)):
            answer = tagged[-1].strip()  # an explanation before it may name the tag
        if _says_nothing(answer):
            if self.empty_answer:
                return "", turns
            raise DataError(
                f"{row_id}: {place}; fill the answer or remove the row, or, for a reward that does not read "
                "ground_truth, set data.allow_empty_answer=true"
            )
        check_text(answer_text(answer), f"{row_id}: the answer")
        return answer, turns

    def _cell(self, row: Mapping[str, Any], row_id: str, key: str) -> Any:
        if key in row:
            return row[key]
        value: Any = row
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise DataError(
                    f"{row_id}: no column {key!r}; present: {', '.join(row)}; rename it or set the data.*_key options"
                )
            value = value[part]
        return value


def _messages(cell: Any) -> Any:
    """The messages that a cell holds as JSON text; any other cell as it is."""
    return listed(cell, lambda item: isinstance(item, dict) and "role" in item)


def _is_part(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") in ("text", *MEDIA_PARTS)


def _spoken(turns: Sequence[Turn]) -> str | None:
    """The text of the assistant's message at the end, None where there is none or it is more than text."""
    if len(turns) < 2 or turns[-1].role != "assistant":
        return None
    content = turns[-1].content
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else None


def _says_nothing(answer: Any) -> bool:
    """Whether an answer is empty: null, blank text, the number that stands for a missing one, or a list of these."""
    if isinstance(answer, float):
        return math.isnan(answer)
    if isinstance(answer, (list, tuple)):
        return all(map(_says_nothing, answer))
    return answer is None or (isinstance(answer, str) and not answer.strip())


def _filled(row: Mapping[str, Any], column: str, names: Sequence[str]) -> str:
    """The column with a row's media: the set's own, or its other usual name where only that is filled in this row."""
    if column not in names or not is_empty(row.get(column)):
        return column
    return next((name for name in names if not is_empty(row.get(name))), column)


def check_media_keys(absent: Sequence[tuple[str, str]], row: Mapping[str, Any], place: str = "") -> None:
    """Raises DataError when the row has pictures or videos that a key set by the user, (option, column), passes by."""
    for option, asked in absent:
        names = IMAGE_NAMES if option == "data.image_key" else VIDEO_NAMES
        filled = next((name for name in names if not is_empty(row.get(name))), None)
        if filled is not None:
            raise DataError(
                f"{place}{': ' if place else ''}missing column {asked!r} ({option}), while {filled!r} is filled; "
                f"present: {', '.join(row)}; leave {option} out, or set it to the column that is meant"
            )


def detect(columns: Sequence[str], first_rows: Sequence[Mapping[str, Any]], keys: Keys | None = None) -> Schema:
    """The shape of rows with these columns. first_rows: a few of them, for what the columns alone do not tell.

    Raises DataError that names the columns and every shape when there is no question column, or when a key that the
    user set is not a column.
    """
    keys = keys or Keys()
    prompt = _find("data.prompt_key", keys.prompt, Keys.prompt, PROMPT_NAMES, columns, first_rows)
    image = _find("data.image_key", keys.image, Keys.image, IMAGE_NAMES, columns, first_rows)
    video = _find("data.video_key", keys.video, Keys.video, VIDEO_NAMES, columns, first_rows)
    absent = tuple(
        (option, asked)
        for option, asked, usual, found in (
            ("data.image_key", keys.image, IMAGE_NAMES, image),
            ("data.video_key", keys.video, VIDEO_NAMES, video),
        )
        if found is None and asked not in usual
    )
    for row in first_rows:
        check_media_keys(absent, row)
    answer = keys.answer if keys.answer is not None and _has(keys.answer, columns, first_rows) else None
    if answer is None and keys.answer in (None, ANSWER_NAMES[0]):
        answer = next((name for name in FOUND_ANSWERS if _has(name, columns, first_rows)), None)
    elif answer is None:
        answer = _find("data.answer_key", keys.answer, "null", ANSWER_NAMES, columns, first_rows)
    cells = [_messages(row[prompt]) for row in first_rows if prompt and row.get(prompt) is not None]
    conversation = bool(cells) and not isinstance(cells[0], str)
    if prompt is None or (answer is None and not conversation and not keys.empty_answer):
        raise DataError(_no_shape(columns, prompt))
    if answer == VERL_ANSWER:
        name = "verl"
    elif conversation:
        name = "openai" if prompt == "messages" or any(_carries_media(cell) for cell in cells) else "trl"
    elif answer == "solution":
        name = "r1v"
    else:
        name = "easyr1"
    return Schema(
        name=name,
        prompt=prompt,
        answer=answer,
        image=image or keys.image,
        video=video or keys.video,
        conversation=conversation,
        media_first=name in ("openai", "trl", "r1v"),
        answered=answer is None and any(map(_ends_with_assistant, cells)),
        empty_answer=keys.empty_answer,
        media=_media_columns(columns, (image, video)),
        absent=absent,
    )


def _media_columns(columns: Sequence[str], found: Sequence[str | None]) -> tuple[str, ...]:
    """The columns in which a row may have media: those found, and their other usual names."""
    named = [name for name in found if name is not None]
    others = [name for names in (IMAGE_NAMES, VIDEO_NAMES) if set(names) & set(named) for name in names]
    return tuple(dict.fromkeys([*named, *(name for name in others if name in columns)]))


def _find(
    option: str,
    asked: str,
    default: str,
    names: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> str | None:
    """The column that `asked` names; without it, where the user did not ask, the first of `names` that is there."""
    if _has(asked, columns, rows):
        return asked
    if asked != default:
        if option in ("data.image_key", "data.video_key"):  # rows without media need no such column
            return None
        usual = next((name for name in names if _has(name, columns, rows)), None)
        way = f", or leave {option} at {default}, by which {usual!r} is found" if usual else ""
        raise DataError(
            f"missing column {asked!r} ({option}); present: {', '.join(columns)}; rename a column or set the key in "
            f"brackets{way}"
        )
    return next((name for name in names if _has(name, columns, rows)), None)


def _has(name: str, columns: Container[str], rows: Sequence[Mapping[str, Any]]) -> bool:
    if name in columns:
        return True
    first, dot, rest = name.partition(".")
    cells = [row.get(first) for row in rows]
    return bool(dot) and first in columns and any(isinstance(cell, Mapping) and rest in cell for cell in cells)


def _ends_with_assistant(messages: Any) -> bool:
    last = messages[-1] if isinstance(messages, Sequence) and len(messages) > 1 else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _carries_media(messages: Any) -> bool:
    """Whether a part of these messages holds its own picture or video."""
    for message in messages if isinstance(messages, Sequence) else ():
        content = listed(message.get("content"), _is_part) if isinstance(message, Mapping) else None
        for part in content if isinstance(content, Sequence) and not isinstance(content, str) else ():
            if isinstance(part, Mapping) and any(part.get(key) is not None for key in MEDIA_PARTS):
                return True
    return False


def _no_shape(columns: Sequence[str], prompt: str | None) -> str:
    missing = "question column (data.prompt_key)" if prompt is None else f"answer beside {prompt!r} (data.answer_key)"
    none = "" if prompt is None else "; where the reward needs none, set data.allow_empty_answer=true"
    return (
        f"the columns {', '.join(columns)} have no {missing}; a question is in one of {', '.join(PROMPT_NAMES)}, its "
        f"answer in one of {', '.join(ANSWER_NAMES)}, pictures in {' or '.join(IMAGE_NAMES)}, videos in "
        f"{' or '.join(VIDEO_NAMES)}; rename a column or set the key in brackets{none}"
    )


def answer_text(answer: Any) -> str:
    """An answer as the reward gets it: text as it is, lists, dicts and Python's numbers as JSON, anything else (a
    Decimal, a date) as its text."""
    if isinstance(answer, (list, tuple, dict, bool, int, float)):
        return json.dumps(answer, ensure_ascii=False, default=str)
    return str(answer)


def check_text(text: str, place: str) -> None:
    """Raises DataError for text that cannot be written as UTF-8: JSON may hold half of a pair of surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place} holds {text[error.start]!a}, half of a surrogate pair and no character (at character "
            f"{error.start} of {text[:40]!a}); fix it"
        ) from None
