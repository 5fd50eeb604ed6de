"""Positions of prompts with videos: vLLM's own rule, and transformers' where that one is right."""

from types import SimpleNamespace

import pytest
import torch

from grpo_vlm.model.packed import prompt_positions
from tests.model.cases import END, IMAGE_TOKEN, KINDS, START, VIDEO_TOKEN, tiny

WIDE, LONG, IMAGE = (2, 4, 12), (9, 4, 6), (1, 8, 6)


def prompt(*media):
    """Token ids, with a few words around each of the media ("image" or "video", grid)."""
    ids = [11, 12]
    for kind, (t, h, w) in media:
        token = IMAGE_TOKEN if kind == "image" else VIDEO_TOKEN
        ids += [START, *[token] * (t * h * w // 4), END, 13]
    return [*ids, 14, 15]


def grids(kind, media):
    found = [grid for name, grid in media if name == kind]
    return torch.tensor(found) if found else None


MIXES = [
    ([("video", LONG)], [0.48]),
    ([("video", LONG), ("image", IMAGE), ("video", WIDE)], [1.5, 1.0]),
    ([("image", IMAGE), ("video", LONG)], [2.5]),
    ([("video", WIDE)], [1.0]),
]


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("media", "seconds"), MIXES)
def test_positions_are_vllms(kind, media, seconds):
    qwen2_vl = pytest.importorskip("vllm.model_executor.models.qwen2_vl")
    qwen2_5_vl = pytest.importorskip("vllm.model_executor.models.qwen2_5_vl")
    model, ids = tiny(kind), prompt(*media)
    features, used, times = [], 0, iter(seconds)
    for name, grid in media:
        used = ids.index(START, used) + 1
        data = {f"{name}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
        if name == "video" and kind == "qwen2_5_vl":  # Qwen2-VL's processor gives no times
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(next(times)))
        features.append(SimpleNamespace(modality=name, data=data, mm_position=SimpleNamespace(offset=used)))
    theirs = {
        "qwen2_vl": qwen2_vl.Qwen2VLForConditionalGeneration,
        "qwen2_5_vl": qwen2_5_vl.Qwen2_5_VLForConditionalGeneration,
    }[kind]
    served = SimpleNamespace(config=model.config)
    served.iter_mm_grid_thw = lambda features: theirs.iter_mm_grid_thw(served, features)
    expected, _ = theirs.get_mrope_input_positions(served, ids, features)
    found = prompt_positions(
        model, ids, image_grids=grids("image", media), video_grids=grids("video", media), seconds_per_grid=seconds
    )
    assert torch.equal(found, expected)
    assert (found[:, 1:].amax(0) >= found[:, :-1].amin(0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_video_of_whole_seconds_is_placed_as_transformers_does(kind):
    model = tiny(kind)
    media = [("image", IMAGE), ("video", WIDE)] if kind != "qwen3_vl" else [("image", IMAGE), ("video", (1, 4, 12))]
    ids = torch.tensor(prompt(*media))
    types = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    images, videos = grids("image", media), grids("video", media)
    expected, _ = model.model.get_rope_index(
        ids[None], mm_token_type_ids=types[None], image_grid_thw=images, video_grid_thw=videos
    )
    assert torch.equal(prompt_positions(model, ids.tolist(), image_grids=images, video_grids=videos), expected[:, 0])
