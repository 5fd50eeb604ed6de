"""Files that survive a kill at any moment: appended line by line or replaced in one step, and synced to disk.

Also the repair of JSON-lines files when a run resumes: what it will do again, and a line that was cut short, moves
aside.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

# in a run folder, of what is shown of a run
GROUPS_NAME, PICTURES_NAME, REPORT_NAME, SERVICES_NAME = "groups.jsonl", "pictures", "report.html", "services.json"
PLAN_NAME = "plan.json"
SHOWN_NAMES = (GROUPS_NAME, PICTURES_NAME, REPORT_NAME, SERVICES_NAME, PLAN_NAME, "wandb", "swanlog")

# half a surrogate pair cannot be UTF-8; written as \udXXX it stays the JSON escape of itself
TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace", "newline": "\n"}


def _parse_line(line: str) -> dict[str, Any] | None:
    """The row, or None for what is not one (the line that a kill cut short)."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yields (line without newline, row or None). A cut character is replaced, so that it cannot stop a resume."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
            for line in file:
                yield line.rstrip("\n"), _parse_line(line)


def read_settings(path: Path) -> dict[str, Any]:
    """A run's config.yaml under dotted keys; an empty mapping stays a value."""
    return flatten(yaml.safe_load(path.read_text(encoding="utf-8")))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else {prefix + name: value}
    return flat


def supersede_lines(path: Path, resume_step: int) -> int:
    """Moves lines of steps after `resume_step`, and cut ones, to NAME.superseded.jsonl; returns how many it moved."""
    if not path.exists():
        return 0
    moved: list[str] = []
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", **TEXT) as kept:
        for line, row in read_lines(path):
            if row is None:
                moved.append(json.dumps({"unreadable": line}, ensure_ascii=False))
            elif row["step"] > resume_step:
                moved.append(line)
            else:
                kept.write(line + "\n")
        kept.flush()
        os.fsync(kept.fileno())
    if moved:
        aside = path.with_name(f"{path.stem}.superseded.jsonl")
        before = aside.read_text(encoding="utf-8") if aside.exists() else ""
        text = "".join(line + "\n" for line in moved)
        if not before.endswith(text):  # else a kill between the two replacements: they are there already
            replace_text(aside, before + text)
    os.replace(temporary, path)
    sync(path.parent)
    return len(moved)


def append_text(path: Path, text: str) -> None:
    """Adds `text` to the end of the file; on return it is on disk."""
    with open(path, "a", **TEXT) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Writes the file so that a reader, and a kill, sees the old text or the new one and nothing between."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", **TEXT) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Waits until all files below a directory are on disk."""
    for directory, _, names in os.walk(path):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def remove(path: Path) -> None:
    """Deletes a file or a directory with its contents, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def free_path(path: Path) -> Path:
    """`path`, or the first of NAME.2, NAME.3, ... (before the suffix of a file) that is free."""
    candidate, number = path, 2
    while candidate.exists():
        suffix = ".yaml" if path.suffix == ".yaml" else ""
        candidate = path.with_name(f"{path.name.removesuffix(suffix)}.{number}{suffix}")
        number += 1
    return candidate
