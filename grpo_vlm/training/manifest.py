"""The list of a checkpoint's files with their sizes and SHA-256 sums: written last, read before anything is loaded.

A folder without its manifest is not a checkpoint. `sha256sum` gives the same sums.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from grpo_vlm.report.files import replace_text

NAME = "manifest.json"
FORMAT = 2
CHUNK = 1 << 22
READERS = 8  # files hashed at a time


def write_manifest(folder: Path, facts: Mapping[str, Any]) -> None:
    """Lists all files below `folder`, as they lie on the disk, together with `facts`. OSError."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(READERS) as pool:
        found = dict(zip(names, pool.map(lambda name: _describe(folder / name), names), strict=True))
    content = {"format": FORMAT, **facts, "files": found}
    replace_text(folder / NAME, json.dumps(content, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """What the manifest says; None where it is absent or cannot be read."""
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and isinstance(content.get("files"), dict) else None


def find_fault(folder: Path) -> str | None:
    """Why the folder is not the checkpoint that was written: the first file that is absent, has another size or other
    contents; None when all is well."""
    content = read_manifest(folder)
    if content is None:
        return f"{NAME} is absent or cannot be read (an earlier version wrote none)"
    if content.get("format") != FORMAT:
        return f"{NAME} has format {content.get('format')}, this version reads {FORMAT}"
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda item: _file_fault(folder / item[0], item[1]), content["files"].items())
        faults = [f"{name}: {fault}" for name, fault in zip(content["files"], found, strict=True) if fault]
    return faults[0] if faults else None


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": os.path.getsize(path), "sha256": digest(path)}


def _file_fault(path: Path, listed: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "is absent"
    size = path.stat().st_size
    if size != listed["bytes"]:
        return f"has {size} bytes, {listed['bytes']} were written"
    try:
        return None if digest(path) == listed["sha256"] else "has other contents than were written"
    except OSError as error:
        return f"cannot be read ({error})"


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(CHUNK):
            found.update(block)
    return found.hexdigest()
