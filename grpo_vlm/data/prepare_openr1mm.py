"""Multimodal Open-R1 (hub: lmms-lab/multimodal-open-r1-8k-verified): a picture, a question, a solution that ends in
<answer>...</answer>. One part, of which a tenth is held out."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_vlm.data.prepared import THINK_ANSWER, Task, cell, each_row, ninety_ten, picture, raw_rows
from grpo_vlm.data.row_sources import RowSource
from grpo_vlm.data.schemas import ANSWER_TAG

HELP = "Multimodal Open-R1 8k: mathematics questions with a picture"
HUB_ID = "lmms-lab/multimodal-open-r1-8k-verified"
TASK = Task(HUB_ID, "math", THINK_ANSWER, joint="\n\n")


def add_arguments(parser: ArgumentParser) -> None:
    """None of its own."""


def splits(options: Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """90 % train, 10 % test, seed 42."""
    source = raw_rows(options, HUB_ID, "train")
    return {name: rows(TASK, source, name, numbers, options) for name, numbers in ninety_ten(len(source)).items()}


def rows(
    task: Task, source: RowSource, split: str, numbers: Iterable[int], options: Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of a set with one picture, a problem without a mark and a tagged solution (R1-V's shape, too)."""
    folder = Path(options.local_dataset_path or ".").expanduser()
    folder = folder if folder.is_dir() else folder.parent
    for index, row_id, row in each_row(source, numbers):
        solution = cell(row, row_id, "solution")
        tagged = ANSWER_TAG.search(solution)
        yield task.row(
            split=split,
            index=index,
            problem="<image>\n" + cell(row, row_id, "problem"),
            media=[picture(cell(row, row_id, "image"), row_id, folder)],
            answer=tagged[1].strip() if tagged else solution,
            truth=solution,
        )
