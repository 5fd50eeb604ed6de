"""Pictures: decode, turn upright, put on white, resize to the exact size that the processor and the rollout server
will keep.

A picture is decoded in full before anything else uses it, because a decoder that reads lazily reports a broken file
only at the first pixel access (and some return garbage at the second). Sizes are plain arithmetic, so the token count
of a prompt is known without touching pixels.
Errors are MediaErrors about one picture; the caller adds row and column.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from grpo_vlm.data.entries import read_entry
from grpo_vlm.errors import MediaError

MAX_ASPECT_RATIO = 200  # smart_resize refuses more
MAX_SIZE_PASSES = 16  # extreme ratios need several passes of smart_resize until the size stays
ANIMATED_FORMATS = ("GIF", "PNG", "WEBP", "AVIF", "TIFF", "FLI")  # of Pillow's formats, those with is_animated; an MPO
# photo carries a second view, not a next frame


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

        Raises MediaError for an empty picture, an aspect ratio above 200, or bounds that fit no size.
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
                raise MediaError(f"data.max_pixels={self.max_pixels} leaves it {width}x{height} pixels; raise it")
            # truncating can lift a ratio near 200 above it, which smart_resize would refuse
            width, height = min(width, MAX_ASPECT_RATIO * height), min(height, MAX_ASPECT_RATIO * width)
            new_height, new_width = smart_resize(
                height, width, self.factor, self.processor_min_pixels, self.processor_max_pixels
            )
            if (new_width, new_height) == (width, height):
                return width, height
            width, height = new_width, new_height
        raise MediaError(
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
        raise MediaError(f"its size is {width}x{height}: a side of zero pixels cannot be used; remove the row")
    ratio = max(width, height) / min(width, height)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaError(
            f"its size is {width}x{height}: aspect ratio {ratio:.1f} is above the limit of {MAX_ASPECT_RATIO}; "
            "crop or pad the picture, or remove the row"
        )


def decode_image(entry: Any, image_dir: str | None = None, allow_remote: bool = False) -> Image.Image:
    """Decodes one picture to 8-bit RGB, upright, transparency on white; of an animation the first frame.

    entry: PIL image, bytes, base64 text, data URI, path, URL or a mapping with one of them under "bytes", "path",
    "url", "image_url" or "image". Relative paths are joined to image_dir when that is set; http(s) is read with
    allow_remote.
    Pictures with more than 8 bits a channel are scaled, not clipped. Raises MediaError when the picture is missing or
    broken.
    """
    image = load_image(entry, image_dir, allow_remote)
    try:
        return to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a decoder may raise anything on bad bytes; the cause goes into the message
        reason = f"{_looks(image)}cannot be converted to RGB: {_reason(error)}; replace the file or remove the row"
        raise MediaError(reason) from error


@dataclass(frozen=True)
class ImageFacts:
    """Of a picture that was proven to decode: (width, height), upright, and whether more frames follow the first."""

    size: tuple[int, int]
    animated: bool = False


def image_facts(entry: Any, image_dir: str | None = None, allow_remote: bool = False) -> ImageFacts:
    """Raises MediaError like decode_image, but makes no RGB copy."""
    image = load_image(entry, image_dir, allow_remote)
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception as error:
        text = f"{_looks(image)}its EXIF data are broken: {_reason(error)}; strip them or remove the row"
        raise MediaError(text) from error
    size = (image.height, image.width) if orientation in (5, 6, 7, 8) else image.size
    return ImageFacts(size, image.format in ANIMATED_FORMATS and image.is_animated)


def image_size(entry: Any, image_dir: str | None = None, allow_remote: bool = False) -> tuple[int, int]:
    """(width, height), upright, of a picture that was proven to decode. Raises MediaError."""
    return image_facts(entry, image_dir, allow_remote).size


def load_image(entry: Any, image_dir: str | None = None, allow_remote: bool = False) -> Image.Image:
    """Opens one picture and reads all pixels of its first frame, in whatever mode it is stored. Raises MediaError."""
    source = read_entry(entry, image_dir, allow_remote)
    name = f"{source}: " if isinstance(source, Path) else ""
    image = None
    try:
        image = source if isinstance(source, Image.Image) else Image.open(_openable(source))
        check_size(*image.size)
        image.load()
    except MediaError as error:
        raise MediaError(f"{name}{_looks(image)}{error}") from None
    except Exception as error:  # Pillow's decoders raise OSError, ValueError, SyntaxError, struct.error ...
        text = f"{name}{_looks(image)}cannot be decoded: {_reason(error)}; replace the file or remove the row"
        raise MediaError(text) from error
    return image


def _openable(source: bytes | Path) -> io.BytesIO | Path:
    return source if isinstance(source, Path) else io.BytesIO(source)


def check_size(width: int, height: int) -> None:
    """Raises MediaError for what must not be decoded: no pixel at all, a line, or a claim of more than Pillow's limit
    against decompression bombs."""
    _check_shape(width, height)
    if width * height > Image.MAX_IMAGE_PIXELS:
        raise MediaError(
            f"its size is {width}x{height}, more than the {Image.MAX_IMAGE_PIXELS} pixels that are decoded (small "
            "files can claim any size); shrink it or remove the row"
        )


def _looks(image: Image.Image | None) -> str:
    """What is known of a picture at fault."""
    if image is None or image.format is None:
        return ""
    return f"({image.format}, {image.width}x{image.height}) "


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return type(error).__name__ if not text or "BytesIO" in text else f"{type(error).__name__}: {text[:200]}"


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB. Transparency is composited on white; 16-bit, 32-bit and float pictures are scaled to 8 bits."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image)
        grey, transparent = _to_8_bit(values), image.info.get("transparency")
        if transparent is not None:
            grey[values == transparent] = 255
        return Image.fromarray(grey).convert("RGB")
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
