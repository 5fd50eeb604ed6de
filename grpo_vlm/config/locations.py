"""How data.train_files and data.val_files name rows: "PATH[@split],PATH[@split]", each a file, a URL that fsspec
knows, or a folder or hub id, of which PATH:CONFIG is one of several configurations. Standard library only."""

import os
import re

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def split_sources(value: str) -> list[str]:
    """The parts of a mixture; an existing path with a comma in it is one part."""
    if not value.strip() or os.path.exists(os.path.expanduser(value)):
        return [value]
    return [part.strip() for part in value.split(",")]


def split_source(value: str) -> tuple[str, str]:
    """`PATH[@split]` -> path, split. The split is `train` by default; an existing path with an @ in it is a path, and
    so is an @ before a slash (s3://user@host/file)."""
    path, at, split = value.rpartition("@")
    if not at or "/" in split or os.path.exists(os.path.expanduser(value)):
        return value, "train"
    return path, split


def split_config(path: str) -> tuple[str, str | None]:
    """`org/name:config` -> id or folder, configuration; an existing path with a colon in it is a path."""
    base, _, config = path.rpartition(":")
    if not (base and config) or "/" in config or scheme_of(path) or os.path.exists(os.path.expanduser(path)):
        return path, None
    return base, config


def scheme_of(path: str) -> str:
    """`s3` of `s3://bucket/file`; empty for everything that is no URL."""
    found = _SCHEME.match(path)
    return found.group(1).lower() if found else ""
