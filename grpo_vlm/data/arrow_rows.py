"""Arrow tables as rows of Python values, with what `datasets` writes into them decoded.

Since version 5 `datasets` keeps columns and fields whose rows differ in type as JSON text (Arrow's type arrow.json); a
ClassLabel is a number whose names are in the schema's metadata. Pictures stay {bytes, path}.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa

Decode = Callable[[Any], Any]


def class_names(schema: pa.Schema) -> dict[str, Sequence[str]]:
    """The names of each ClassLabel column, from the metadata that `datasets` leaves in a file."""
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = (about.get("info") or {}).get("features") or {}
    labels = {name: kind for name, kind in features.items() if isinstance(kind, Mapping)}
    return {name: kind["names"] for name, kind in labels.items() if kind.get("_type") == "ClassLabel"}


def feature_names(features: datasets.Features) -> dict[str, Sequence[str]]:
    """The names of each ClassLabel column of a data set."""
    return {name: kind.names for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)}


def rows_of(table: pa.Table, names: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """The rows as dicts. names: of the ClassLabel columns."""
    decoders = {field.name: decode for field in table.schema if (decode := _decoder(field, names)) is not None}
    rows = table.to_pylist()
    for row in rows if decoders else ():
        for name, decode in decoders.items():
            row[name] = decode(row[name])
    return rows


def values_of(field: pa.Field, values: pa.Array | pa.ChunkedArray, names: Mapping[str, Sequence[str]]) -> list[Any]:
    """The values of one column."""
    decode = _decoder(field, names)
    return values.to_pylist() if decode is None else [decode(value) for value in values.to_pylist()]


def _decoder(field: pa.Field, names: Mapping[str, Sequence[str]]) -> Decode | None:
    if field.name in names and pa.types.is_integer(field.type):
        labels = names[field.name]
        return lambda number: None if number is None or number < 0 else labels[number]
    return _of_type(field.type)


def _of_type(kind: pa.DataType) -> Decode | None:
    """What decodes values of this type; None where nothing is to be decoded."""
    if isinstance(kind, pa.JsonType):
        return _json
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _of_type(kind.value_type)
        return None if inner is None else lambda cell: None if cell is None else [inner(item) for item in cell]
    if pa.types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _of_type(field.type)) is not None}
        return (lambda cell: _fields(cell, fields)) if fields else None
    return None


def _fields(cell: dict[str, Any] | None, decoders: Mapping[str, Decode]) -> dict[str, Any] | None:
    return None if cell is None else cell | {name: decode(cell[name]) for name, decode in decoders.items()}


def _json(text: str | None) -> Any:
    """The value of JSON text. A number keeps the form in which it was written where Python's differs ("1.50"): what
    was a text in one row and a number in another is written alike."""
    value = None if text is None else json.loads(text)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return text if is_number and json.dumps(value) != text else value
