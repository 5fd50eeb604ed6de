"""What a cell of a media column holds: a path, an address, bytes in one of several wrappings, or an object.

Reads the bytes and decodes nothing. Errors are MediaErrors about one entry; the caller adds row and column.
"""

import base64
import binascii
import hashlib
import json
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import requests
from PIL import Image

from grpo_vlm.data.remote import file_system
from grpo_vlm.errors import DataError, MediaError

LONGEST_NAME = 255  # characters of a path; longer text is data
FEWEST_BASE64 = 40  # shorter text is taken for a path that does not exist
BASE64 = re.compile(r"[A-Za-z0-9+/\s]+={0,2}\s*")
WRAPPINGS = ("bytes", "path", "url", "image_url", "image", "video_url", "video")  # keys that may hold the entry
FACTS = (  # further keys of a picture, which change nothing of it
    *("type", "detail", "id", "name", "file_name", "filename", "caption", "alt"),
    *("format", "mode", "width", "height", "mime_type", "media_type"),
)
STILL_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
CONNECT_S, READ_S = 10.0, 60.0
MAX_REMOTE_BYTES = 2**28  # of one file that is fetched


def image_entries(cell: Any) -> list[Any]:
    """The pictures of one cell as a list.

    Accepts None, "", NaN (pandas' empty cell), one entry, a list of entries or of nothing but None, or a list of paths
    written as JSON text. Raises DataError for a picture with settings of its own, which nothing takes.
    """
    entries = _entries(cell)
    for entry in entries:
        if isinstance(entry, Mapping):
            check_settings(entry)
    return entries


def check_settings(entry: Mapping[str, Any]) -> None:
    """Raises DataError for a picture's keys that nothing takes, such as max_pixels or crop."""
    filled = {key: value for key, value in entry.items() if value is not None}
    if unknown := sorted(map(str, set(filled) - {*WRAPPINGS, *FACTS})):
        raise DataError(
            f"a picture has the keys {', '.join(unknown)}, which are not taken (it is in {', '.join(WRAPPINGS)}); "
            "resize or crop the file, set data.max_pixels and data.min_pixels for all, or remove them"
        )
    for inner in filled.values():
        if isinstance(inner, Mapping):
            check_settings(inner)


def _entries(cell: Any) -> list[Any]:
    """The entries of one cell."""
    if cell is None or (isinstance(cell, str) and not cell.strip()) or (isinstance(cell, float) and math.isnan(cell)):
        return []
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError as error:
            raise DataError(f"{cell[:80]!r} starts like a JSON list but is not one ({error}); write a list") from None
    if isinstance(cell, np.ndarray):
        raise DataError(f"an array of shape {cell.shape} is not a picture; give PIL images, bytes or paths")
    if isinstance(cell, Sequence) and not isinstance(cell, (str, bytes, bytearray)):
        return [] if all(entry is None for entry in cell) else list(cell)
    return [cell]


def video_entries(cell: Any) -> list[Any]:
    """The videos of one cell as a list, as image_entries does; a list of still pictures is one video of these frames.

    Raises DataError.
    """
    entries = _entries(cell)
    return [entries] if entries and all(map(_is_still, entries)) else entries


def _is_still(entry: Any) -> bool:
    if isinstance(entry, Mapping):
        name = entry.get("path")
        return entry.get("video") is None and isinstance(name, str) and name.lower().endswith(STILL_SUFFIXES)
    return isinstance(entry, Image.Image) or (
        isinstance(entry, (str, Path)) and str(entry).lower().endswith(STILL_SUFFIXES)
    )


def source_key(entry: Any, image_dir: str | None = None) -> Hashable:
    """Equal for entries that hold the same bytes, name the same file or are the same object. Opens nothing.

    For an object it is its id: valid while the object is kept.
    """
    if isinstance(entry, Mapping):
        entry = inside(entry)
    if isinstance(entry, (list, tuple)):
        return "list", tuple(source_key(item, image_dir) for item in entry)
    if isinstance(entry, (bytes, bytearray, memoryview)):
        return "bytes", hashlib.blake2b(entry, digest_size=16).digest()
    if isinstance(entry, (str, Path)):
        text = str(entry)
        if len(text) > LONGEST_NAME:
            return "text", hashlib.blake2b(text.encode(), digest_size=16).digest()
        return "path", text if "://" in text else str(Path(image_dir or "", text))
    return "object", id(entry)


def inside(entry: Mapping[str, Any]) -> Any:
    """What a mapping wraps: the first of WRAPPINGS that is filled, None where none is."""
    for key in WRAPPINGS:
        value = entry.get(key)
        if value is not None and not (isinstance(value, str) and not value):
            return inside(value) if isinstance(value, Mapping) else value
    return None


def read_entry(entry: Any, folder: str | None = None, allow_remote: bool = False) -> Image.Image | bytes | Path:
    """A PIL image as it is, a local path that exists, or bytes.

    entry: PIL image, bytes, base64 text, data URI, path, URL or a mapping with one of them. Relative paths are joined
    to `folder` when that is set. http(s) is fetched with allow_remote alone, other schemes (file, s3, hdfs, memory)
    through fsspec. Raises MediaError, and DataError where not the entry is at fault but the setup: links that are not
    allowed, an absent driver.
    """
    if isinstance(entry, Mapping):
        wrapped = inside(entry)
        if wrapped is None:
            raise MediaError(
                f"it needs 'bytes' or 'path' (or {', '.join(WRAPPINGS[2:])}), this one has keys {sorted(entry)} and "
                "neither is filled"
            )
        entry = wrapped
    if isinstance(entry, Image.Image):
        return entry
    if isinstance(entry, (bytes, bytearray, memoryview)):
        return bytes(entry)
    if isinstance(entry, str):
        return _read_text(entry, folder, allow_remote)
    if isinstance(entry, Path):
        return _local(entry, folder)
    raise MediaError(
        f"{type(entry).__name__} is neither a picture nor a file; give a PIL image, bytes, {{'bytes', 'path'}}, a "
        "path, base64 text or a data URI"
    )


def _read_text(text: str, folder: str | None, allow_remote: bool) -> bytes | Path:
    if not text.strip():
        raise MediaError("the path is empty; give a path, or no entry where the row has no such picture")
    if text.startswith("data:"):
        return _data_uri(text)
    scheme = text.partition("://")[0].rpartition("::")[2].lower() if "://" in text[:32] else ""  # simplecache::http
    if scheme in ("http", "https"):
        if not allow_remote:
            raise DataError(
                f"{text[:80]!r} is a link, and links are not read unless data.allow_remote_media=true; set it, or "
                "give bytes or a local path"
            )
        return _fetch(text)
    if scheme:
        return _open_remote(text)
    if len(text) >= FEWEST_BASE64 and BASE64.fullmatch(text) and not _is_file(text, folder):
        return _base64(text)
    if len(text) > LONGEST_NAME:
        raise MediaError(f"text of {len(text)} characters, {text[:40]!r} ..., is neither a path nor base64")
    return _local(Path(text), folder)


def _is_file(text: str, folder: str | None) -> bool:
    return len(text) <= LONGEST_NAME and Path(folder or "", text).is_file()


def _local(path: Path, folder: str | None) -> Path:
    path = Path(folder or "", path).expanduser()
    if not path.is_file():
        raise MediaError(f"{path} {not_a_file(path)}; check the path or data.image_dir (now {folder!r})")
    return path


def not_a_file(path: Path) -> str:
    """What a path is that is no file: "does not exist", "is a folder, not a file" ..."""
    if path.is_dir():
        return "is a folder, not a file"
    return "is a device or a pipe, not a file" if path.exists() else "does not exist"


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise MediaError(f"{text[:40]!r} ... is neither a file nor base64 ({error}); fix it") from None


def _data_uri(text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise MediaError(f"{text[:40]!r} starts like a data URI but has no comma; write data:TYPE;base64,DATA")
    return _base64(body) if head.endswith(";base64") else unquote_to_bytes(body)


def _fetch(address: str) -> bytes:
    try:
        with requests.get(address, stream=True, timeout=(CONNECT_S, READ_S)) as answer:
            answer.raise_for_status()
            return _at_most(address, b"".join(_limited(answer.iter_content(2**16))))
    except requests.RequestException as error:
        raise MediaError(f"{address[:80]!r} cannot be fetched: {error}; check the link or remove the row") from error


def _limited(parts: Any) -> Any:
    """The parts up to one beyond the limit."""
    size = 0
    for part in parts:
        size += len(part)
        yield part
        if size > MAX_REMOTE_BYTES:
            return


def _open_remote(address: str) -> bytes:
    try:
        system, path = file_system(address)
        with system.open(path, "rb") as file:
            return _at_most(address, file.read(MAX_REMOTE_BYTES + 1))
    except DataError:  # its driver is absent, or does not connect: nothing of the row
        raise
    except Exception as error:  # each driver has its own kinds of error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise MediaError(f"{address[:80]!r} cannot be read: {reason}; check the address") from error


def _at_most(address: str, data: bytes) -> bytes:
    if len(data) > MAX_REMOTE_BYTES:
        raise MediaError(f"{address[:80]!r} has more than {MAX_REMOTE_BYTES} bytes; make a smaller copy")
    return data
