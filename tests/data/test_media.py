"""Pictures: real awkward files load upright on white or are refused by name; the processor keeps our sizes."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageStat
from transformers import Qwen2VLImageProcessor

from grpo_vlm.data.entries import image_entries
from grpo_vlm.data.media import SizeRule, decode_image, image_size, resize_image
from grpo_vlm.errors import DataError, MediaError

IMAGES = Path(__file__).parent / "images"
MANIFEST = json.loads((IMAGES / "manifest.json").read_text())


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_real_files(entry):
    path = IMAGES / entry["file"]
    if entry["load"] != "ok":  # "either": we refuse it
        for function in (decode_image, image_size):
            with pytest.raises(MediaError, match=entry["file"]):
                function(str(path))
        return
    image = decode_image(str(path))
    assert image.mode == "RGB" and list(image.size) == entry["rgb_size"] == list(image_size(str(path)))
    if "white_mean" in entry:
        assert np.mean(ImageStat.Stat(image).mean) == pytest.approx(entry["white_mean"], abs=0.1)


def test_more_than_8_bits_are_scaled_not_clipped():
    image = np.asarray(decode_image(str(IMAGES / "gray16.tif")))
    assert image.max() > image.min() + 60 and (image == 255).mean() < 0.5
    full = Image.fromarray(np.array([[0, 65535], [32896, 257]], dtype=np.uint16))
    assert np.asarray(decode_image(full))[..., 0].tolist() == [[0, 255], [128, 1]]
    unit = Image.fromarray(np.array([[0.0, 1.0], [0.5, 0.25]], dtype=np.float32))
    assert np.asarray(decode_image(unit))[..., 0].tolist() == [[0, 255], [128, 64]]


def test_transparent_black_becomes_white_and_opaque_rgba_keeps_its_pixels():
    assert decode_image(Image.new("RGBA", (30, 30), (0, 0, 0, 0))).getpixel((3, 3)) == (255, 255, 255)
    assert decode_image(Image.new("RGBA", (30, 30), (9, 8, 7, 255))).getpixel((3, 3)) == (9, 8, 7)


def test_every_form_of_an_entry_gives_the_same_pixels(tmp_path):
    data = (IMAGES / "hopper.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(data)
    expected = decode_image(data).tobytes()
    for entry in ({"bytes": data, "path": None}, {"bytes": None, "path": "a.jpg"}, "a.jpg", Path("a.jpg")):
        assert decode_image(entry, str(tmp_path)).tobytes() == expected
    assert decode_image(Image.open(io.BytesIO(data))).tobytes() == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bytes": None, "path": None}, "neither is filled"),
        ("nothing_here.png", r"nothing_here\.png does not exist.*data\.image_dir"),
        (str(IMAGES), "is a folder"),
        ("/dev/null", "/dev/null is a device or a pipe, not a file; check the path"),
        ("", "the path is empty; give a path, or no entry"),
        ("s3://bucket/a.png", "reading s3:// needs another package: Install s3fs .*Run `pip install s3fs`"),
        ("nosuch://bucket/a.png", "nosuch:// is no kind of address that fsspec knows"),
        ("simplecache::https://example.com/a.png", "is a link, and links are not read unless data.allow_remote_media"),
        (b"", "cannot be decoded"),
        (b"plain text", "cannot be decoded: UnidentifiedImageError"),
        (3, "int is neither a picture nor a file"),
        ("https://example.com/a.png", "'https://example.com/a.png' is a link, .*data.allow_remote_media=true"),
        ("data:image/png;base64", "has no comma"),
        ("data:image/png;base64,aGVsbG8", "neither a file nor base64"),
        ("QUJD" * 20, "cannot be decoded: UnidentifiedImageError"),
        ("x y z, " * 60, "text of 420 characters, 'x y z, .* is neither a path nor base64"),
        ("memory://nowhere/a.png", "'memory://nowhere/a.png' cannot be read"),
    ],
)
def test_unusable_entries_say_what_is_wrong(entry, message):
    with pytest.raises(DataError, match=message):
        decode_image(entry)


def test_a_jpeg_cut_in_half_is_refused():
    data = (IMAGES / "hopper.jpg").read_bytes()
    with pytest.raises(DataError, match="truncated"):
        image_size(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("a.png", ["a.png"]),
        ('["a.png", "b.png"]', ["a.png", "b.png"]),
        (("a.png",), ["a.png"]),
        ({"bytes": b"x", "path": None}, [{"bytes": b"x", "path": None}]),
        (b"x", [b"x"]),
    ],
)
def test_cells_become_lists(cell, expected):
    assert image_entries(cell) == expected


PROCESSORS = {
    28: Qwen2VLImageProcessor(patch_size=14, size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}),
    32: Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64}),
}
SIZES = [
    (1, 1),
    (16, 16),
    (28, 28),
    (332, 27),
    (27, 257),
    (31, 31),
    (320, 320),
    (5600, 28),
    (1999, 30),
    (1344, 1344),
    (900, 7),
]


@pytest.mark.parametrize("factor", PROCESSORS)
@pytest.mark.parametrize("bounds", [(None, None), (262144, 4194304), (1, 50176)])
def test_the_processor_keeps_the_target_size(factor, bounds):
    processor = PROCESSORS[factor]
    rule = SizeRule.of(processor, *bounds)
    assert rule.factor == factor
    for size in SIZES:
        target = rule.target(*size)
        image = resize_image(Image.new("RGB", size), target)
        grid = processor(images=[image], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert grid == [1, target[1] * 2 // factor, target[0] * 2 // factor]
        assert rule.tokens(*size) == rule.final_tokens(*target) == grid[1] * grid[2] // 4


def test_a_bound_too_small_for_the_shape_is_an_error():
    with pytest.raises(DataError, match=r"data\.max_pixels=100 leaves it 122x0 pixels; raise it"):
        SizeRule.of(PROCESSORS[28], None, 100).target(4500, 30)


def test_token_counts_follow_the_patch_size():
    wide = {"shortest_edge": 1, "longest_edge": 10**7}
    counts = {
        p: SizeRule.of(Qwen2VLImageProcessor(patch_size=p, size=wide), None, None).tokens(320, 320) for p in (14, 16)
    }
    assert counts == {14: 121, 16: 100}


def test_bounds_of_the_configuration_come_first_max_then_min():
    rule = SizeRule(None, 100 * 100, 1, 1, 1, 10**9)
    assert rule.target(400, 200) == (int(400 * 0.125**0.5), int(200 * 0.125**0.5))
    rule = SizeRule(200 * 200, None, 1, 1, 1, 10**9)
    assert rule.target(50, 100) == (int(50 * 8**0.5), int(100 * 8**0.5))


@pytest.mark.parametrize("size", [(6372, 28), (28, 5601), (0, 5)])
def test_impossible_shapes_name_the_size(size):
    with pytest.raises(DataError, match=f"{size[0]}x{size[1]}"):
        SizeRule.of(PROCESSORS[28], None, None).target(*size)
