"""Counting in CLEVR scenes (hub: leonardPKU/clevr_cogen_a_train, R1-V's set): a picture, "How many ...?", a number.
One part, of which a tenth is held out.

Also from an unpacked CLEVR_v1.0 (questions/CLEVR_train_questions.json, images/train), whose counting questions are
taken and whose own val part is held out.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_vlm.data import prepare_openr1mm
from grpo_vlm.data.prepared import THINK_ANSWER, Task, ninety_ten, picture, raw_rows
from grpo_vlm.errors import DataError

HELP = "CLEVR: how many things are in a scene"
HUB_ID = "leonardPKU/clevr_cogen_a_train"
TASK = Task(HUB_ID, "counting", THINK_ANSWER, joint="\n\n")


def add_arguments(parser: ArgumentParser) -> None:
    """None of its own."""


def splits(options: Namespace) -> dict[str, Iterator[dict[str, Any]]]:
    """90 % train, 10 % test, seed 42; of CLEVR_v1.0 train and val as they are."""
    folder = Path(options.local_dataset_path or "").expanduser()
    if options.local_dataset_path and (folder / "questions").is_dir():
        return {"train": _questions(folder, "train", "train"), "test": _questions(folder, "val", "test")}
    source = raw_rows(options, HUB_ID, "train")
    parts = ninety_ten(len(source)).items()
    return {name: prepare_openr1mm.rows(TASK, source, name, numbers, options) for name, numbers in parts}


def _questions(folder: Path, part: str, split: str) -> Iterator[dict[str, Any]]:
    file = folder / "questions" / f"CLEVR_{part}_questions.json"
    if not file.is_file():
        raise DataError(f"{file} does not exist; name the unpacked folder CLEVR_v1.0 by --local_dataset_path")
    asked = json.loads(file.read_text(encoding="utf-8"))["questions"]
    counting = [question for question in asked if question["program"][-1]["function"] == "count"]
    for index, question in enumerate(counting):
        row_id = f"{file.name}:{question['question_index']}"
        image = folder / "images" / part / question["image_filename"]
        yield TASK.row(
            split=split,
            index=index,
            problem="<image>\n" + question["question"],
            media=[picture(image, row_id)],
            answer=question["answer"],
            truth=f"<answer> {question['answer']} </answer>",
        )
