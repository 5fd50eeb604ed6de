"""A picture that several prompts of a step show is decoded, processed and stored once."""

import io

import pytest
import torch
from PIL import Image

from grpo_vlm.data import PromptDataset, pictures
from grpo_vlm.data.entries import source_key


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


NOISE = [png(Image.effect_noise((70 + 20 * i, 90), 60).convert("RGB")) for i in range(3)]


@pytest.fixture
def counted(monkeypatch, processor):
    """How many pictures were decoded and processed: {"decodes": n, "processed": n}."""
    counts = {"decodes": 0, "processed": 0}
    decode, process = pictures.decode_image, type(processor.image_processor)._preprocess

    def counting_decode(*args):
        counts["decodes"] += 1
        return decode(*args)

    def counting_process(self, images, **kwargs):
        counts["processed"] += len(images)
        return process(self, images, **kwargs)

    monkeypatch.setattr(pictures, "decode_image", counting_decode)
    monkeypatch.setattr(type(processor.image_processor), "_preprocess", counting_process)
    return counts


def rows(*shown):
    """One row for each list of pictures."""
    return [{"problem": "<image>" * len(entries) + "?", "images": entries, "answer": "a"} for entries in shown]


def test_a_picture_of_several_rows_is_decoded_and_processed_once(processor, data_config, counted, tmp_path):
    (tmp_path / "a.png").write_bytes(NOISE[2])
    loaded = Image.open(io.BytesIO(NOISE[2]))
    table = rows(
        [NOISE[0]],
        [{"bytes": NOISE[0], "path": "x"}],
        [NOISE[1], NOISE[0], NOISE[1]],
        ["a.png"],
        [{"bytes": None, "path": "a.png"}, tmp_path / "a.png"],
        [loaded],
        [loaded],
        [],
    )
    prompts = PromptDataset(table, data_config(image_dir=str(tmp_path)), processor).prompts(range(8))
    # the third picture stands in a file and in an object: opened as each, processed once
    assert counted == {"decodes": 4, "processed": 3}
    shown = [key for prompt in prompts for key in prompt.image_keys]
    first, second, third = prompts[0].image_keys[0], prompts[2].image_keys[0], prompts[3].image_keys[0]
    assert shown == [first, first, second, first, second, third, third, third, third, third]
    assert len({first, second, third}) == 3
    stored = {
        (key, pixels.data_ptr())
        for prompt in prompts
        for key, pixels in zip(prompt.image_keys, prompt.pixels, strict=True)
    }
    assert len(stored) == 3
    assert prompts[0].pixel_values.data_ptr() == prompts[1].pixels[0].data_ptr()
    assert prompts[7].image_keys == () == prompts[7].pixels and prompts[7].pixel_values is None


def test_a_next_step_starts_afresh(processor, data_config, counted):
    prompts = PromptDataset(rows([NOISE[0]]), data_config(), processor)
    first, second = prompts.prompts([0]), prompts.prompts([0])
    assert counted == {"decodes": 2, "processed": 2} and first[0].image_keys == second[0].image_keys


def test_pictures_made_together_are_those_made_alone(processor, data_config):
    table = rows([NOISE[0]], [NOISE[1], NOISE[0]], [NOISE[2]])
    prompts = PromptDataset(table, data_config(), processor)
    for alone, together in zip(prompts, prompts.prompts(range(3)), strict=True):
        assert alone.token_ids == together.token_ids and alone.image_keys == together.image_keys
        assert torch.equal(alone.pixel_values, together.pixel_values)
        assert torch.equal(alone.image_grid_thw, together.image_grid_thw)
    both = processor.image_processor(images=prompts[1].images, return_tensors="pt")
    assert torch.equal(both["pixel_values"], prompts[1].pixel_values)


def test_the_key_follows_what_the_model_sees(processor, data_config):
    turned = png(Image.open(io.BytesIO(NOISE[0])).transpose(Image.Transpose.ROTATE_90))
    other_file = png(Image.open(io.BytesIO(NOISE[0])).convert("RGBA"))  # the same picture in another file
    table = rows([NOISE[0]], [turned], [other_file])
    keys = [prompt.image_keys[0] for prompt in PromptDataset(table, data_config(), processor)]
    assert keys[0] == keys[2] != keys[1]
    larger = PromptDataset(rows([NOISE[0]]), data_config(min_pixels=30000), processor)[0].image_keys[0]
    assert larger not in keys


def test_a_square_is_not_taken_for_a_line_of_the_same_bytes(processor, data_config):
    wide, high = (Image.new("RGB", size, "red") for size in ((128, 64), (64, 128)))
    prompts = PromptDataset(rows([wide], [high]), data_config(), processor).prompts([0, 1])
    assert prompts[0].images[0].tobytes() == prompts[1].images[0].tobytes()
    assert prompts[0].image_keys != prompts[1].image_keys


def test_faulty_entries_have_a_source_too():
    for entry in (None, 3, {"bytes": None, "path": None}, b"", ""):
        assert source_key(entry) == source_key(entry)
