"""easy-VQA, the PyPI package `easy-vqa` (MIT): 64x64 pictures of one shape and short questions about it.

Three quarters of its questions are yes/no, where a policy that never looks scores well, so the rows are balanced over
the 13 answers.
"""

import importlib.resources
import json
import random
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

from grpo_vlm.data.prepared import Task
from grpo_vlm.errors import DataError

HELP = "easy-VQA from PyPI, balanced over its 13 answers"
TASK = Task("easy-vqa", "vqa")


def add_arguments(parser: ArgumentParser) -> None:
    """How many rows, and which."""
    parser.add_argument("--train-per-answer", type=int, default=600, help="training rows per answer (default 600)")
    parser.add_argument("--test-per-answer", type=int, default=40, help="held-out rows per answer (default 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice and the order (default 0)")


def splits(options: Namespace) -> dict[str, list[dict[str, Any]]]:
    """The package's own train and test parts."""
    folder = Path(options.local_dataset_path).expanduser() if options.local_dataset_path else None
    counts = {"train": options.train_per_answer, "test": options.test_per_answer}
    return {split: easyvqa_rows(split, count, options.seed, folder) for split, count in counts.items()}


def easyvqa_rows(split: str, per_answer: int, seed: int, folder: Path | None = None) -> list[dict[str, Any]]:
    """Balanced rows of one split ("train" or "test"): per_answer for each of the 13 answers, shuffled. folder: holds
    answers.txt, train and test; None: that of the installed package.

    Raises DataError when the package is absent or has fewer questions for an answer.
    """
    folder = _package_folder("easy_vqa", "easy-vqa") / "data" if folder is None else folder
    if not (folder / "answers.txt").is_file():
        raise DataError(f"{folder} holds no answers.txt; name the data folder of easy-VQA by --local_dataset_path")
    answers = sorted((folder / "answers.txt").read_text(encoding="utf-8").split())
    by_answer = defaultdict(list)
    for question, answer, image_id in json.loads((folder / split / "questions.json").read_text(encoding="utf-8")):
        by_answer[answer].append((question, image_id))
    images = folder / split / "images"
    rng = random.Random(seed)
    picked = []
    for answer in answers:
        if len(by_answer[answer]) < per_answer:
            raise DataError(
                f"easy-vqa has {len(by_answer[answer])} {split} questions with answer {answer!r}, not {per_answer}; "
                f"lower --{split}-per-answer"
            )
        picked += [(question, answer, image_id) for question, image_id in rng.sample(by_answer[answer], per_answer)]
    rng.shuffle(picked)
    return [
        TASK.row(
            split=split,
            index=index,
            problem=f"<image>{question[:1].upper()}{question[1:]}",
            media=[{"bytes": (images / f"{image_id}.png").read_bytes(), "path": f"{split}/{image_id}.png"}],
            answer=answer,
        )
        for index, (question, answer, image_id) in enumerate(picked)
    ]


def _package_folder(module: str, distribution: str) -> Path:
    try:
        return Path(str(importlib.resources.files(module)))
    except ModuleNotFoundError:
        raise DataError(f"the package {distribution} is not installed; run `pip install {distribution}`") from None
