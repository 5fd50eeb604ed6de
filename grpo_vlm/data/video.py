"""Videos: which frames are shown, how large, and when: the sampling rule of qwen-vl-utils on frames that PyAV decodes.

The number of frames comes from decoding, since headers of webm and mkv files say 0 and others lie. Frames are turned
upright, put on white where they are transparent, and resized one by one, so that a long clip never lies in memory at
its own size.
Errors are MediaErrors about one video; the caller adds row and column.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from qwen_vl_utils import vision_process
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from grpo_vlm.data.entries import inside, read_entry
from grpo_vlm.data.media import check_size, decode_image, image_size, to_rgb
from grpo_vlm.errors import DataError, MediaError

FRAME_FACTOR = vision_process.FRAME_FACTOR  # frames come in multiples of this
MOST_FPS = 1000  # data.video_fps has the same bound
RULE_KEYS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels")
OTHER_KEYS = ("nframes", "video_start", "video_end", "sample_fps", "type")


@dataclass(frozen=True)
class VideoRule:
    """What is shown of a video. Pixels are of one frame, but total_pixels, which the frames share.

    fps: frames taken per second; min_frames, max_frames: bounds of their number. None: qwen-vl-utils' own.
    factor: pixels per side of a token; temporal: frames of one grid step.
    """

    fps: float
    min_frames: int
    max_frames: int
    min_pixels: int
    max_pixels: int
    total_pixels: int | None
    factor: int
    temporal: int

    @classmethod
    def of(cls, video_processor: Any, data_config: Any) -> "VideoRule":
        """The `data` section's keys with the sizes of a Qwen-VL video processor. Frames follow the pictures' bounds
        unless they have their own."""
        return cls(
            fps=data_config.video_fps,
            min_frames=data_config.video_min_frames,
            max_frames=data_config.video_max_frames,
            min_pixels=data_config.video_min_pixels or data_config.min_pixels,
            max_pixels=data_config.video_max_pixels or data_config.max_pixels,
            total_pixels=data_config.video_total_pixels,
            factor=video_processor.patch_size * video_processor.merge_size,
            temporal=video_processor.temporal_patch_size,
        )

    def target(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """(width, height) of each frame: qwen-vl-utils' rule, the frames' share of total_pixels included."""
        total = self.total_pixels or vision_process.MODEL_SEQ_LEN * self.factor**2 * 0.9
        most = min(vision_process.VIDEO_MAX_TOKEN_NUM * self.factor**2, total / frames * FRAME_FACTOR)
        most = min(self.max_pixels, max(most, int(self.min_pixels * 1.05)))
        if most < self.min_pixels:
            raise MediaError(f"max_pixels={most:.0f} of a frame is below min_pixels={self.min_pixels}; change one")
        tall, wide = vision_process.smart_resize(height, width, self.factor, self.min_pixels, most)
        return wide, tall


@dataclass(frozen=True)
class ClipShape:
    """What is shown of one video, known without its pixels.

    indices: of the frames taken, even in number. fps and total: of the whole video, counted in decoding.
    size: (width, height) of the frames as shown.
    """

    indices: tuple[int, ...]
    fps: float
    total: int
    size: tuple[int, int]

    @property
    def shown_fps(self) -> float:
        """Frames taken per second of video."""
        return len(self.indices) / self.total * self.fps


@dataclass(frozen=True)
class _Asked:
    """An entry taken apart: where its bytes or frames are, its rule and what else it says."""

    source: Any
    rule: VideoRule
    other: dict[str, Any]


def clip_shape(entry: Any, rule: VideoRule, folder: str | None = None, allow_remote: bool = False) -> ClipShape:
    """What is shown of an entry of a video column; decodes it once, to count its frames.

    entry: whatever `read_entry` takes, a list of still pictures, or a mapping {"video": one of these} with any of
    fps, min_frames, max_frames, nframes, min_pixels, max_pixels, total_pixels, video_start, video_end (seconds) and,
    for a list of frames, sample_fps, which come before the configuration. Raises MediaError.
    """
    return _shape(_asked(entry, rule), folder, allow_remote)


def read_clip(
    entry: Any, rule: VideoRule, folder: str | None = None, allow_remote: bool = False
) -> tuple[np.ndarray, ClipShape]:
    """uint8 [frames, height, width, 3] and their shape; `entry` as in clip_shape. Raises MediaError."""
    asked = _asked(entry, rule)
    shape = _shape(asked, folder, allow_remote)
    if isinstance(asked.source, list):
        pictures = [decode_image(asked.source[index], folder, allow_remote) for index in shape.indices]
        frames = [_resized(np.asarray(picture), shape.size) for picture in pictures]
    else:
        frames = _taken(_source(asked.source, folder, allow_remote), shape)
    return np.stack(frames), shape


def _asked(entry: Any, rule: VideoRule) -> _Asked:
    if not isinstance(entry, Mapping):
        return _Asked(list(entry) if isinstance(entry, (list, tuple)) else entry, rule, {})
    filled = {key: value for key, value in entry.items() if value is not None}
    source = inside(entry)
    if source is None:
        raise MediaError(f"it needs 'video', 'path' or 'bytes', this one has keys {sorted(entry)}; fill one")
    known = (*RULE_KEYS, *OTHER_KEYS, "video", "video_url", "path", "bytes", "url")
    if unknown := sorted(set(filled) - set(known)):
        raise MediaError(f"it has the keys {', '.join(unknown)}, which are not known; known: {', '.join(known)}")
    own = {key: filled[key] for key in RULE_KEYS if key in filled}
    other = {key: filled[key] for key in OTHER_KEYS if key in filled}
    for key, value in {**own, **{key: other[key] for key in OTHER_KEYS if key in other and key != "type"}}.items():
        least = 2 if key in ("min_frames", "max_frames") else 0
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least or (value == 0 and key != "video_start"):
            wanted = f"of at least {least}" if least else "above 0"
            raise MediaError(f"its {key} is {value!r}; it must be a number {wanted}")
        if key in ("fps", "sample_fps") and value > MOST_FPS:
            raise MediaError(f"its {key} is {value!r}; it must be at most {MOST_FPS}")
    if "fps" in own and "nframes" in other:
        raise MediaError("it has both fps and nframes; keep one")
    rule = replace(rule, **own)
    if rule.min_frames > rule.max_frames:
        raise MediaError(
            f"its min_frames of {rule.min_frames} are more than its max_frames of {rule.max_frames} (what it does not "
            "say is data.video_min_frames or data.video_max_frames); change one"
        )
    return _Asked(list(source) if isinstance(source, (list, tuple)) else source, rule, other)


def _shape(asked: _Asked, folder: str | None, allow_remote: bool) -> ClipShape:
    if isinstance(asked.source, list):
        return _listed_shape(asked, folder, allow_remote)
    total, fps, (width, height) = _counted(_source(asked.source, folder, allow_remote))
    limits = {key: asked.other[key] for key in ("video_start", "video_end") if key in asked.other}
    try:
        first, last, count = vision_process.calculate_video_frame_range(limits, total, fps)
        indices = _sampled(asked, first, last, count, fps)
        return ClipShape(indices, fps, total, asked.rule.target(len(indices), width, height))
    except ValueError as error:
        raise MediaError(f"({width}x{height}, {total} frames at {fps:.4g} a second) {error}; change it") from None


def _sampled(asked: _Asked, first: int, last: int, count: int, fps: float) -> tuple[int, ...]:
    """Numbers of the frames taken, spread evenly; a single frame is shown twice."""
    if count < FRAME_FACTOR:
        return (first,) * FRAME_FACTOR
    rule = asked.rule
    wanted = (
        {"nframes": asked.other["nframes"]}
        if "nframes" in asked.other
        else {"fps": rule.fps, "min_frames": rule.min_frames, "max_frames": min(rule.max_frames, count)}
    )
    frames = vision_process.smart_nframes(wanted, total_frames=count, video_fps=fps)
    return tuple(torch.linspace(first, last, frames).round().long().tolist())


def _listed_shape(asked: _Asked, folder: str | None, allow_remote: bool) -> ClipShape:
    """Still pictures are the frames themselves, taken at sample_fps; above max_frames some are left out."""
    if not asked.source:
        raise MediaError("its list of frames is empty; remove the row")
    sizes = {image_size(frame, folder, allow_remote) for frame in asked.source}
    if len(sizes) > 1:
        raise MediaError(f"its frames have the sizes {sorted(sizes)}; make them equal")
    count, fps = len(asked.source), float(asked.other.get("sample_fps", asked.rule.fps))
    most = asked.rule.max_frames // FRAME_FACTOR * FRAME_FACTOR
    indices = list(range(count))
    if count > most:
        indices = torch.linspace(0, count - 1, most).round().long().tolist()
    indices += indices[-1:] * (-len(indices) % FRAME_FACTOR)
    return ClipShape(tuple(indices), fps, max(count, len(indices)), asked.rule.target(len(indices), *sizes.pop()))


def _source(entry: Any, folder: str | None, allow_remote: bool) -> Path | bytes:
    source = read_entry(entry, folder, allow_remote)
    if isinstance(source, Image.Image):
        raise MediaError("it is a single picture; give a file, bytes or the list of its frames")
    return source


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[Any, Any]]:
    """The container and its video stream. Raises DataError without PyAV, and MediaError, also for what fails inside
    the block."""
    try:
        import av
    except ImportError:
        raise DataError("reading videos needs PyAV; install it: pip install 'grpo-vlm[video]'") from None
    name = f"{source}: " if isinstance(source, Path) else ""
    try:
        with av.open(str(source) if isinstance(source, Path) else io.BytesIO(source)) as container:
            if not container.streams.video:
                raise MediaError(f"{name}the file has no video, only {len(container.streams)} other streams")
            stream = container.streams.video[0]
            check_size(stream.width, stream.height)
            stream.thread_type = "AUTO"
            yield container, stream
    except MediaError as error:
        raise MediaError(f"{name}{error}") from None
    except (av.error.FFmpegError, ValueError) as error:
        text = " ".join(str(error).split())[:200]
        raise MediaError(f"{name}cannot be decoded: {type(error).__name__}: {text}; replace the file") from error


def _counted(source: Path | bytes) -> tuple[int, float, tuple[int, int]]:
    """Frames, frames per second and upright (width, height) of a whole video."""
    total, first, last, size = 0, None, None, (0, 0)
    with _opened(source) as (container, stream):
        for frame in container.decode(stream):
            if total == 0:
                size = (frame.width, frame.height) if frame.rotation % 180 == 0 else (frame.height, frame.width)
            total, last = total + 1, frame.time
            first = last if first is None else first
        if total == 0:
            raise MediaError("it has no frame that can be decoded; replace the file")
        rate = stream.average_rate
        if rate is None and last is not None and last > first:  # a header without a rate
            rate = (total - 1) / (last - first)
    return total, float(rate or 1), size


def _taken(source: Path | bytes, shape: ClipShape) -> list[np.ndarray]:
    """The frames of these indices, as they are shown."""
    wanted, taken = set(shape.indices), {}
    with _opened(source) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number in wanted:
                taken[number] = _resized(_upright(frame), shape.size)
            if len(taken) == len(wanted):
                break
    return [taken[index] for index in shape.indices]


def _upright(frame: Any) -> np.ndarray:
    """uint8 [height, width, 3] of a decoded frame."""
    if any(component.is_alpha for component in frame.format.components):
        pixels = np.asarray(to_rgb(Image.fromarray(frame.to_ndarray(format="rgba"), "RGBA")))
    else:
        pixels = frame.to_ndarray(format="rgb24")
    return np.rot90(pixels, round(frame.rotation / 90))


def _resized(pixels: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """uint8 [height, width, 3] at (width, height), as qwen-vl-utils resizes frames."""
    width, height = size
    if pixels.shape[:2] == (height, width):
        return pixels
    frame = torch.from_numpy(pixels.copy()).permute(2, 0, 1)  # torch warns of arrays that are not writable
    made = resize(frame, [height, width], interpolation=InterpolationMode.BICUBIC, antialias=True)
    return made.permute(1, 2, 0).contiguous().numpy()
