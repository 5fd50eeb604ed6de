"""Where rows come from: "PATH[@split]" or a list of dicts behind one small interface.

JSON is read by Python itself (exact line numbers in errors, rows may differ in their keys); everything else by the
`datasets` library, memory-mapped, with
pictures left as bytes: decoding is media.py's job.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import datasets
import pyarrow as pa

from grpo_vlm.errors import DataError

FILE_TYPES = (".parquet", ".json", ".jsonl")


class RowSource(Protocol):
    """Rows by index. name: goes into row ids; columns: in file order."""

    name: str
    columns: list[str]

    def __len__(self) -> int: ...

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows [start, stop) as dicts, pictures undecoded."""


class ListSource:
    """Rows held in memory. columns is the union over all rows, since JSON rows may leave keys out."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], name: str):
        for index, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(f"{name}:{index}: a row must be a dict of columns, got {type(row).__name__}")
        self.name = name
        self._rows = list(rows)
        self.columns = list(dict.fromkeys(str(key) for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return [dict(row) for row in self._rows[start:stop]]


class ArrowSource:
    """Rows of a `datasets.Dataset`. The arrow format gives image columns as {bytes, path} instead of decoding them."""

    def __init__(self, dataset: datasets.Dataset, name: str):
        self.name = name
        self.columns = list(dataset.column_names)
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return self._dataset[start:stop].to_pylist()


def open_source(source: str | Sequence[Mapping[str, Any]]) -> RowSource:
    """Opens rows: a list of dicts, or "PATH[@split]" with a parquet, json or jsonl file, a folder or a hub id (split
    "train" when left out).

    Raises DataError when it does not exist, cannot be read, has no such split, or is empty.
    """
    if isinstance(source, str):
        opened = _open_path(source)
    elif isinstance(source, datasets.Dataset):
        opened = ArrowSource(source, "rows")
    else:
        opened = ListSource(source, "rows")
    if len(opened) == 0:
        raise DataError(f"{opened.name}: there are no rows; check the path and the split")
    return opened


def _open_path(source: str) -> RowSource:
    if not source.strip():
        raise DataError("the path of the data set is empty; set data.train_files (and data.val_files) to PATH[@split]")
    text, _, split = source.rpartition("@") if "@" in source and not Path(source).exists() else (source, "", "")
    split = split or "train"
    path = Path(text).expanduser()
    if path.is_dir():
        return ArrowSource(_load_folder(path, split), _split_name(path.resolve().name, split))
    if path.suffix.lower() in FILE_TYPES:
        if not path.is_file():
            raise DataError(f"{text} does not exist (looked in {Path.cwd()}); check the path")
        return _open_file(path, split)
    if path.is_file():
        raise DataError(f"{text}: files of type {path.suffix or 'none'} are not read; use {', '.join(FILE_TYPES)}")
    if text.count("/") > 1 or text.startswith((".", "/", "~")):
        raise DataError(f"{text} does not exist (looked in {Path.cwd()}); give a file, a folder or a hub id")
    return ArrowSource(_load_hub(text, split), _split_name(text, split))


def _open_file(path: Path, split: str) -> RowSource:
    if path.suffix.lower() == ".parquet":
        return ArrowSource(_load(str(path), "parquet", split, data_files=str(path)), _split_name(path.name, split))
    rows = _read_json(path)
    first, last = _slice(split, len(rows), path.name)
    return ListSource(rows[first:last], _split_name(path.name, split))


def _slice(split: str, num_rows: int, name: str) -> tuple[int, int]:
    """Absolute bounds of "train" or "train[:100]" in a file, which is all of one split."""
    try:
        (bounds,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{name}@{split}: a file has the one split 'train' ({_line(error)}); drop @{split}") from error
    return bounds.from_ or 0, num_rows if bounds.to is None else bounds.to


def _read_json(path: Path) -> list[Any]:
    """A JSON list of rows, or one row a line (blank lines are skipped, a byte-order mark is fine)."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(_not_utf8(path)) from None
    if text.lstrip().startswith("["):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}; fix this line") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON: {error.msg}; write one row a line or a list of rows"
                ) from None
    return rows


def _not_utf8(path: Path) -> str:
    """The message about a file that is not UTF-8, with the place of its first wrong byte in the whole file."""
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        place = f"line {line}, byte {error.start} of the file ({content[error.start]:#04x})"
        return f"{path}, {place}: is not UTF-8; save the file as UTF-8 (iconv -f ENCODING -t UTF-8)"
    raise AssertionError(f"{path} is UTF-8 now")


def _load_folder(path: Path, split: str) -> datasets.Dataset:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        with _one_error(str(path), split):
            saved = datasets.load_from_disk(str(path))
        if isinstance(saved, datasets.Dataset):
            first, last = _slice(split, len(saved), path.name)
            return saved.select(range(first, last))
        if split not in saved:
            raise DataError(f"{path}: no split {split!r}; present: {', '.join(saved)}; write PATH@SPLIT")
        return saved[split]
    if not any(name for _, _, names in os.walk(path) for name in names):
        raise DataError(f"{path}: the folder is empty; put parquet or jsonl files in it")
    return _load(str(path), str(path), split)


def _load_hub(name: str, split: str) -> datasets.Dataset:
    try:
        return _load(name, name, split)
    except DataError as error:
        raise DataError(f"{name} is no file or folder in {Path.cwd()}, and as a hub data set: {error}") from error


def _load(shown: str, builder: str, split: str, **files: str) -> datasets.Dataset:
    """datasets.load_dataset without progress bars."""
    with _one_error(shown, split), _no_progress_bars():
        return datasets.load_dataset(builder, split=split, **files)


@contextmanager
def _one_error(shown: str, split: str) -> Iterator[None]:
    """The many error types of `datasets` become one DataError with the reason in a line."""
    try:
        yield
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"{shown}: a row group is too large for nested columns ({_line(error)}); write the file again with "
            "row_group_size=1000 (pyarrow.parquet.write_table)"
        ) from error
    except Exception as error:
        reason = error.__cause__ or error
        raise DataError(f"{shown}@{split} cannot be read: {type(reason).__name__}: {_line(reason)}") from error


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
