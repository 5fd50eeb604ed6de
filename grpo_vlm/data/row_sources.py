"""Rows by number behind one small interface: rows held in memory, those of a `datasets.Dataset`, several files as one
set, several sets as a mixture. Parquet and JSON files are in parquet.py and json_files.py.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np

from grpo_vlm.data.arrow_rows import feature_names, rows_of, values_of
from grpo_vlm.data.cache import content_hash
from grpo_vlm.data.json_files import Faults

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

    def select(self, first: int, last: int) -> None:
        """Keeps the rows [first, last)."""
        self._rows = self._rows[first:last]


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
        self._names = feature_names(dataset.features)
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        return rows_of(self._dataset[start:stop], self._names)

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        return (self.rows(start, start + BATCH_ROWS) for start in range(0, len(self), BATCH_ROWS))

    def column(self, name: str) -> Iterator[Any]:
        if name not in self.columns:
            return repeat(None, len(self))
        alone = self._dataset.select_columns([name])
        tables = (alone[start : start + BATCH_ROWS] for start in range(0, len(self), BATCH_ROWS))
        return (value for table in tables for value in values_of(table.schema.field(0), table[0], self._names))

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str | None:
        files = [Path(file["filename"]) for file in self._dataset.cache_files]
        return f"{content_hash(files)} {len(self)} of {self.name}" if self._named and files else None


class JoinedSource:
    """Several files of one set, one after the other; rows are counted through."""

    def __init__(self, parts: Sequence[RowSource], name: str):
        self.parts, self.name = parts, name
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

    def selected(self, first: int, last: int) -> "JoinedSource":
        """The rows [first, last)."""
        kept = []
        for part, start in zip(self.parts, self._starts, strict=False):
            low, high = max(first - start, 0), min(last - start, len(part))
            if low < high:
                part.select(low, high)
                kept.append(part)
        return JoinedSource(kept, self.name)

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str | None:
        found = [part.digest() for part in self.parts]
        return None if None in found else " ".join(map(str, found))


class MixedSource(JoinedSource):
    """Several sets, whose rows keep their names. Names of parts that are the same get their folder or a number."""

    def __init__(self, parts: Sequence[RowSource]):
        super().__init__(parts, ",".join(part.name for part in parts))

    def row_id(self, row: int) -> str:
        part, within = self.part_of(row)
        return self.parts[part].row_id(within)


def parts_of(source: RowSource) -> Sequence[RowSource]:
    """The parts of a mixture; the source itself where it is none."""
    return source.parts if isinstance(source, MixedSource) else [source]
