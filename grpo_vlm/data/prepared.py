"""What the prepare_*.py modules share: where raw rows come from, the columns that are written, the split, the files.

A written row has verl's columns (data_source, prompt, images or videos, ability, reward_model, extra_info) and
EasyR1's (problem, answer, images or videos), so that the trainers of both read it, and this one. Pictures keep the
bytes that they came with.
"""

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_vlm.config.locations import scheme_of
from grpo_vlm.data.entries import read_entry
from grpo_vlm.data.remote import write_file
from grpo_vlm.data.row_sources import RowSource
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import DataError

THINK_BOXED = "Reason step by step inside <think> </think> first, then write the final answer inside \\boxed{}."
THINK_ANSWER = (
    "Reason step by step inside <think> </think> first, then write the final answer inside <answer> </answer>."
)
THINK_LETTER = (
    "Reason step by step inside <think> </think> first, then write the letter of the right option, and only it, "
    "inside <answer> </answer>."
)
SEED, HELD_OUT = 42, 0.1  # verl's split of sets that have one part
GROUP_BYTES = 8 << 20
GROUP_ROWS = 1024
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
VIDEOS = pa.list_(pa.struct({"video": pa.string(), "fps": pa.float64(), "max_frames": pa.int64()}))


class Recipe(Protocol):
    """A prepare_*.py module."""

    HELP: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Arguments of its own."""

    def splits(self, options: Namespace) -> dict[str, Iterable[dict[str, Any]]]:
        """Rows of each file to write, made as they are written. Raises DataError."""


@dataclass(frozen=True)
class Task:
    """What is the same for all rows of a set. instruction: follows the question in verl's prompt, "" for none."""

    data_source: str
    ability: str
    instruction: str = ""
    media: str = "images"
    joint: str = " "  # between question and instruction

    def row(self, *, split: str, index: int, problem: str, media: list, answer: str, truth: str = "", **extra: Any):
        """One row of the file. problem: with its marks. truth: verl's ground truth where it is not the answer alone.
        extra: more of verl's extra_info."""
        question = problem.replace("<image>", "").replace("<video>", "").strip()
        content = f"{problem}{self.joint}{self.instruction}" if self.instruction else problem
        return {
            "data_source": self.data_source,
            "prompt": [{"role": "user", "content": content}],
            self.media: media,
            "ability": self.ability,
            "reward_model": {"style": "rule", "ground_truth": truth or answer},
            "extra_info": {"split": split, "index": index, "question": question, "answer": truth or answer} | extra,
            "problem": problem,
            "answer": answer,
        }


def raw_rows(options: Namespace, hub_id: str, split: str) -> RowSource:
    """Rows of the raw set: of --local_dataset_path (a file or folder), else of the hub."""
    local = options.local_dataset_path
    if not local:
        return open_source(f"{hub_id}@{split}")
    path = Path(local).expanduser()
    if path.is_dir() and (file := path / f"{split}.parquet").is_file():
        return open_source(str(file))
    return open_source(f"{path if not scheme_of(local) else local}@{split}")


def each_row(source: RowSource, numbers: Iterable[int] | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Position, row id and row of these rows, or of all."""
    for position, number in enumerate(range(len(source)) if numbers is None else numbers):
        yield position, source.row_id(number), source.rows(number, number + 1)[0]


def ninety_ten(rows: int) -> dict[str, list[int]]:
    """Row numbers of "train" and "test" as `datasets` splits so many rows with verl's seed and share."""
    parts = datasets.Dataset.from_dict({"row": range(rows)}).train_test_split(test_size=HELD_OUT, seed=SEED)
    return {name: list(parts[name]["row"]) for name in ("train", "test")}


def cell(row: Mapping[str, Any], row_id: str, *names: str) -> Any:
    """The first of these columns that the row has filled. Raises DataError."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise DataError(
        f"{row_id}: no column {' or '.join(map(repr, names))} is filled; present: {', '.join(row)}; is it the right "
        "set?"
    )


def picture(entry: Any, row_id: str, folder: Path | None = None) -> dict[str, Any]:
    """{bytes, path} of an image cell, undecoded. Raises DataError when it names a file that is not there."""
    try:
        found = read_entry(entry, None if folder is None else str(folder))
    except DataError as error:
        raise DataError(f"{row_id}: {error}") from None
    if isinstance(found, Path):
        return {"bytes": found.read_bytes(), "path": found.name}
    path = entry.get("path") if isinstance(entry, Mapping) else None
    return {"bytes": found, "path": path}


def write_split(rows: Iterable[dict[str, Any]], targets: Iterable[str], name: str) -> tuple[int, list[str]]:
    """Writes rows as NAME.parquet into each target folder or URL, in row groups small enough for every reader of
    nested columns and for drawing single rows. Returns the number of rows and the addresses.

    The same rows give the same bytes. Raises DataError when a target cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.parquet"
        count = _write(iter(rows), file)
        return count, [_place(target, file) for target in targets]


def _place(target: str, file: Path) -> str:
    if scheme_of(target):
        return write_file(target, file.name, file)
    folder = Path(os.path.expanduser(target))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return write_file(str(folder.absolute()), file.name, file) and str(folder / file.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror}; name another folder by --out") from error


def _write(rows: Iterator[dict[str, Any]], file: Path) -> int:
    first = list(islice(rows, GROUP_ROWS // 8))
    if not first:
        raise DataError(f"{file.stem}: there are no rows to write; check the raw set")
    schema = _schema(first)
    count = 0
    with pq.ParquetWriter(file, schema) as writer:
        for group in _groups(chain(first, rows)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))
            count += len(group)
    return count


def _schema(rows: list[dict[str, Any]]) -> pa.Schema:
    """Types of the columns: as they are in the rows, media as every reader knows them."""
    found = pa.Table.from_pylist([{k: v for k, v in row.items() if k not in ("images", "videos")} for row in rows])
    kinds = {field.name: field.type for field in found.schema} | {"images": IMAGES, "videos": VIDEOS}
    return pa.schema([(name, kinds[name]) for name in rows[0]])


def _groups(rows: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        group.append(row)
        size += sum(len(image["bytes"]) for image in row.get("images", ()))
        if size >= GROUP_BYTES or len(group) >= GROUP_ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group
