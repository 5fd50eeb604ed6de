"""Where rows come from: "PATH[@split],PATH[@split]" or a list of dicts, behind one small interface.

Parquet and JSON files are read by parquet.py and json_files.py, a few rows at a time; a URL through a copy in the
cache (remote.py); everything else by the `datasets` library, memory-mapped. Pictures are left as bytes: decoding is
media.py's job.
"""

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow as pa

from grpo_vlm.config.locations import scheme_of, split_config, split_source, split_sources
from grpo_vlm.data.cache import cached_folder, content_hash, file_state
from grpo_vlm.data.entries import not_a_file
from grpo_vlm.data.json_files import Faults, LineSource, holds_list, read_list
from grpo_vlm.data.parquet import ParquetSource
from grpo_vlm.data.remote import local_copy
from grpo_vlm.errors import DataError
from grpo_vlm.hub import SWITCH, data_folder, uses_modelscope

FILE_TYPES = (".parquet", ".json", ".jsonl")
BATCH_ROWS = 256


class RowSource(Protocol):
    """Rows by number. name: goes into row ids; columns: in file order; notes: what the user should know."""

    name: str
    columns: list[str]
    notes: list[str]

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows [start, stop) as dicts, pictures undecoded."""

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """All rows in order, some at a time."""

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column in order, None where a row lacks it; nothing else of the rows is read where the
        format allows it."""

    def row_id(self, row: int) -> str:
        """FILE:INDEX of a row."""

    def digest(self) -> str | None:
        """A hash of the content, which a run with the same rows finds again; None when there is no such thing."""


class ListSource:
    """Rows held in memory. columns is the union over all rows, since JSON rows may leave keys out. file: where they
    were read from."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str, file: Path | None = None):
        faults = Faults()
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                faults.add(f"{name}:{index}: a row must be a dict of columns, got {type(row).__name__}")
        faults.raise_all(name, "rows cannot be read")
        self.name, self.file = name, file
        self.notes: list[str] = []
        self._rows = [{key: _plain(value) for key, value in row.items()} for row in rows]
        self.columns = list(dict.fromkeys(str(key) for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [dict(row) for row in self._rows[start:stop]]

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        return (self.rows(start, start + BATCH_ROWS) for start in range(0, len(self), BATCH_ROWS))

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for row in self._rows)

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str | None:
        return None if self.file is None else f"{content_hash([self.file])} {len(self)} of {self.name}"


def _plain(value: Any) -> Any:
    """A value with lists and Python's numbers where pandas gives arrays of objects and numpy's numbers."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


class ArrowSource:
    """Rows of a `datasets.Dataset`. The arrow format gives image columns as {bytes, path} instead of decoding them.

    named: it comes from a name that finds the same rows again, so that its files tell its content.
    """

    def __init__(self, dataset: datasets.Dataset, name: str, named: bool = True):
        self.name, self._named = name, named
        self.notes: list[str] = []
        self.columns = list(dataset.column_names)
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return self._dataset[start:stop].to_pylist()

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        return (self.rows(start, start + BATCH_ROWS) for start in range(0, len(self), BATCH_ROWS))

    def column(self, name: str) -> Iterator[Any]:
        if name not in self.columns:
            return repeat(None, len(self))
        alone = self._dataset.select_columns([name])
        starts = range(0, len(self), BATCH_ROWS)
        return (value for start in starts for value in alone[start : start + BATCH_ROWS][name].to_pylist())

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str | None:
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        return f"{content_hash(files)} {len(self)} of {self.name}" if self._named and files else None


class MixedSource:
    """Several sources, one after the other. Names of parts that are the same get their folder or a number."""

    def __init__(self, parts: Sequence[RowSource]):
        self.parts = parts
        self.name = ",".join(part.name for part in parts)
        self.notes = [note for part in parts for note in part.notes]
        self.columns = list(dict.fromkeys(column for part in parts for column in part.columns))
        self._starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def part_of(self, row: int) -> tuple[int, int]:
        """Number of the part that holds a row, and the row's number in it."""
        part = bisect_right(self._starts, row) - 1
        return part, row - self._starts[part]

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part, first in zip(self.parts, self._starts, strict=False):
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                found += part.rows(low, high)
        return found

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        return (batch for part in self.parts for batch in part.batches())

    def column(self, name: str) -> Iterator[Any]:
        return (value for part in self.parts for value in part.column(name))

    def row_id(self, row: int) -> str:
        part, within = self.part_of(row)
        return self.parts[part].row_id(within)

    def digest(self) -> str | None:
        found = [part.digest() for part in self.parts]
        return None if None in found else " ".join(map(str, found))


def parts_of(source: RowSource) -> Sequence[RowSource]:
    """The parts of a mixture; the source itself where it is none."""
    return source.parts if isinstance(source, MixedSource) else [source]


def open_source(source: str | Sequence[Mapping[str, Any]]) -> RowSource:
    """Opens rows: a list of dicts, or one or several "PATH[@split]" with commas between, each a parquet, json or jsonl
    file, a folder, a URL of one (s3://, hdfs://, memory:// ...) or a hub id (split "train" when left out).

    Raises DataError when one does not exist, cannot be read, has no such split, or is empty.
    """
    if isinstance(source, str):
        named = split_sources(source)
        opened = [_open_path(part) for part in named]
        for part, name in zip(opened, _names(named, [part.name for part in opened]), strict=True):
            part.name = name
    elif isinstance(source, datasets.Dataset):
        opened = [ArrowSource(source, "rows", named=False)]
    else:
        opened = [ListSource(list(source), "rows")]
    for part in opened:
        if len(part) == 0:
            raise DataError(f"{part.name}: there are no rows; check the path and the split")
    return opened[0] if len(opened) == 1 else MixedSource(opened)


def _names(named: Sequence[str], short: Sequence[str]) -> list[str]:
    """Names for row ids, each different: that of the file; where it is not the only one of that name its path as it
    was given; where a path is given twice with a number."""
    counts, seen, names = Counter(short), Counter(), []
    for path, name in zip(named, short, strict=True):
        name = name if counts[name] == 1 else path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}({seen[name]})")
    return names


def _open_path(source: str) -> RowSource:
    text, split = split_source(source)
    if not text.strip():
        raise DataError("the path of the data set is empty; set data.train_files (and data.val_files) to PATH[@split]")
    if not split:
        raise DataError(f"{source!r} ends with @; name the split, e.g. {text}@train")
    if scheme_of(text):
        return _open_local(local_copy(text), text, split)
    path = Path(text).expanduser()
    if path.exists() or path.suffix.lower() in FILE_TYPES:
        return _open_local(path, text, split)
    text, config = split_config(text)
    if Path(text).expanduser().is_dir():
        return _open_folder(Path(text).expanduser(), _split_name(f"{Path(text).name}:{config}", split), split, config)
    if Path(text).suffix and "/" not in text:
        raise DataError(f"{text} does not exist (looked in {Path.cwd()}); check the path")
    if text.count("/") > 1 or text.startswith((".", "/", "~")):
        raise DataError(f"{text} does not exist (looked in {Path.cwd()}); give a file, a folder or a hub id")
    name = _split_name(text if config is None else f"{text}:{config}", split)
    if uses_modelscope():
        return _open_folder(data_folder(text), name, split, config)
    return ArrowSource(_load_hub(text, split, config), name)


def _open_local(path: Path, text: str, split: str) -> RowSource:
    """A file or folder of this machine. text: how it was named."""
    if path.is_dir():
        return _open_folder(path, _split_name(path.resolve().name, split), split)
    if not path.is_file():
        raise DataError(f"{text} {not_a_file(path)} (looked in {Path.cwd()}); check the path")
    if path.suffix.lower() not in FILE_TYPES:
        raise DataError(f"{text}: files of type {path.suffix or 'none'} are not read; use {', '.join(FILE_TYPES)}")
    name = _split_name(path.name, split)
    if path.suffix.lower() == ".parquet":
        return _open_parquet([path], name, split)
    if holds_list(path):
        rows = read_list(path)
        first, last = _slice(split, len(rows), path.name)
        return ListSource(rows[first:last], name, path)
    lines = LineSource(path, name)
    lines.select(*_slice(split, len(lines), path.name))
    return lines


def _open_parquet(paths: Sequence[Path], name: str, split: str) -> ParquetSource:
    with _one_error(paths[0].name, split):
        whole = ParquetSource(paths, name)
    first, last = _slice(split, len(whole), paths[0].name)
    whole.select(first, last)
    return whole


def _slice(split: str, num_rows: int, name: str) -> tuple[int, int]:
    """Absolute bounds of "train" or "train[:100]" in a file, which is all of one split."""
    try:
        (bounds,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{name}@{split}: a file has the one split 'train' ({_line(error)}); drop @{split}") from error
    return bounds.from_ or 0, num_rows if bounds.to is None else bounds.to


def _open_folder(path: Path, name: str, split: str, config: str | None = None) -> RowSource:
    """A folder that `datasets` saved, or one with data files, whose names tell their splits."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return ArrowSource(_load_saved(path, split), name)
    if not any(files for _, _, files in os.walk(path)):
        raise DataError(f"{path}: the folder is empty; put parquet or jsonl files in it")
    with _one_error(str(path), split):
        found = datasets.load_dataset_builder(str(path), config).config.data_files or {}
    files = [Path(file) for file in found.get(split, ())]
    if files and all(file.suffix == ".parquet" and file.is_file() for file in files):
        return _open_parquet(files, name, "train")
    every = [Path(file) for files in found.values() for file in files]
    return ArrowSource(_load_folder(path, every, split, config), name)


def _load_folder(path: Path, files: Sequence[Path], split: str, config: str | None) -> datasets.Dataset:
    """Rows of whatever files `datasets` finds in a folder. It would take a file of the same size and time for the one
    that it has read before; a folder of our cache is made anew for every change."""
    states = [file_state(file) for file in files]
    size = sum(file.stat().st_size for file in files)

    def fill(folder: Path) -> None:
        _load(str(path), split, config, folder)

    what = f"the rows of {path.resolve()}{'' if config is None else f':{config}'}@{split}"
    return _load(str(path), split, config, cached_folder("folders", what, json.dumps(states), fill, size))


def _load_saved(path: Path, split: str) -> datasets.Dataset:
    with _one_error(str(path), split):
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        first, last = _slice(split, len(saved), path.name)
        return saved.select(range(first, last))
    if split not in saved:
        raise DataError(f"{path}: no split {split!r}; present: {', '.join(saved)}; write PATH@SPLIT")
    return saved[split]


def _load_hub(name: str, split: str, config: str | None) -> datasets.Dataset:
    try:
        return _load(name, split, config)
    except DataError as error:
        raise DataError(
            f"{name} is no file or folder in {Path.cwd()}, and as a data set of the Hugging Face hub: {error} "
            f"({SWITCH}=1 asks ModelScope instead)"
        ) from error


def _load(name: str, split: str, config: str | None, cache: Path | None = None) -> datasets.Dataset:
    """datasets.load_dataset without progress bars. cache: a folder in the place of its own."""
    with _one_error(name, split), _no_progress_bars():
        return datasets.load_dataset(name, config, split=split, cache_dir=None if cache is None else str(cache))


@contextmanager
def _one_error(shown: str, split: str) -> Iterator[None]:
    """The many error types of `datasets` become one DataError with the reason in a line."""
    try:
        yield
    except DataError:
        raise
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"{shown}: a row group is too large for nested columns ({_line(error)}); write the file again with "
            "row_group_size=1000 (pyarrow.parquet.write_table)"
        ) from error
    except Exception as error:
        reason = error.__cause__ or error
        way = f"; write {shown}:CONFIG@{split}" if "Config name is missing" in str(reason) else ""
        raise DataError(f"{shown}@{split} cannot be read: {type(reason).__name__}: {_line(reason)}{way}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _split_name(name: str, split: str) -> str:
    return name if split == "train" else f"{name}@{split}"
