"""Where the tokens of a prompt with videos stand: M-RoPE positions as Qwen2-VL and Qwen2.5-VL were trained with, and
as vLLM computes them.

transformers 5.17 differs in two ways for videos of these families: it cuts the seconds of a grid step to whole ones
(two steps a second all stand at one place), and goes on after a video by its height or width even when its time is
longer, so that later text stands before its end. Qwen3-VL's frames are apart, with their times as text, and need none
of this.

Shape legend: P prompt tokens.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from transformers import PretrainedConfig

OWN_FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def video_positions(
    config: PretrainedConfig,
    prompt_ids: Sequence[int],
    *,
    image_grids: Tensor | None,
    video_grids: Tensor,
    seconds_per_grid: Sequence[float] | None = None,
) -> Tensor:
    """int64 [3, P] (time, height, width) for the families of OWN_FAMILIES. Rule of Qwen2.5-VL (arXiv 2502.13923): a
    grid step of s seconds is s * tokens_per_second positions long; what follows starts after the largest position.

    image_grids, video_grids: int64 [items, 3]. seconds_per_grid: of each video; None: one second.
    """
    vision = config.vision_config
    # Qwen2-VL counts grid steps, not seconds.
    rate = vision.tokens_per_second if config.model_type == "qwen2_5_vl" else None
    seconds = [1.0] * len(video_grids) if seconds_per_grid is None else list(seconds_per_grid)
    steps = torch.tensor(seconds, dtype=torch.float32).tolist()  # float32: as vLLM gets them
    images = iter([(grid, 1.0) for grid in ([] if image_grids is None else image_grids.tolist())])
    factors = [1.0 if rate is None else step * rate for step in steps]
    videos = iter(zip(video_grids.tolist(), factors, strict=True))
    media = {config.image_token_id: images, config.video_token_id: videos}
    parts, start = [], 0
    for token, run in groupby(prompt_ids):
        left = len(list(run))
        while left:
            if token in media:
                (t, h, w), factor = next(media[token])
                axes = [torch.arange(n) for n in (t, h // vision.spatial_merge_size, w // vision.spatial_merge_size)]
                axes[0] = (axes[0].double() * factor).long()
                part = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
            else:
                part = torch.arange(left).expand(3, -1)
            parts.append(part + start)
            start = int(parts[-1].max()) + 1
            left -= part.shape[1]
    return torch.cat(parts, dim=1)
