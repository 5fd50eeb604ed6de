"""Writes ready-made data sets in EasyR1's row shape: `python -m grpo_vlm.data.prepare easyvqa --out data/easyvqa`.

easy-VQA is the PyPI package `easy-vqa` (MIT): 64x64 pictures of one shape and short questions about it. Three quarters
of its questions are yes/no, where a policy that never looks scores well, so the rows are balanced over the 13 answers.
The same seed gives the same files, byte for byte.
"""

import argparse
import importlib.resources
import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_vlm.errors import DataError

ROW_SCHEMA = pa.schema(
    {
        "images": pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        "problem": pa.string(),
        "answer": pa.string(),
    }
)


def easyvqa_rows(split: str, per_answer: int, seed: int) -> list[dict]:
    """Balanced rows of one split ("train" or "test") of the installed easy-vqa package: per_answer for each of the 13
    answers, shuffled.

    Raises DataError when the package is absent or has fewer questions for an answer.
    """
    folder = _package_folder("easy_vqa", "easy-vqa") / "data"
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
        {
            "images": [{"bytes": (images / f"{image_id}.png").read_bytes(), "path": f"{split}/{image_id}.png"}],
            "problem": f"<image>{question[:1].upper()}{question[1:]}",
            "answer": answer,
        }
        for question, answer, image_id in picked
    ]


def write_rows(rows: list[dict], path: Path) -> None:
    """Writes rows of ROW_SCHEMA as parquet, in row groups small enough for every reader of nested columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=ROW_SCHEMA), path, row_group_size=1024)


def _package_folder(module: str, distribution: str) -> Path:
    try:
        return Path(str(importlib.resources.files(module)))
    except ModuleNotFoundError:
        raise DataError(f"the package {distribution} is not installed; run `pip install {distribution}`") from None


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo_vlm.data.prepare", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    easyvqa = commands.add_parser("easyvqa", help="easy-VQA from PyPI, balanced over its 13 answers")
    easyvqa.add_argument("--out", type=Path, required=True, help="folder for train.parquet and test.parquet")
    easyvqa.add_argument("--train-per-answer", type=int, default=600, help="training rows per answer (default 600)")
    easyvqa.add_argument("--test-per-answer", type=int, default=40, help="held-out rows per answer (default 40)")
    easyvqa.add_argument("--seed", type=int, default=0, help="seed of the choice and the order (default 0)")
    options = parser.parse_args(arguments)
    try:
        for split, per_answer in (("train", options.train_per_answer), ("test", options.test_per_answer)):
            rows = easyvqa_rows(split, per_answer, options.seed)
            path = options.out / f"{split}.parquet"
            write_rows(rows, path)
            print(f"{path}: {len(rows)} rows, {per_answer} for each of {len(rows) // max(per_answer, 1)} answers")
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
