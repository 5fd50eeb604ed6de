"""The pictures and videos of one rollout step: each distinct one is decoded and processed once, however many prompts
show it."""

import hashlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata

from grpo_vlm.data.entries import source_key
from grpo_vlm.data.media import SizeRule, decode_image, resize_image
from grpo_vlm.data.video import ClipShape, VideoRule, read_clip


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture as the model takes it.

    key: hash of its size and pixels, equal for equal pictures. image: RGB, at a size that the processor leaves
    unchanged. pixels: float32 [patches, patch_dim]. grid: int64 [3], patches along time, height and width.
    """

    key: str
    image: Image.Image
    pixels: torch.Tensor
    grid: torch.Tensor


@dataclass(frozen=True, eq=False)
class Clip:
    """One video as the model takes it.

    key: hash of its frames and their times. frames: uint8 [frames, height, width, 3], as the processor gets them.
    shape: which frames of how many, at what rate. pixels: float32 [patches, patch_dim]. grid: int64 [3].
    seconds_per_grid: how long one step along time lasts.
    """

    key: str
    frames: np.ndarray
    shape: ClipShape
    pixels: torch.Tensor
    grid: torch.Tensor
    seconds_per_grid: float


@dataclass(frozen=True)
class MediaSettings:
    """How media are read: the processor, the size rules, the folder of relative paths, whether links are followed."""

    processor: Any
    images: SizeRule
    videos: VideoRule
    folder: str | None
    allow_remote: bool

    @classmethod
    def of(cls, processor: Any, data_config: Any) -> "MediaSettings":
        """From the `data` section."""
        return cls(
            processor=processor,
            images=SizeRule.of(processor.image_processor, data_config.min_pixels, data_config.max_pixels),
            videos=VideoRule.of(processor.video_processor, data_config),
            folder=data_config.image_dir,
            allow_remote=data_config.allow_remote_media,
        )


@dataclass
class _Store:
    """What has been made of one kind of media."""

    by_source: dict[Hashable, tuple[Any, Any]] = field(default_factory=dict)  # with the entry, whose id may be the key
    by_content: dict[str, Any] = field(default_factory=dict)

    def get(self, source: Hashable, entry: Any, make: Callable[[Any], Any]) -> Any:
        if source not in self.by_source:
            self.by_source[source] = entry, make(entry)
        return self.by_source[source][1]


class Pictures:
    """What has been made so far. Keep it no longer than a step: it holds every picture that was asked for."""

    def __init__(self, settings: MediaSettings):
        self.settings = settings
        self._pictures, self._clips = _Store(), _Store()

    def get(self, entry: Any) -> Picture:
        """The picture of one entry of an image column. Raises MediaError about the picture."""
        return self._pictures.get(source_key(entry, self.settings.folder), entry, self._picture)

    def clip(self, entry: Any) -> Clip:
        """The video of one entry of a video column. Raises MediaError about the video."""
        own = repr(sorted((k, v) for k, v in entry.items() if not _is_media(v))) if isinstance(entry, Mapping) else ""
        return self._clips.get((own, source_key(entry, self.settings.folder)), entry, self._clip)

    def _picture(self, entry: Any) -> Picture:
        image = decode_image(entry, self.settings.folder, self.settings.allow_remote)
        image = resize_image(image, self.settings.images.target(*image.size))
        key = hashlib.blake2b(b"%d %d " % image.size + image.tobytes(), digest_size=16).hexdigest()
        if key not in self._pictures.by_content:
            made = self.settings.processor.image_processor(images=[image], return_tensors="pt")
            self._pictures.by_content[key] = Picture(key, image, made["pixel_values"], made["image_grid_thw"][0])
        return self._pictures.by_content[key]

    def _clip(self, entry: Any) -> Clip:
        settings = self.settings
        frames, shape = read_clip(entry, settings.videos, settings.folder, settings.allow_remote)
        digest = hashlib.blake2b(repr((frames.shape, shape)).encode(), digest_size=16)
        digest.update(frames.tobytes())
        key = digest.hexdigest()
        if key not in self._clips.by_content:
            processor = settings.processor.video_processor
            made = processor(
                videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)],
                video_metadata=[metadata(shape)],
                do_resize=False,
                do_sample_frames=False,
                cap_pixels_per_frame=False,  # sizes are video.py's
                return_tensors="pt",
            )
            seconds = settings.videos.temporal / shape.shown_fps
            pixels, grid = made["pixel_values_videos"], made["video_grid_thw"][0]
            self._clips.by_content[key] = Clip(key, frames, shape, pixels, grid, seconds)
        return self._clips.by_content[key]


def metadata(shape: ClipShape) -> VideoMetadata:
    """What a processor wants to know of frames that were taken before it got them."""
    return VideoMetadata(total_num_frames=shape.total, fps=shape.fps, frames_indices=list(shape.indices))


def _is_media(value: Any) -> bool:
    return not isinstance(value, (int, float, str, type(None)))
