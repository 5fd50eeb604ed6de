"""Rows of parquet files by number, in any order, in bounded memory.

A row group is the least that parquet gives in random order. Small ones are read as they are, the latest kept. A file
with large ones (pandas puts a whole file into one) is copied once into the cache as Arrow batches of about a megabyte,
each of which a single read brings in; nothing is memory-mapped, so what was read does not stay in the process.
"""

import json
import signal
import subprocess
import sys
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_vlm.data import parquet_copy
from grpo_vlm.data.arrow_rows import class_names, rows_of, values_of
from grpo_vlm.data.cache import cached_folder, check_unchanged, content_hash, file_state, size_and_time
from grpo_vlm.errors import DataError

GROUP_BYTES = 16 << 20  # uncompressed size up to which a row group is read for one row of it
KEPT_BYTES = 64 << 20  # of the latest groups, in each process; a set of this size is kept whole
OPEN_FILES = 64
BATCH_BYTES = 1 << 20
CHECKED_BYTES = 32 << 20  # of rows given out at a time by batches()
CHECKED_ROWS = 256


class ParquetSource:
    """Rows of the files, one after the other. Can be pickled; files are opened when they are read.

    notes: what was done for the user to know. Raises DataError when the cache has no room, pyarrow's errors when a
    file is broken.
    """

    def __init__(self, paths: Sequence[Path], name: str):
        self.name, self.paths = name, [path.absolute() for path in paths]
        self.notes: list[str] = []
        self._states = [size_and_time(path) for path in self.paths]
        files = [_RowGroups(path) for path in self.paths]
        self._names = {name: labels for file in files for name, labels in file.class_names.items()}
        small = sum(file.total_bytes for file in files) <= KEPT_BYTES
        self._files = [file if small or file.largest_bytes <= GROUP_BYTES else self._by_rows(file) for file in files]
        self.columns = list(dict.fromkeys(column for file in self._files for column in file.columns))
        self._groups = [(number, group) for number, file in enumerate(self._files) for group in range(len(file.sizes))]
        self._starts = [0, *accumulate(size for file in self._files for size in file.sizes)]
        self._first, self._last = 0, self._starts[-1]
        self._kept: OrderedDict[int, pa.Table] = OrderedDict()
        self._readers: dict[int, pq.ParquetFile | pa.ipc.RecordBatchFileReader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": OrderedDict(), "_readers": {}}

    def __len__(self) -> int:
        return self._last - self._first

    def select(self, first: int, last: int) -> None:
        """Keeps the rows [first, last)."""
        self._first, self._last = first, last

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows [start, stop) as dicts, pictures undecoded."""
        found: list[dict[str, Any]] = []
        at, end = self._first + start, self._first + min(stop, len(self))
        while at < end:
            group = bisect_right(self._starts, at) - 1
            begin = at - self._starts[group]
            table = self._group(group).slice(begin, min(end - at, self._starts[group + 1] - at))
            found += rows_of(table, self._names)
            at += table.num_rows
        return found

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        """All rows in order, a bounded number of bytes at a time."""
        at = 0
        while at < len(self):
            group = bisect_right(self._starts, self._first + at) - 1
            left = min(self._starts[group + 1] - self._first, len(self)) - at
            table = self._group(group)
            fitting = CHECKED_BYTES * table.num_rows // max(table.nbytes, 1)
            count = min(left, CHECKED_ROWS, max(1, fitting))
            yield self.rows(at, at + count)
            at += count

    def column(self, name: str) -> Iterator[Any]:
        """The values of one column in order; no other column is read from the file."""
        at = 0
        for path, state in zip(self.paths, self._states, strict=True):
            check_unchanged(path, state)
            with pq.ParquetFile(path) as file:
                names = [name] if name in file.schema_arrow.names else []
                for batch in file.iter_batches(columns=names, use_threads=False):
                    rows = slice(max(self._first - at, 0), max(self._last - at, 0))
                    values = [None] * batch.num_rows
                    if names:
                        values = values_of(batch.schema.field(0), batch.column(0), self._names)
                    yield from values[rows]
                    at += batch.num_rows

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str:
        """A hash of the content of the files and of the part of them."""
        return f"{content_hash(self.paths)}[{self._first}:{self._last}]"

    def _by_rows(self, file: "_RowGroups") -> "_Batches":
        """The file's copy in the cache."""
        path = file.path
        size = f"{file.largest_bytes / 1e6:.0f} MB"
        self.notes.append(f"{path.name}: has row groups of up to {size}; rows are drawn from a copy in the cache")
        version = json.dumps(file_state(path))
        fill = partial(_copy, path)
        return _Batches(cached_folder("rows", f"the copy of {path} by rows", version, fill, file.total_bytes))

    def _group(self, number: int) -> pa.Table:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        file, group = self._groups[number]
        check_unchanged(self.paths[file], self._states[file])
        try:
            if file not in self._readers:
                if len(self._readers) >= OPEN_FILES:
                    self._readers.clear()
                self._readers[file] = self._files[file].reader()
            table = self._files[file].read(self._readers[file], group)
        except (pa.ArrowException, OSError) as error:
            raise self._unreadable(file, group, error) from error
        check_unchanged(self.paths[file], self._states[file])
        self._kept[number] = table
        held = sum(kept.nbytes for kept in self._kept.values())
        while held > KEPT_BYTES and len(self._kept) > 1:
            held -= self._kept.popitem(last=False)[1].nbytes
        return table

    def _unreadable(self, file: int, group: int, error: Exception) -> DataError:
        """Which rows of which file cannot be read, why, and what to do."""
        first = sum(self._files[file].sizes[:group])
        place = f"{self.paths[file]}, rows {first} to {first + self._files[file].sizes[group] - 1}"
        reason = " ".join(str(error).split())[:300]
        remedy = "write or download the file again"
        if isinstance(error, pa.ArrowNotImplementedError):
            remedy = "write the file again with row_group_size=1000 (pyarrow.parquet.write_table)"
        elif isinstance(self._files[file], _Batches):
            remedy = f"delete {self._files[file].folder}, the copy in the cache; it is made again"
        return DataError(f"{place}: cannot be read: {type(error).__name__}: {reason}; {remedy}")


class _RowGroups:
    """A parquet file as it is. sizes: rows of each group; bytes are uncompressed."""

    def __init__(self, path: Path):
        self.path = path
        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            self.columns = list(file.schema_arrow.names)
            self.class_names = class_names(file.schema_arrow)
        self.sizes = [group.num_rows for group in groups]
        self.largest_bytes = max((group.total_byte_size for group in groups), default=0)
        self.total_bytes = sum(group.total_byte_size for group in groups)

    def reader(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path)

    def read(self, reader: pq.ParquetFile, group: int) -> pa.Table:
        return reader.read_row_group(group, use_threads=False)


class _Batches:
    """A copy that parquet_copy.py has made. sizes: rows of each batch."""

    def __init__(self, folder: Path):
        self.folder = folder
        about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        self.columns, self.sizes = about["columns"], about["sizes"]

    def reader(self) -> pa.ipc.RecordBatchFileReader:
        return pa.ipc.open_file(pa.OSFile(str(self.folder / "rows.arrow")))

    def read(self, reader: pa.ipc.RecordBatchFileReader, group: int) -> pa.Table:
        return pa.Table.from_batches([reader.get_batch(group)])


def _copy(path: Path, folder: Path) -> None:
    """Runs parquet_copy.py. Raises DataError with the reason that it gives."""
    run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", run, parquet_copy.__file__, str(path), str(folder), str(BATCH_BYTES)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode < 0:
        end = signal.Signals(-done.returncode).name
        raise DataError(f"{path}: the process that copies it by rows was killed by {end}; is there memory for it?")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1][:300]
        raise DataError(f"{path} cannot be read: {reason}; write or download the file again")
