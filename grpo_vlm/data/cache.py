"""The folder where what was worked out from data files is kept between runs: GRPO_VLM_CACHE, else grpo_vlm under
XDG_CACHE_HOME or ~/.cache.

Everything in it can be deleted at any time and is made again. Entries appear whole or not at all, so several processes
may share it.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from grpo_vlm.errors import DataError

VARIABLE = "GRPO_VLM_CACHE"
_BLOCK = 1 << 20  # bytes


def cache_dir() -> Path:
    """The folder; it may not exist yet."""
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache").absolute() / "grpo_vlm"


def short_hash(*parts: str) -> str:
    """32 hexadecimal digits for these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def content_hash(paths: Iterable[Path]) -> str:
    """Hash of the bytes of files, in their order: about a second per gigabyte."""
    whole = hashlib.sha256()
    for path in paths:
        one = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                one.update(block)
        whole.update(one.digest())
    return whole.hexdigest()


def file_state(path: Path) -> list[int | str]:
    """What changes whenever a file is written or replaced: its place, size, times and inode."""
    stat = path.stat()
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def size_and_time(path: Path) -> tuple[int, int]:
    """Bytes and nanoseconds: what changes when a file is written in the middle of a run. Unlike `file_state` it stays
    the same where only links, rights or a network mount's inode numbers change."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def check_unchanged(path: Path, state: tuple[int, int]) -> None:
    """Raises DataError when a file of rows is no longer what it was when `size_and_time` gave `state`."""
    if not path.is_file() or size_and_time(path) != state:
        raise DataError(
            f"{path} has been changed or moved since it was opened; leave the files of a run alone until it ends, and "
            "start it again (it goes on from its last checkpoint)"
        )


def cached_folder(kind: str, what: str, version: str, fill: Callable[[Path], None], size: int) -> Path:
    """The cache's folder of one version of `what`, made by `fill(folder)` when it is not there; older versions are
    deleted. Of several processes that want it one makes it. size: bytes it will take about.

    Raises DataError when the disk has no room or cannot be written, and what `fill` raises.
    """
    home = cache_dir() / kind / short_hash(what)
    folder = home / short_hash(version)
    if folder.is_dir():
        return folder
    lock = FileLock(home / "lock")
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise DataError(
            f"{what} is kept in {cache_dir()}, which cannot be written ({error.strerror}); name a folder in the "
            f"environment variable {VARIABLE}"
        ) from error
    try:
        if not folder.is_dir():
            _check_room(what, home, size)
            _make(folder, fill)
    finally:
        lock.release()
    return folder


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """The folder, whole or not at all, in the place of older versions."""
    for old in filter(Path.is_dir, folder.parent.iterdir()):
        shutil.rmtree(old)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    try:
        fill(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _check_room(what: str, home: Path, size: int) -> None:
    free = shutil.disk_usage(home).free
    if free < size * 1.1:
        raise DataError(
            f"{what} needs about {size / 1e9:.1f} GB in {cache_dir()}, which has {free / 1e9:.1f} GB left; free some, "
            f"or name a folder on another disk in the environment variable {VARIABLE}"
        )


def write_entry(path: Path, text: str) -> None:
    """Writes a file of the cache. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(unfinished, path)
