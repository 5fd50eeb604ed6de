"""From what a row says to chat messages: marks become media parts, media find their places, the format prompt wraps
the question.

`<image>` and `<video>` in text stand for the next picture or video of the row; `\\<image>` and `\\<video>` are the
words themselves, and `\\\\<image>` is a backslash before a picture. A list of parts that names its media ({"type":
"image"}, {"type": "image_url", ...}) keeps such words in its texts as they are.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jinja2

from grpo_vlm.data.cells import is_empty
from grpo_vlm.data.entries import WRAPPINGS, check_settings, image_entries, inside, video_entries
from grpo_vlm.data.schemas import RawRow, Schema, Turn
from grpo_vlm.errors import DataError, MediaError

IMAGE, VIDEO, TEXT = "image", "video", "text"
MARK = re.compile(r"(\\*)<(image|video)>")
WORDS = {IMAGE: "pictures", VIDEO: "videos"}
PART_KINDS = {"text": TEXT, "image": IMAGE, "image_url": IMAGE, "video": VIDEO, "video_url": VIDEO}


@dataclass(frozen=True)
class Part:
    """A piece of a message: text, or a picture or video. entry: what the part itself carries, None for one that
    stands for the next of the row's column. settings: what it says of that one."""

    kind: str
    text: str = ""
    entry: Any = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Conversation:
    """A row's messages and its media in reading order. key: equal for conversations that render to the same text."""

    messages: list[dict[str, Any]]
    images: list[Any]
    videos: list[Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple((m["role"], tuple((p["type"], p.get("text")) for p in m["content"])) for m in self.messages)

    @property
    def shown(self) -> str:
        """The start of the question, for errors."""
        texts = (part.get("text", "") for message in self.messages for part in message["content"])
        return "".join(texts)[:60]


class Converser:
    """Makes conversations with the settings of the `data` section. format_prompt: a compiled template or None."""

    def __init__(self, system_prompt: str | None, format_prompt: jinja2.Template | None):
        self.system_prompt, self.format_prompt = system_prompt, format_prompt

    def converse(self, raw: RawRow, schema: Schema, row_id: str) -> Conversation:
        """Raises DataError when marks and media differ in number, naming both, or a part cannot be understood."""
        turns = [(turn.role, list(_parts(turn, f"{row_id}: column {schema.prompt!r}"))) for turn in raw.turns]
        columns = {IMAGE: self._entries(raw.images, schema.image, row_id, image_entries)}
        columns[VIDEO] = self._entries(raw.videos, schema.video, row_id, video_entries)
        if schema.media_first:
            _place_first(turns, columns)
        if not any(part.kind != TEXT or part.text.strip() for part in turns[-1][1]):
            raise DataError(f"{row_id}: the last message of column {schema.prompt!r} is empty; fill or remove the row")
        media = {kind: _assigned(kind, turns, columns[kind], raw, schema, row_id) for kind in (IMAGE, VIDEO)}
        if self.format_prompt is not None:
            role, parts = turns[-1]
            turns[-1] = role, self._formatted(parts, row_id)
        if self.system_prompt:
            turns = [("system", [Part(TEXT, self.system_prompt)]), *(turn for turn in turns if turn[0] != "system")]
        messages = [{"role": role, "content": _content(parts)} for role, parts in turns]
        return Conversation(messages, media[IMAGE], media[VIDEO])

    def _entries(self, cell: Any, column: str, row_id: str, read: Any) -> list[Any]:
        try:
            return read(cell)
        except DataError as error:
            raise type(error)(f"{row_id}: column {column!r}: {error}") from None

    def _formatted(self, parts: Sequence[Part], row_id: str) -> list[Part]:
        """The question as the format prompt writes it: rendered with its marks, and taken apart again."""
        written = self.format_prompt.render(content=_marked(parts))
        made = list(_marked_parts(written))
        for kind in (IMAGE, VIDEO):
            before, after = (sum(part.kind == kind for part in some) for some in (parts, made))
            if before != after:
                raise DataError(
                    f"{row_id}: data.format_prompt turns {before} <{kind}> marks into {after}; the template must "
                    "write `content` exactly once and no mark of its own"
                )
        return made


def _parts(turn: Turn, place: str) -> Iterator[Part]:
    if isinstance(turn.content, str):
        yield from _marked_parts(turn.content)
        return
    listed = [_part(item, place) for item in turn.content]
    names_media = any(part.kind != TEXT for part in listed)
    for part in listed:
        if part.kind == TEXT and not names_media:
            yield from _marked_parts(part.text)
        else:
            yield part


def _part(item: Any, place: str) -> Part:
    """One element of a content list. Keys that are empty are not there: parquet fills structs with nulls."""
    if isinstance(item, str):
        return Part(TEXT, item)
    if not isinstance(item, Mapping):
        raise DataError(f"{place}: a part of a message must be a dict or text, found {type(item).__name__}; fix it")
    filled = {key: value for key, value in item.items() if not is_empty(value)}
    kind = item.get("type") or next((key for key in PART_KINDS if item.get(key) is not None), None)
    if kind not in PART_KINDS:
        raise DataError(
            f"{place}: a part has the type {kind!r} (its keys: {', '.join(map(str, filled))}); it must be one of "
            f"{', '.join(PART_KINDS)}"
        )
    if PART_KINDS[kind] == TEXT:
        return Part(TEXT, _text(filled, place))
    return _media_part(kind, {key: value for key, value in filled.items() if key != "type"}, place)


def _text(filled: Mapping[str, Any], place: str) -> str:
    """The text of a part, under `text` or, as some write it, `content`."""
    key = "content" if "content" in filled and "text" not in filled else "text"
    if others := sorted(set(map(str, filled)) - {"type", key}):
        raise DataError(f"{place}: a part of text has {', '.join(others)} as well; make a part of its own of it")
    text = filled.get(key, "")
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise DataError(f"{place}: the text of a part must be text, found {type(text).__name__} {str(text)[:40]!r}")
    return str(text)


def _media_part(kind: str, own: dict[str, Any], place: str) -> Part:
    if more := [key for key in ("text", "content") if key in own]:
        raise DataError(f"{place}: a part of the type {kind} has {more[0]} as well; make a part of its own of it")
    if kind.endswith("_url") and inside(own) is None:
        raise MediaError(
            f"{place}: a part of the type {kind} has no url; write {{'type': '{kind}', '{kind}': {{'url': ...}}}}"
        )
    if PART_KINDS[kind] == IMAGE:
        try:
            check_settings(own)
        except DataError as error:
            raise DataError(f"{place}: a part of the type {kind}: {error}") from None
    if inside(own) is not None:
        return Part(PART_KINDS[kind], entry=own)
    settings = {key: value for key, value in own.items() if key not in WRAPPINGS}
    return Part(PART_KINDS[kind], settings=settings or None)


def _marked_parts(text: str) -> Iterator[Part]:
    """The parts of marked text."""
    start, held = 0, ""
    for mark in MARK.finditer(text):
        slashes = len(mark[1])
        held += text[start : mark.start()] + "\\" * (slashes // 2)
        start = mark.end()
        if slashes % 2:
            held += f"<{mark[2]}>"
            continue
        if held:
            yield Part(TEXT, held)
        held = ""
        yield Part(mark[2])
    if held or start < len(text):
        yield Part(TEXT, held + text[start:])


def _marked(parts: Sequence[Part]) -> str:
    """The marked text that `_marked_parts` takes apart again."""
    written = ""
    for is_text, some in groupby(parts, lambda part: part.kind == TEXT):
        if is_text:
            text = "".join(part.text for part in some)
            written += MARK.sub(lambda mark: f"{mark[1] * 2}\\<{mark[2]}>", text)
        else:
            slashes = len(written) - len(written.rstrip("\\"))
            written += "\\" * slashes + "".join(f"<{part.kind}>" for part in some)
    return written


def _content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """What a chat template takes: no media, only their places."""
    return [{"type": TEXT, "text": part.text} if part.kind == TEXT else {"type": part.kind} for part in parts]


def _place_first(turns: list[tuple[str, list[Part]]], columns: dict[str, list[Any]]) -> None:
    """Media that no part stands for go to the start of the first user message, pictures before videos."""
    ahead = []
    for kind, entries in columns.items():
        if entries and not any(part.kind == kind for _, parts in turns for part in parts):
            ahead += [Part(kind)] * len(entries)
    for role, parts in turns:
        if role == "user":
            parts[:0] = ahead
            return


def _assigned(
    kind: str,
    turns: Sequence[tuple[str, list[Part]]],
    entries: list[Any],
    raw: RawRow,
    schema: Schema,
    row_id: str,
) -> list[Any]:
    """The entry of each part of this kind, in reading order."""
    parts = [part for _, parts in turns for part in parts if part.kind == kind]
    waiting = sum(part.entry is None for part in parts)
    if waiting != len(entries):
        column = {IMAGE: schema.image, VIDEO: schema.video}[kind]
        there = column.partition(".")[0] in raw.names
        absent = "" if there else f" (there is no such column; present: {', '.join(raw.names)})"
        shown = "".join(part.text if part.kind == TEXT else f"<{part.kind}>" for _, parts in turns for part in parts)
        raise DataError(
            f"{row_id}: {waiting} <{kind}> marks in column {schema.prompt!r} but {len(entries)} {WORDS[kind]} in "
            f"column {column!r}{absent}; text starts {shown[:60]!r}; write one <{kind}> for each of them, \\<{kind}> "
            f"where the word itself is meant, or set data.{kind}_key"
        )
    following = iter(entries)
    return [_with_settings(next(following), part) if part.entry is None else part.entry for part in parts]


def _with_settings(entry: Any, part: Part) -> Any:
    """A video of the row's column with what its part says of it."""
    if part.settings is None or part.kind == IMAGE:
        return entry
    return {**(entry if isinstance(entry, Mapping) else {VIDEO: entry}), **part.settings}
