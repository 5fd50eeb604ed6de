"""Where rows come from: "PATH[@split],PATH[@split]" or a list of dicts; each becomes a RowSource (row_sources.py).

Parquet and JSON files are read by parquet.py and json_files.py, a few rows at a time; a URL through a copy in the
cache (remote.py); everything else by the `datasets` library, memory-mapped. Pictures are left as bytes: decoding is
media.py's job.
"""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from grpo_vlm.config.locations import scheme_of, split_config, split_source, split_sources
from grpo_vlm.data.cache import cached_folder, file_state
from grpo_vlm.data.entries import not_a_file
from grpo_vlm.data.json_files import LineSource, holds_list, read_list
from grpo_vlm.data.parquet import ParquetSource
from grpo_vlm.data.remote import local_copy
from grpo_vlm.data.row_sources import ArrowSource, JoinedSource, ListSource, MixedSource, RowSource
from grpo_vlm.errors import DataError
from grpo_vlm.hub import SWITCH, data_folder, uses_modelscope

FILE_TYPES = (".parquet", ".json", ".jsonl")
SPLIT = re.compile(r"(\w[\w.]*)(\[.*\])?")  # of several with + between


def open_source(source: str | Sequence[Mapping[str, Any]]) -> RowSource:
    """Opens rows: a list of dicts, or one or several "PATH[@split]" with commas between, each a parquet, json or jsonl
    file, a folder, a URL of one (s3://, hdfs://, memory:// ...) or a hub id (split "train" when left out).

    Raises DataError when one does not exist, cannot be read, has no such split, or is empty.
    """
    if isinstance(source, str):
        named = split_sources(source)
        opened = [_open_path(part) for part in named]
        for part, name in zip(opened, _names(named, [part.name for part in opened]), strict=True):
            part.name = name
    elif isinstance(source, datasets.Dataset):
        opened = [ArrowSource(source, "rows", named=False)]
    else:
        opened = [ListSource(list(source), "rows")]
    for part in opened:
        if len(part) == 0:
            raise DataError(f"{part.name}: there are no rows; check the path and the split")
    return opened[0] if len(opened) == 1 else MixedSource(opened)


def _names(named: Sequence[str], short: Sequence[str]) -> list[str]:
    """Names for row ids, each different: that of the file; where it is not the only one of that name its path as it
    was given; where a path is given twice with a number."""
    counts, seen, names = Counter(short), Counter(), []
    for path, name in zip(named, short, strict=True):
        name = name if counts[name] == 1 else path
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}({seen[name]})")
    return names


def _open_path(source: str) -> RowSource:
    text, split = split_source(source)
    if not text.strip():
        raise DataError("the path of the data set is empty; set data.train_files (and data.val_files) to PATH[@split]")
    if not split:
        raise DataError(f"{source!r} ends with @; name the split, e.g. {text}@train")
    if scheme_of(text):
        return _open_local(local_copy(text), text, split)
    path = Path(text).expanduser()
    if path.exists() or path.suffix.lower() in FILE_TYPES:
        return _open_local(path, text, split)
    text, config = split_config(text)
    if Path(text).expanduser().is_dir():
        return _open_folder(Path(text).expanduser(), _split_name(f"{Path(text).name}:{config}", split), split, config)
    if Path(text).suffix and "/" not in text:
        raise DataError(f"{text} does not exist (looked in {Path.cwd()}); check the path")
    if text.count("/") > 1 or text.startswith((".", "/", "~")):
        raise DataError(f"{text} does not exist (looked in {Path.cwd()}); give a file, a folder or a hub id")
    name = _split_name(text if config is None else f"{text}:{config}", split)
    if uses_modelscope():
        return _open_folder(data_folder(text), name, split, config)
    return ArrowSource(_load_hub(text, split, config), name)


def _open_local(path: Path, text: str, split: str) -> RowSource:
    """A file or folder of this machine. text: how it was named."""
    if path.is_dir():
        return _open_folder(path, _split_name(path.resolve().name, split), split)
    if not path.is_file():
        raise DataError(f"{text} {not_a_file(path)} (looked in {Path.cwd()}); check the path")
    if path.suffix.lower() not in FILE_TYPES:
        raise DataError(f"{text}: files of type {path.suffix or 'none'} are not read; use {', '.join(FILE_TYPES)}")
    name = _split_name(path.name, split)
    if path.suffix.lower() == ".parquet":
        return _open_parquet([path], name, split)
    return _open_json(path, name, split)


def _open_json(path: Path, name: str, split: str) -> RowSource:
    if holds_list(path):
        rows = read_list(path)
        first, last = _slice(split, len(rows), path.name)
        return ListSource(rows[first:last], name, path)
    lines = LineSource(path, name)
    lines.select(*_slice(split, len(lines), path.name))
    return lines


def _open_parquet(paths: Sequence[Path], name: str, split: str) -> ParquetSource:
    with _one_error(paths[0].name, split):
        whole = ParquetSource(paths, name)
    first, last = _slice(split, len(whole), paths[0].name)
    whole.select(first, last)
    return whole


def _slice(split: str, num_rows: int, name: str) -> tuple[int, int]:
    """Absolute bounds of "train" or "train[:100]" in a file, which is all of one split."""
    try:
        (bounds,) = datasets.ReadInstruction.from_spec(split).to_absolute({"train": num_rows})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{name}@{split}: a file has the one split 'train' ({_line(error)}); drop @{split}") from error
    return bounds.from_ or 0, num_rows if bounds.to is None else bounds.to


def _open_folder(path: Path, name: str, split: str, config: str | None = None) -> RowSource:
    """A folder that `datasets` saved, or one with data files, whose names tell their splits."""
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return ArrowSource(_load_saved(path, split), name)
    if not any(files for _, _, files in os.walk(path)):
        raise DataError(f"{path}: the folder is empty; put parquet or jsonl files in it")
    with _one_error(str(path), split):
        about = datasets.load_dataset_builder(str(path), config).config
    found = {key: [Path(file) for file in files] for key, files in (about.data_files or {}).items()}
    every = [file for files in found.values() for file in files]
    parts = [SPLIT.fullmatch(part) for part in split.split("+")]
    if all(part is not None and part[1] in found for part in parts):
        suffixes = {file.suffix.lower() for part in parts for file in found[part[1]]}
        if suffixes <= set(FILE_TYPES):
            opened = [_open_files(found[part[1]], name, part[2] or "") for part in parts]
            return opened[0] if len(opened) == 1 else JoinedSource(opened, name)
    options = _csv_options(every, about.sep) if {file.suffix.lower() for file in every} <= {".csv", ".tsv"} else {}
    return ArrowSource(_load_folder(path, every, split, config, options), name)


def _open_files(files: Sequence[Path], name: str, bounds: str) -> RowSource:
    """The files of one split. bounds: "[FIRST:LAST]" or nothing."""
    if all(file.suffix.lower() == ".parquet" for file in files):
        return _open_parquet(files, name, f"train{bounds}")
    opened = [_open_local(file, str(file), "train") for file in files]
    joined = JoinedSource(opened, name)
    if not bounds:
        return joined
    first, last = _slice(f"train{bounds}", len(joined), name)
    return joined.selected(first, last)


def _csv_options(files: Sequence[Path], separator: str) -> dict[str, Any]:
    """That every cell is text as it is written: 007 stays 007, and NA is a word."""
    columns: dict[str, None] = {}
    for file in files:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            columns |= dict.fromkeys(next(csv.reader(lines, delimiter=separator), ()))
    features = datasets.Features({column: datasets.Value("string") for column in columns})
    return {"features": features, "keep_default_na": False}


def _load_folder(
    path: Path, files: Sequence[Path], split: str, config: str | None, options: Mapping[str, Any]
) -> datasets.Dataset:
    """Rows of whatever files `datasets` finds in a folder. It would take a file of the same size and time for the one
    that it has read before; a folder of our cache is made anew for every change."""
    states = [file_state(file) for file in files]
    size = sum(file.stat().st_size for file in files)

    def fill(folder: Path) -> None:
        _load(str(path), split, config, folder, options)

    what = f"the rows of {path.resolve()}{'' if config is None else f':{config}'}@{split}"
    return _load(str(path), split, config, cached_folder("folders", what, json.dumps(states), fill, size), options)


def _load_saved(path: Path, split: str) -> datasets.Dataset:
    with _one_error(str(path), split):
        saved = datasets.load_from_disk(str(path))
    if isinstance(saved, datasets.Dataset):
        first, last = _slice(split, len(saved), path.name)
        return saved.select(range(first, last))
    part = SPLIT.fullmatch(split)
    if part is None or part[1] not in saved:
        raise DataError(f"{path}: no split {split!r}; present: {', '.join(saved)}; write PATH@SPLIT")
    rows = saved[part[1]]
    return rows.select(range(*_slice(f"train{part[2] or ''}", len(rows), path.name)))


def _load_hub(name: str, split: str, config: str | None) -> datasets.Dataset:
    try:
        return _load(name, split, config)
    except DataError as error:
        raise DataError(
            f"{name} is no file or folder in {Path.cwd()}, and as a data set of the Hugging Face hub: {error} "
            f"({SWITCH}=1 asks ModelScope instead)"
        ) from error


def _load(
    name: str, split: str, config: str | None, cache: Path | None = None, options: Mapping[str, Any] | None = None
) -> datasets.Dataset:
    """datasets.load_dataset without progress bars. cache: a folder in the place of its own. options: of the files'
    format."""
    place = None if cache is None else str(cache)
    with _one_error(name, split), _no_progress_bars():
        return datasets.load_dataset(name, config, split=split, cache_dir=place, **(options or {}))


@contextmanager
def _one_error(shown: str, split: str) -> Iterator[None]:
    """The many error types of `datasets` become one DataError with the reason in a line."""
    try:
        yield
    except DataError:
        raise
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"{shown}: a row group is too large for nested columns ({_line(error)}); write the file again with "
            "row_group_size=1000 (pyarrow.parquet.write_table)"
        ) from error
    except Exception as error:
        reason = error.__cause__ or error
        way = f"; write {shown}:CONFIG@{split}" if "Config name is missing" in str(reason) else ""
        raise DataError(f"{shown}@{split} cannot be read: {type(reason).__name__}: {_line(reason)}{way}") from error


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
