"""Geometry3K (hub: hiyouga/geometry3k): a diagram, a question, an answer in LaTeX. Its own train and test parts."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import Any

from grpo_vlm.data.entries import image_entries
from grpo_vlm.data.prepared import THINK_BOXED, Task, cell, each_row, picture, raw_rows
from grpo_vlm.data.row_sources import RowSource

HELP = "Geometry3K: geometry questions with diagrams"
HUB_ID = "hiyouga/geometry3k"
TASK = Task(HUB_ID, "math", THINK_BOXED)


def add_arguments(parser: ArgumentParser) -> None:
    """None of its own."""


def splits(options: Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """train and test as the set has them."""
    return {split: _rows(raw_rows(options, HUB_ID, split), split) for split in ("train", "test")}


def _rows(source: RowSource, split: str) -> Iterator[dict[str, Any]]:
    for index, row_id, row in each_row(source):
        images = [picture(entry, row_id) for entry in image_entries(cell(row, row_id, "images"))]
        problem, answer = cell(row, row_id, "problem"), cell(row, row_id, "answer")
        yield TASK.row(split=split, index=index, problem=problem, media=images, answer=answer)
