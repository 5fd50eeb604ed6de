"""Numbers out of the result files of measuring processes (measure.Result). Needs nothing but Python."""

import json
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def median(rows: list[dict[str, Any]], name: str) -> float | None:
    """Median of a number over the rows that have it; None when there is none."""
    values = [row[name] for row in rows if name in row]
    return statistics.median(values) if values else None


def by_name(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Medians of a mapping that the rows have, such as the seconds by phase."""
    inner = [row[name] for row in rows if name in row]
    keys = dict.fromkeys(key for row in inner for key in row)
    return {key: statistics.median(row.get(key, 0.0) for row in inner) for key in keys}


def largest(rows: list[dict[str, Any]], name: str) -> float | None:
    """Largest value of a number."""
    return max((row[name] for row in rows if name in row), default=None)


def growth(rows: list[dict[str, Any]], name: str, after: int) -> float | None:
    """How much a number grew from step `after` to the last."""
    values = [row[name] for row in rows if row["step"] >= after and name in row]
    return values[-1] - values[0] if len(values) > 1 else None
