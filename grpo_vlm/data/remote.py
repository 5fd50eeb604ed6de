"""Files behind a URL that fsspec knows (s3://, hdfs://, memory://, gs:// ...): read through a copy in the cache,
written in place.

A copy, because rows are drawn in random order by several processes: over a network that would be a request a row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from grpo_vlm.config.locations import scheme_of
from grpo_vlm.data.cache import cached_folder
from grpo_vlm.errors import DataError


def local_copy(url: str) -> Path:
    """The copy in the cache of the file or folder at `url`, downloaded when it is not there or has changed.

    Raises DataError when it does not exist, its driver is absent, or it cannot be read.
    """
    system, path = file_system(url)
    with _one_error(url):
        if not system.exists(path):
            raise DataError(f"{url} does not exist; check the address")
        files = sorted(system.find(path))
        if not files:
            raise DataError(f"{url}: the folder is empty; put parquet or jsonl files in it")
        version = "\n".join(f"{file} {system.ukey(file)}" for file in files)
        size = sum(system.size(file) or 0 for file in files)
        top = path.rstrip("/").rpartition("/")[2]

        def fill(folder: Path) -> None:
            if files == [path]:
                system.get_file(path, str(folder / top))
            else:
                system.get(path.rstrip("/"), str(folder / top), recursive=True)

        return cached_folder("remote", url, version, fill, size) / top


def write_file(target: str, name: str, local: Path) -> str:
    """Copies a local file to the folder `target`, a path or URL; returns its address. Raises DataError."""
    address = f"{target.rstrip('/')}/{name}"
    system, path = file_system(address)
    with _one_error(address):
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.put_file(str(local), path)
    return address


def file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system of a path or URL, and the path in it. Raises DataError when its driver is absent."""
    scheme = scheme_of(address) or "file"
    try:
        return fsspec.core.url_to_fs(address)
    except ImportError as error:
        raise DataError(f"{address}: reading {scheme}:// needs another package: {_remedy(error)}") from error
    except ValueError as error:
        known = ", ".join(sorted(name for name in fsspec.available_protocols() if name != "file"))
        raise DataError(f"{address}: {scheme}:// is no kind of address that fsspec knows ({known})") from error
    except Exception as error:  # a driver may connect here: no credentials, no Hadoop, no such host
        raise DataError(f"{address} cannot be reached: {type(error).__name__}: {_line(error)}") from error


def _remedy(error: ImportError) -> str:
    """fsspec's own words for it ("Install s3fs to access S3"), and the command."""
    words = _line(error)
    package = words.split("nstall ", 1)[1].split()[0].strip("`'\"") if "nstall " in words else error.name
    return f"{words}. Run `pip install {package}`"


@contextmanager
def _one_error(address: str) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # each driver has its own kinds of error
        raise DataError(
            f"{address} cannot be used: {type(error).__name__}: {_line(error)}; check the address, the connection "
            "and your credentials"
        ) from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
