"""The pictures of one rollout step: each distinct one is decoded and processed once, however many prompts show it."""

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image

from grpo_vlm.data.media import SizeRule, decode_image, resize_image, source_key


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


class Pictures:
    """What has been made so far. Keep it no longer than a step: it holds every picture that was asked for."""

    def __init__(self, image_processor: Any, size_rule: SizeRule, image_dir: str | None):
        self.image_processor, self.size_rule, self.image_dir = image_processor, size_rule, image_dir
        self._by_source: dict[Hashable, tuple[Any, Picture]] = {}  # with the entry, whose id may be the key
        self._by_content: dict[str, Picture] = {}

    def get(self, entry: Any) -> Picture:
        """The picture of one entry of an image column. Raises DataError about the picture."""
        source = source_key(entry, self.image_dir)
        if source not in self._by_source:
            image = decode_image(entry, self.image_dir)
            image = resize_image(image, self.size_rule.target(*image.size))
            self._by_source[source] = entry, self._processed(image)
        return self._by_source[source][1]

    def _processed(self, image: Image.Image) -> Picture:
        key = hashlib.blake2b(b"%d %d " % image.size + image.tobytes(), digest_size=16).hexdigest()
        if key not in self._by_content:
            made = self.image_processor(images=[image], return_tensors="pt")
            self._by_content[key] = Picture(key, image, made["pixel_values"], made["image_grid_thw"][0])
        return self._by_content[key]
