"""TensorBoard: scalars, histograms of rewards and lengths, and one picture per step of what was asked and answered.

The picture is for places that show images and no pages; report.html has every answer in full. Letters outside the
Latin alphabet come out as boxes in it (Pillow brings one font); the texts are logged as text too.
"""

import io
import textwrap
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from grpo_vlm.report.groups import Answer, ShownGroup
from grpo_vlm.report.record import StepRecord, spread
from grpo_vlm.report.run_folder import RunFolder

WIDTH, PICTURE_SIDE, MARGIN, LINE = 1000, 180, 12, 17
SHOWN_ANSWERS = 4  # of a group, the best and the worst
FONT_SIZE = 13
CHARACTERS = 116  # of a line beside a picture
JPEG_QUALITY = 85
PAPER, INK, FAINT, GOOD, BAD = "#ffffff", "#1a212b", "#75808e", "#18794e", "#c02c38"
Line = tuple[str, str]  # text and colour


class TensorBoardTracker:
    """Writes to tensorboard/ of the run folder.

    On resume the events of the steps after `resume_step` stay in their files and are hidden by TensorBoard.
    """

    def __init__(self, run_folder: RunFolder, resume_step: int | None, val_samples: int) -> None:
        # imported here: it takes a second, which a run without this tracker need not wait
        from torch.utils.tensorboard import SummaryWriter

        purge_step = None if resume_step is None else resume_step + 1
        self._run_folder, self._val_samples = run_folder, val_samples
        self._writer = SummaryWriter(log_dir=str(run_folder.tensorboard_path), purge_step=purge_step)

    def log(self, record: StepRecord) -> None:
        for name, value in record.scalars().items():
            self._writer.add_scalar(name, value, global_step=record.step)
        for name, values in distributions(record).items():
            self._writer.add_histogram(name, np.asarray(values), global_step=record.step)
        for name, picture in sample_grids(record.groups).items():
            self._add_picture(name, picture, record.step)
        held_out = [sample for sample in record.samples if sample.split == "val"]
        for sample in spread(held_out, self._val_samples):
            parts = (sample.prompt, sample.response, f"answer {sample.ground_truth}, scores {sample.scores}")
            text = "\n\n---\n\n".join(parts)
            self._writer.add_text(f"val/generations/{sample.row_id}", text, global_step=record.step)
        self._writer.flush()
        self._run_folder.keep()

    def close(self) -> None:
        self._writer.close()

    def _add_picture(self, name: str, picture: Image.Image, step: int) -> None:
        """As JPEG: the writer's own add_image makes a PNG, which takes ten times as long."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=JPEG_QUALITY)
        image = Summary.Image(
            height=picture.height, width=picture.width, colorspace=3, encoded_image_string=stream.getvalue()
        )
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def distributions(record: StepRecord) -> dict[str, list[float]]:
    """The values of the training samples whose means are scalars: distribution/reward of those that were scored, and
    distribution/response_length."""
    training = [sample for sample in record.samples if sample.split == "train"]
    found = {
        "distribution/reward": [sample.scores["overall"] for sample in training if sample.scores],
        "distribution/response_length": [float(sample.response_length) for sample in training],
    }
    return {name: values for name, values in found.items() if values}


def sample_grids(groups: Sequence[ShownGroup]) -> dict[str, Image.Image]:
    """samples/train and samples/val: the groups of each split below each other, those without a group left out."""
    splits = {split: [group for group in groups if group.split == split] for split in ("train", "val")}
    return {f"samples/{split}": sample_grid(members) for split, members in splits.items() if members}


def sample_grid(groups: Sequence[ShownGroup]) -> Image.Image:
    """Picture, question, ground truth and the best and worst answers of each group with reward and advantage."""
    rows = [(_picture(group), _lines(group)) for group in groups]
    heights = [
        max(0 if picture is None else picture.height, LINE * len(lines)) + 2 * MARGIN for picture, lines in rows
    ]
    page = Image.new("RGB", (WIDTH, sum(heights)), PAPER)
    pen, top = ImageDraw.Draw(page), 0
    for (picture, lines), height in zip(rows, heights, strict=True):
        if picture is not None:
            page.paste(picture, (MARGIN, top + MARGIN))
        for number, (text, colour) in enumerate(lines):
            place = (PICTURE_SIDE + 2 * MARGIN, top + MARGIN + number * LINE)
            pen.text(place, text, fill=colour, font=_font())
        top += height
        pen.line((0, top - 1, WIDTH, top - 1), fill="#e1e5ea")
    return page


@cache
def _font() -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(FONT_SIZE)


def _picture(group: ShownGroup) -> Image.Image | None:
    if not group.pictures:
        return None
    picture = Image.open(io.BytesIO(group.pictures[0].webp)).convert("RGB")
    scale = PICTURE_SIDE / max(picture.size)  # small ones are enlarged
    return picture.resize(tuple(max(1, round(side * scale)) for side in picture.size))


def _lines(group: ShownGroup) -> list[Line]:
    question = group.question[-1][1].replace("[picture]", "").strip()
    lines: list[Line] = [(line, INK) for line in _wrapped(question, 3)]
    lines.append((f"ground truth: {group.ground_truth}"[:CHARACTERS], FAINT))
    ranked = sorted(group.answers, key=lambda answer: -answer.reward)
    if len(ranked) > SHOWN_ANSWERS:
        ranked = ranked[: SHOWN_ANSWERS // 2] + ranked[-SHOWN_ANSWERS // 2 :]
    best = max(answer.reward for answer in group.answers)
    for answer in ranked:
        colour = GOOD if answer.reward == best and best > 0 else BAD
        lines.append((_headline(answer), colour))
        lines += [(line, INK) for line in _wrapped(answer.response, 2, keep_end=True)]
    return lines


def _headline(answer: Answer) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in answer.scores.items() if name != "overall")
    words = [f"reward {answer.reward:.3g}" + (f" ({parts})" if parts else "")]
    if answer.advantage is not None:
        words.append(f"advantage {answer.advantage:+.2f}")
    words.append(f"read as: {answer.read}" if answer.read else "no final answer")
    if answer.finish_reason == "length":
        words.append("cut off")
    return " ".join(" | ".join(words).split())[:CHARACTERS]


def _wrapped(text: str, count: int, *, keep_end: bool = False) -> list[str]:
    """At most `count` lines; of a longer text its beginning, or its end, where the result of an answer stands."""
    text = "".join(char if char.isprintable() else " " for char in text)
    lines = textwrap.wrap(text, CHARACTERS) or [""]
    if len(lines) <= count:
        return lines
    if keep_end:
        return [f"... {lines[-count][4:]}", *lines[len(lines) - count + 1 :]]
    return [*lines[: count - 1], f"{lines[count - 1][:-4]} ..."]
