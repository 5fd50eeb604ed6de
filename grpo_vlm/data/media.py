"""Pictures: decode, turn upright, put on white, resize to the exact size that the processor and the rollout server
will keep.

A picture is decoded in full before anything else uses it, because a decoder that reads lazily reports a broken file
only at the first pixel access (and some return garbage at the second). Sizes are plain arithmetic, so the token count
of a prompt is known without touching pixels.
Errors are DataErrors about one picture; the caller adds row and column.
"""

import hashlib
import io
import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from grpo_vlm.errors import DataError

MAX_ASPECT_RATIO = 200  # smart_resize refuses more
MAX_SIZE_PASSES = 16  # extreme ratios need several passes of smart_resize until the size stays


@dataclass(frozen=True)
class SizeRule:
    """How large a picture becomes. Pixels are width times height; None switches a bound of the configuration off.

    min_pixels, max_pixels: data.min_pixels and data.max_pixels (EasyR1's meaning).
    factor: patch_size * merge_size of the processor, in pixels per side of a token; merge_size: patches per side of a
    token.
    processor_min_pixels, processor_max_pixels: the processor's own bounds.
    """

    min_pixels: int | None
    max_pixels: int | None
    factor: int
    merge_size: int
    processor_min_pixels: int
    processor_max_pixels: int

    @classmethod
    def of(cls, image_processor: Any, min_pixels: int | None, max_pixels: int | None) -> "SizeRule":
        """Reads patch size, merge size and pixel bounds from a Qwen-VL image processor."""
        return cls(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            factor=image_processor.patch_size * image_processor.merge_size,
            merge_size=image_processor.merge_size,
            processor_min_pixels=image_processor.size["shortest_edge"],
            processor_max_pixels=image_processor.size["longest_edge"],
        )

    def target(self, width: int, height: int) -> tuple[int, int]:
        """The final (width, height): data.max_pixels, data.min_pixels, then the processor's rule until the size stays.

        Raises DataError for an empty picture, an aspect ratio above 200, or bounds that fit no size.
        """
        _check_shape(width, height)
        if self.max_pixels is not None and width * height > self.max_pixels:
            scale = (self.max_pixels / (width * height)) ** 0.5
            width, height = int(width * scale), int(height * scale)
        if self.min_pixels is not None and 0 < width * height < self.min_pixels:
            scale = (self.min_pixels / (width * height)) ** 0.5
            width, height = int(width * scale), int(height * scale)
        for _ in range(MAX_SIZE_PASSES):
            if min(width, height) < 1:
                raise DataError(f"data.max_pixels={self.max_pixels} leaves it {width}x{height} pixels; raise it")
            # truncating can lift a ratio near 200 above it, which smart_resize would refuse
            width, height = min(width, MAX_ASPECT_RATIO * height), min(height, MAX_ASPECT_RATIO * width)
            new_height, new_width = smart_resize(
                height, width, self.factor, self.processor_min_pixels, self.processor_max_pixels
            )
            if (new_width, new_height) == (width, height):
                return width, height
            width, height = new_width, new_height
        raise DataError(
            f"no size fits the processor's bounds of {self.processor_min_pixels} to {self.processor_max_pixels} "
            f"pixels in steps of {self.factor} (last tried {width}x{height}); crop it or widen the processor's bounds"
        )

    def tokens(self, width: int, height: int) -> int:
        """Image tokens (merged patches) of a picture with this original size."""
        return self.final_tokens(*self.target(width, height))

    def final_tokens(self, width: int, height: int) -> int:
        """Image tokens of a picture that already has its final size; target() must not be applied to it again."""
        return (width // self.factor) * (height // self.factor)


def _check_shape(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise DataError(f"its size is {width}x{height}: a side of zero pixels cannot be used; remove the row")
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise DataError(
            f"its size is {width}x{height}: aspect ratio {ratio:.1f} is above the limit of {MAX_ASPECT_RATIO}; "
            "crop or pad the picture, or remove the row"
        )


def image_entries(cell: Any) -> list[Any]:
    """The pictures of one cell as a list.

    Accepts None, "", one entry, a list of entries, or a list of paths written as JSON text.
    """
    if cell is None or (isinstance(cell, str) and not cell.strip()):
        return []
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = json.loads(cell)
        except json.JSONDecodeError as error:
            raise DataError(f"{cell[:80]!r} starts like a JSON list but is not one ({error}); write a list") from None
    if isinstance(cell, np.ndarray):
        raise DataError(f"an array of shape {cell.shape} is not a picture; give PIL images, bytes or paths")
    if isinstance(cell, Sequence) and not isinstance(cell, (str, bytes, bytearray)):
        return list(cell)
    return [cell]


def source_key(entry: Any, image_dir: str | None = None) -> Hashable:
    """Equal for entries that hold the same bytes, name the same file or are the same object. Opens nothing.

    For an object it is its id: valid while the object is kept.
    """
    if isinstance(entry, Mapping):
        entry = entry["path"] if entry.get("bytes") is None and entry.get("path") else entry.get("bytes")
    if isinstance(entry, (bytes, bytearray, memoryview)):
        return "bytes", hashlib.blake2b(entry, digest_size=16).digest()
    if isinstance(entry, (str, Path)):
        return "path", str(Path(image_dir or "", entry))
    return "object", id(entry)


def decode_image(entry: Any, image_dir: str | None = None) -> Image.Image:
    """Decodes one picture to 8-bit RGB, upright, transparency on white; of an animation the first frame.

    entry: PIL image, bytes, {"bytes", "path"} or a path; relative paths are joined to image_dir when that is set.
    Pictures with more than 8 bits a channel are scaled, not clipped. Raises DataError when the picture is missing or
    broken.
    """
    image = load_image(entry, image_dir)
    try:
        return to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a decoder may raise anything on bad bytes; the cause goes into the message
        raise DataError(f"cannot be converted to RGB: {_reason(error)}; replace the file or remove the row") from error


def image_size(entry: Any, image_dir: str | None = None) -> tuple[int, int]:
    """(width, height), upright, of a picture that was proven to decode.

    Raises DataError like decode_image, but makes no RGB copy.
    """
    image = load_image(entry, image_dir)
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception as error:
        raise DataError(f"its EXIF data are broken: {_reason(error)}; strip them or remove the row") from error
    return (image.height, image.width) if orientation in (5, 6, 7, 8) else image.size


def load_image(entry: Any, image_dir: str | None = None) -> Image.Image:
    """Opens one picture and reads all of its pixels, in whatever mode it is stored. Raises DataError."""
    source = _source(entry, image_dir)
    name = "" if isinstance(source, (Image.Image, io.BytesIO)) else f"{source}: "
    try:
        image = source if isinstance(source, Image.Image) else Image.open(source)
        _check_shape(*image.size)
        image.load()
    except DataError as error:
        raise DataError(f"{name}{error}") from None
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error ...
        raise DataError(f"{name}cannot be decoded: {_reason(error)}; replace the file or remove the row") from error
    return image


def _source(entry: Any, image_dir: str | None) -> Image.Image | io.BytesIO | Path:
    if isinstance(entry, Image.Image):
        return entry
    if isinstance(entry, (bytes, bytearray, memoryview)):
        return io.BytesIO(entry)
    if isinstance(entry, Mapping):
        if entry.get("bytes") is not None:
            return io.BytesIO(entry["bytes"])
        if entry.get("path"):
            return _source(entry["path"], image_dir)
        raise DataError(f"a picture needs 'bytes' or 'path', this one has keys {sorted(entry)} and neither is filled")
    if isinstance(entry, (str, Path)):
        if str(entry).startswith(("http://", "https://", "data:")):
            raise DataError(f"{str(entry)[:60]!r}: links and data URIs are not read; give bytes or a local path")
        path = Path(image_dir or "", entry).expanduser()
        if not path.is_file():
            what = "is a folder, not a picture" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {what}; check the path or data.image_dir (now {image_dir!r})")
        return path
    raise DataError(f"{type(entry).__name__} is not a picture; give a PIL image, bytes, {{'bytes', 'path'}} or a path")


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return type(error).__name__ if not text or "BytesIO" in text else f"{type(error).__name__}: {text[:200]}"


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. Transparency is composited on white; 16-bit, 32-bit and float pictures are scaled to 8 bits."""
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_to_8_bit(np.asarray(image))).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    image = image.convert("RGBA")
    if image.getextrema()[3] == (255, 255):
        return image.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """Grey values [height, width] to uint8.

    Integers lose low bits by the depth they really use, so that 10-bit data in a 16-bit file stay visible; floats in
    [0, 1] or [0, 255] keep their meaning; anything else is stretched from minimum to maximum.
    """
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer) and low >= 0:
        return (values >> max(0, int(high).bit_length() - 8)).astype(np.uint8)
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ValueError("grey values hold NaN or infinity")
    if low >= 0 and high <= 255:
        return np.rint(values * (255 if high <= 1 else 1)).astype(np.uint8)
    return np.rint((values - low) * (255 / max(high - low, 1e-12))).astype(np.uint8)


def resize_image(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Bicubic resize of an RGB picture to (width, height); the same object when it already fits."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)
