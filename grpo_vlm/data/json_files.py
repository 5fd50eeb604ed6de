"""Rows of JSON files, read by Python itself: exact line numbers in errors, and rows may differ in their keys.

Of a file with a row a line only the places of the lines are kept, so that it may be larger than memory; a list of rows
is read as a whole.
"""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_vlm.data.cache import check_unchanged, content_hash, size_and_time
from grpo_vlm.errors import DataError

_MARK = b"\xef\xbb\xbf"  # byte-order mark of UTF-8
CHECKED_BYTES = 32 << 20
CHECKED_ROWS = 256
NAMED_FAULTS = 20  # of one file; the others are counted


class LineSource:
    """Rows of a file with one JSON object a line. Blank lines are skipped.

    Raises DataError naming each line, and the byte in it, that is not a JSON object in UTF-8.
    """

    def __init__(self, path: Path, name: str):
        self.name, self.path = name, path.absolute()
        self.notes: list[str] = []
        self._places = array("Q")  # bytes
        self._state = size_and_time(self.path)
        columns: dict[str, None] = {}
        faults = Faults()
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    row = _object(line, number, at)
                except DataError as fault:
                    faults.add(str(fault))
                else:
                    if row is not None:
                        columns |= dict.fromkeys(row)
                        self._places.append(at)
                at += len(line)
        self._places.append(at)
        self.columns = list(columns)
        faults.raise_all(str(path), "lines cannot be read", f"{path}, ")

    def __len__(self) -> int:
        return len(self._places) - 1

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        found = []
        check_unchanged(self.path, self._state)
        with self.path.open("rb") as file:
            for row in range(start, min(stop, len(self))):
                file.seek(self._places[row])
                found.append(json.loads(file.readline().removeprefix(_MARK)))
        return found

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        start = 0
        while start < len(self):
            stop = start + 1
            while stop < min(start + CHECKED_ROWS, len(self)):
                if self._places[stop] - self._places[start] > CHECKED_BYTES:
                    break
                stop += 1
            yield self.rows(start, stop)
            start = stop

    def column(self, name: str) -> Iterator[Any]:
        return (row.get(name) for batch in self.batches() for row in batch)

    def row_id(self, row: int) -> str:
        return f"{self.name}:{row}"

    def digest(self) -> str:
        return f"{content_hash([self.path])}{len(self)}from{self._places[0]}"

    def select(self, first: int, last: int) -> None:
        """Keeps the rows [first, last)."""
        self._places = self._places[first : last + 1]


class Faults:
    """What is wrong with a file, told all at once."""

    def __init__(self) -> None:
        self.count = 0
        self._named: list[str] = []

    def add(self, fault: str) -> None:
        self.count += 1
        if self.count <= NAMED_FAULTS:
            self._named.append(fault)

    def raise_all(self, file: str, what: str, before: str = "") -> None:
        """Raises a DataError when there is a fault; one stands alone, behind `before`, several are listed under "FILE:
        N {what}"."""
        if self.count == 1:
            raise DataError(f"{before}{self._named[0]}")
        if self.count:
            more = f"\n  ... and {self.count - NAMED_FAULTS} more" if self.count > NAMED_FAULTS else ""
            raise DataError(f"{file}: {self.count} {what}:\n  " + "\n  ".join(self._named) + more)


def _object(line: bytes, number: int, at: int) -> dict[str, Any] | None:
    """The row of a line, which begins at byte `at` of the file; None for a blank one."""
    try:
        text = line.removeprefix(_MARK).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        start = error.start + (len(_MARK) if line.startswith(_MARK) else 0)
        raise DataError(_not_utf8(line, start, number, at)) from None
    if not text:
        return None
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:  # Python refuses numbers of thousands of digits, and deep nesting
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"line {number}: not valid JSON: {reason}; write one row a line or a list of rows") from None
    if not isinstance(row, dict):
        raise DataError(f"line {number}: a row must be a dict of columns, got {type(row).__name__}")
    return row


def holds_list(path: Path) -> bool:
    """Whether the file is one JSON list of rows rather than a row a line."""
    with path.open("rb") as file:
        for line in file:
            if text := line.removeprefix(_MARK).strip():
                return text.startswith(b"[")
    return False


def read_list(path: Path) -> list[Any]:
    """A JSON list of rows. Raises DataError with the line of a fault."""
    content = path.read_bytes()
    try:
        return json.loads(content.removeprefix(_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, {_not_utf8(content, error.start, 1, 0)}") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}; fix this line") from None


def _not_utf8(content: bytes, start: int, number: int, at: int) -> str:
    """The message about a file that is not UTF-8. start: the wrong byte in content, which begins at byte `at` of the
    file, in line `number`."""
    line = number + content.count(b"\n", 0, start)
    place = f"line {line}, byte {at + start} of the file ({content[start]:#04x})"
    return f"{place}: is not UTF-8; save the file as UTF-8 (iconv -f ENCODING -t UTF-8)"
