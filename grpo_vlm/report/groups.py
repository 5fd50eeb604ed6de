"""A few groups of each step in full: picture, question, every answer with its scores. What the report and the trackers
show of a run.

The run folder keeps them as groups.jsonl, one group a line, and pictures/KEY.webp, each picture once. The size is
bounded: GROUPS_PER_STEP groups, small pictures, long texts shortened in their middle, and of a long run only
every so many steps.
"""

import dataclasses
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from grpo_vlm.report.files import GROUPS_NAME, PICTURES_NAME, append_text
from grpo_vlm.report.record import Sample, to_line
from grpo_vlm.rewards.grade_extraction import find_answer

GROUPS_PER_STEP = 6
MAX_STEPS = 400  # with groups, of a run of any length; its first ten steps are kept besides
ANSWERS_PER_GROUP = 16
MAX_PICTURES = 4
MAX_SIDE = 384
WEBP_QUALITY = 75
LOSSLESS_SIDE = 128  # pixels that are enlarged to be seen
MAX_CHARACTERS = 6000


@dataclass(frozen=True)
class Thumbnail:
    """A picture as it is shown: WebP of at most MAX_SIDE pixels a side. `key` tells equal pictures."""

    key: str
    webp: bytes

    @property
    def name(self) -> str:
        """Its file in pictures/."""
        return f"{self.key}.webp"


@dataclass(frozen=True)
class Answer:
    """One answer as it is shown. `read` is the final answer that the package's grader finds in it, "" for none, and
    `unread` then says why; `scores` is empty for an answer that was not scored; `reward` is the score less the KL
    penalty where that is in it; `counted` is False where the loss leaves the answer out."""

    response: str
    read: str
    unread: str
    scores: dict[str, float]
    reward: float
    advantage: float | None
    response_length: int
    finish_reason: str
    counted: bool = True

    @classmethod
    def of(cls, sample: Sample, reward: float, *, counted: bool = True) -> "Answer":
        found = find_answer(sample.response)
        return cls(
            response=shorten(sample.response),
            read="".join(found.candidates[:1]),
            unread="" if found.candidates else found.reason,
            scores=sample.scores,
            reward=reward,
            advantage=sample.advantage,
            response_length=sample.response_length,
            finish_reason=sample.finish_reason,
            counted=counted,
        )


@dataclass(frozen=True)
class ShownGroup:
    """One prompt with its answers. `question` is a list of (role, text), `why` says what it was picked for."""

    step: int
    split: str
    row_id: str
    why: str
    question: tuple[tuple[str, str], ...]
    ground_truth: str
    answers: tuple[Answer, ...]
    pictures: tuple[Thumbnail, ...] = ()

    def to_json(self) -> str:
        """One line of groups.jsonl without its newline: pictures by file name."""
        row = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        row["answers"] = [dataclasses.asdict(answer) for answer in self.answers]
        row["pictures"] = [picture.name for picture in self.pictures]
        return to_line(row)


def append_groups(folder: Path, groups: Sequence[ShownGroup]) -> None:
    """Adds lines to groups.jsonl of a run folder, and their pictures; one that is there is not written again."""
    if not groups:
        return
    pictures = folder / PICTURES_NAME
    pictures.mkdir(exist_ok=True)
    for picture in (picture for group in groups for picture in group.pictures):
        if not (pictures / picture.name).exists():
            (pictures / picture.name).write_bytes(picture.webp)
    append_text(folder / GROUPS_NAME, "".join(group.to_json() + "\n" for group in groups))


def is_shown(step: int, total_steps: int) -> bool:
    """Whether the groups of this step are kept: of a long run every so many, and its beginning and end."""
    every = -(-total_steps // MAX_STEPS)
    return step <= 10 or step % every == 0 or step == total_steps


def pick(scores: Sequence[Sequence[float]], count: int = GROUPS_PER_STEP) -> dict[int, str]:
    """Places of at most `count` groups and why each is shown: the highest and lowest mean, the widest spread, and the
    rest drawn evenly, so that what is usual is seen too. `scores` are those of each group's answers, if any.
    """
    places = [place for place, group in enumerate(scores) if group]
    reasons: dict[int, str] = {}

    def add(place: int, why: str) -> None:
        if len(reasons) < count:
            reasons.setdefault(place, why)

    if len(places) > count:
        mean = {place: sum(scores[place]) / len(scores[place]) for place in places}
        spread = {place: max(scores[place]) - min(scores[place]) for place in places}
        add(min(places, key=mean.__getitem__), "lowest mean reward of the step")
        add(max(places, key=mean.__getitem__), "highest mean reward of the step")
        add(max(places, key=spread.__getitem__), "widest spread of the step")
        rest = [place for place in places if place not in reasons]
        wanted = count - len(reasons)
        for number in range(wanted):
            add(rest[number * len(rest) // wanted], "drawn evenly")
    for place in places or range(len(scores)):
        add(place, "drawn evenly")
    return dict(sorted(reasons.items()))


def widest(answers: Sequence[Answer], count: int = ANSWERS_PER_GROUP) -> tuple[Answer, ...]:
    """The answers of a group, or of a large group those with the highest and the lowest rewards, in their order."""
    if len(answers) <= count:
        return tuple(answers)
    ranked = sorted(range(len(answers)), key=lambda place: answers[place].reward)
    kept = {*ranked[: count // 2], *ranked[-(count - count // 2) :]}
    return tuple(answer for place, answer in enumerate(answers) if place in kept)


def thumbnail(picture: Image.Image, key: str) -> Thumbnail:
    """A small copy of an RGB picture; a smaller one keeps its size."""
    small = picture.copy()
    small.thumbnail((MAX_SIDE, MAX_SIDE))
    stream = io.BytesIO()
    small.save(stream, "WEBP", quality=WEBP_QUALITY, lossless=max(small.size) <= LOSSLESS_SIDE)
    return Thumbnail(key, stream.getvalue())


def shorten(text: str, limit: int = MAX_CHARACTERS) -> str:
    """The text, or its first third and its end, where the result stands, with the number of characters left out."""
    if len(text) <= limit:
        return text
    head = limit // 3
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[head - limit :]}"


def flatten(messages: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Chat messages as (role, text), with a mark where a picture or a video stands."""
    marks = {"image": "[picture]", "video": "[video]"}
    return tuple(
        (
            message["role"],
            message["content"]
            if isinstance(message["content"], str)
            else "".join(part.get("text", marks.get(part["type"], "")) for part in message["content"]),
        )
        for message in messages
    )
