"""Cells of a row: fields of structs by dotted keys, lists written as JSON text, what is empty."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def listed(cell: Any, fits: Callable[[Any], bool]) -> Any:
    """The list that a cell holds as JSON text, when every item of it fits; any other cell as it is."""
    if not (isinstance(cell, str) and cell.lstrip().startswith("[")):
        return cell
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return cell  # a question that begins with a bracket
    return found if found and all(map(fits, found)) else cell


def reached(row: Mapping[str, Any], key: str) -> Any:
    """The cell of a column, or of a struct's field for a dotted key; None where there is none."""
    first, dot, rest = key.partition(".")
    if key in row or not dot:
        return row.get(key)
    inner = row.get(first)
    return reached(inner, rest) if isinstance(inner, Mapping) else None


def without(column: str, cell: Any, keys: Sequence[str]) -> Any:
    """A column's cell without the fields that hold media."""
    inner = [key.removeprefix(f"{column}.") for key in keys if key.startswith(f"{column}.")]
    if not inner or not isinstance(cell, Mapping):
        return cell
    return {key: without(key, value, inner) for key, value in cell.items() if key not in inner}


def is_empty(cell: Any) -> bool:
    """Whether a cell of media, or a part's field, holds nothing."""
    if isinstance(cell, (list, tuple)):
        return all(entry is None for entry in cell)
    if isinstance(cell, Mapping):  # parquet fills structs with nulls
        return all(map(is_empty, cell.values()))
    return cell is None or (isinstance(cell, (str, bytes)) and len(cell) == 0)
