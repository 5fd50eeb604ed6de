"""Every wrapping in which people keep a picture, what is said about one that cannot be used, and what is refused."""

import base64
import io
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from grpo_vlm.data import entries
from grpo_vlm.data.media import decode_image, image_facts
from grpo_vlm.data.rows import PromptBuilder
from grpo_vlm.errors import DataError, MediaError

IMAGES = Path(__file__).parent / "images"
HOPPER = (IMAGES / "hopper.jpg").read_bytes()
TEXT = base64.b64encode(HOPPER).decode()
RED = Image.new("RGB", (90, 60), "red")


@pytest.fixture(scope="module")
def server():
    """Address of a server of the pictures on this machine."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(IMAGES))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


WRAPPED = {
    "bytes": HOPPER,
    "bytearray": bytearray(HOPPER),
    "struct": {"bytes": HOPPER, "path": "not_there.jpg"},
    "struct_path": {"bytes": None, "path": str(IMAGES / "hopper.jpg")},
    "struct_base64": {"bytes": TEXT},
    "path": IMAGES / "hopper.jpg",
    "path_text": str(IMAGES / "hopper.jpg"),
    "file_uri": (IMAGES / "hopper.jpg").as_uri(),
    "base64": TEXT,
    "base64_lines": base64.encodebytes(HOPPER).decode(),
    "data_uri": f"data:image/jpeg;base64,{TEXT}",
    "openai": {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{TEXT}", "detail": "low"}},
    "qwen": {"type": "image", "image": str(IMAGES / "hopper.jpg")},
    "pil": Image.open(io.BytesIO(HOPPER)),
}


@pytest.mark.parametrize("form", WRAPPED)
def test_every_wrapping_gives_the_same_pixels(form):
    assert decode_image(WRAPPED[form]).tobytes() == decode_image(HOPPER).tobytes()
    assert entries.source_key(WRAPPED[form]) == entries.source_key(WRAPPED[form])


def test_addresses_of_stores_are_read_and_links_only_when_allowed(server, monkeypatch):
    with fsspec.open("memory://pictures/a.jpg", "wb") as file:
        file.write(HOPPER)
    assert decode_image("memory://pictures/a.jpg").size == (128, 128)
    link = f"{server}/hopper.jpg"
    with pytest.raises(DataError, match=r"is a link, .* unless data\.allow_remote_media=true"):
        decode_image(link)
    assert decode_image(link, allow_remote=True).tobytes() == decode_image(HOPPER).tobytes()
    with pytest.raises(MediaError, match=r"nothing\.jpg' cannot be fetched: 404"):
        decode_image(f"{server}/nothing.jpg", allow_remote=True)
    monkeypatch.setattr(entries, "MAX_REMOTE_BYTES", 1000)
    for address in (link, "memory://pictures/a.jpg"):
        with pytest.raises(MediaError, match="has more than 1000 bytes"):
            decode_image(address, allow_remote=True)


def row(*pictures, **columns):
    return {"problem": "<image>" * len(pictures) + "What?", "images": list(pictures), "answer": "a"} | columns


FAULTS = [
    ("broken_stream.png", r"\(PNG, 128x128\) cannot be decoded"),
    ("truncated.png", r"\(PNG, 640x480\) cannot be decoded: OSError: image file is truncated"),
    ("svg_named.png", "cannot be decoded: UnidentifiedImageError"),
    ("wide_65793to1_bomb_warning.bmp", r"\(BMP, 3158064x48\) its size is 3158064x48: aspect ratio 65793.0"),
    ("bomb_3000000x2000000.bmp", "cannot be decoded: DecompressionBombError: Image size .6000000000000 pixels"),
    ("nowhere.png", r"nowhere\.png does not exist; check the path or data\.image_dir"),
]


@pytest.mark.parametrize(("file", "message"), FAULTS)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_fault_names_row_column_index_format_and_size(processor, data_config, file, message):
    builder = PromptBuilder(data_config(image_dir=str(IMAGES)), processor)
    for read in (builder.build, builder.picture_sizes):
        with pytest.raises(MediaError, match=f"rows:3: column 'images', picture 1: .*{message}"):
            read(row(RED, file), "rows:3")


def test_a_picture_below_pillows_limit_for_errors_is_refused_too(tmp_path):
    Image.new("1", (12000, 8000)).save(tmp_path / "large.png")
    with (
        pytest.warns(Image.DecompressionBombWarning),
        pytest.raises(MediaError, match=r"\(PNG, 12000x8000\) its size is 12000x8000, more than the \d+ pixels"),
    ):
        image_facts(str(tmp_path / "large.png"))


@pytest.mark.parametrize("cell", ["hopper.jpg", ["hopper.jpg"], '["hopper.jpg"]', {"path": "hopper.jpg"}])
def test_a_cell_may_be_one_entry_a_list_or_json_text(processor, data_config, cell):
    builder = PromptBuilder(data_config(image_dir=str(IMAGES)), processor)
    prompt = builder.build({"problem": "<image>?", "images": cell, "answer": "a"}, "r:0")
    assert len(prompt.images) == 1


@pytest.mark.parametrize("cell", [None, "", "[]", [], [None], float("nan")])
def test_an_empty_cell_is_a_row_of_text(processor, data_config, cell):
    prompt = PromptBuilder(data_config(), processor).build({"problem": "?", "images": cell, "answer": "a"}, "r:0")
    assert prompt.images == [] and prompt.image_grid_thw is None


ANIMATED = ["animated.gif", "animated.webp", "animated_31.gif", "animated_97.webp", "multipage.tiff"]


@pytest.mark.parametrize("file", [*ANIMATED, "mpo.jpg", "hopper.png", "hopper.webp", "transparent.png"])
def test_moving_pictures_are_told_from_others(file):
    assert image_facts(str(IMAGES / file)).animated == (file in ANIMATED)


def test_rows_with_moving_pictures_are_counted_and_show_the_first_frame(processor, data_config):
    builder = PromptBuilder(data_config(image_dir=str(IMAGES)), processor)
    for number, file in enumerate(["animated.gif", "hopper.jpg", "animated_31.gif"]):
        builder.picture_sizes(row(file), f"rows:{number}")
    assert builder.animated == {"rows:0", "rows:2"}
    frames = [Image.new("RGB", (60, 60), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        assert np.abs(np.asarray(decode_image(file.getvalue())).mean((0, 1)) - (255, 0, 0)).max() < 4


def test_pictures_are_turned_upright():
    """The files hold the same photograph in eight bits, mirrored, and on its side."""
    upright = np.asarray(Image.open(IMAGES / "hopper.png")).astype(int)
    for file in ("exif_orientation_2.jpg", "exif_orientation_8.webp"):
        found, stored = (
            np.asarray(made).astype(int) for made in (decode_image(IMAGES / file), Image.open(IMAGES / file))
        )
        assert np.abs(found - upright).mean() < 6 < np.abs(stored - upright).mean()


def test_16_bit_pictures_keep_their_greys():
    """Scaled to eight bits: not white as naive conversion makes them, and in proportion."""
    stored = np.asarray(Image.open(IMAGES / "gray16.tif")).astype(float)
    found = np.asarray(decode_image(IMAGES / "gray16.tif"))[..., 0].astype(float)
    assert abs(found.mean() - stored.mean() / 4) < 2  # ten bits are used
    assert np.abs(found - stored / 4).max() <= 1
    values = np.array([[0, 1000], [20000, 65535]], dtype=np.uint16)
    keyed = Image.fromarray(values)
    keyed.info["transparency"] = 1000
    assert np.asarray(decode_image(keyed))[..., 0].tolist() == [[0, 255], [78, 255]]


def test_parquet_structs_with_and_without_paths_all_decode(processor, data_config, tmp_path):
    """list<struct>, struct, and paths that are None: three rows in, three rows out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from grpo_vlm.data import PromptDataset

    cells = [
        {"bytes": HOPPER, "path": None},
        {"bytes": HOPPER, "path": "x.jpg"},
        {"bytes": None, "path": "hopper.jpg"},
    ]
    for name, column in (("struct", cells), ("list", [[cell] for cell in cells])):
        table = pa.table({"problem": ["<image>?"] * 3, "images": column, "answer": ["a"] * 3})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        made = PromptDataset(str(tmp_path / f"{name}.parquet"), data_config(image_dir=str(IMAGES)), processor)
        assert len(made.validate().kept) == 3 and len({prompt.image_keys for prompt in made}) == 1


def test_faults_of_text_are_not_faults_of_media(processor, data_config):
    builder = PromptBuilder(data_config(), processor)
    with pytest.raises(DataError) as found:
        builder.build(row(RED) | {"problem": "no mark"}, "r:0")
    assert not isinstance(found.value, MediaError)
