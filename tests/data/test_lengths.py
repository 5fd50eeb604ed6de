"""The pass over all rows and its cache: equal to a fresh count, found again, never wrong."""

import json
import os
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from PIL import Image

from grpo_vlm.data import PromptDataset, lengths, media
from grpo_vlm.data import cache as cache_module
from grpo_vlm.errors import DataError
from tests.data.test_dataset import png

GEO3K = Path(__file__).parent / "geo3k_40.parquet"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GRPO_VLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch) -> list:
    """What was opened to be measured."""
    opened = []
    original = media.load_image
    monkeypatch.setattr(media, "load_image", lambda *entry: opened.append(entry) or original(*entry))
    return opened


@pytest.fixture
def files(tmp_path) -> Path:
    """Four rows that name three picture files."""
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(size=(60 + 60 * number, 64)))
    rows = [{"problem": "<image>?", "images": [f"{number % 3}.png"], "answer": "a"} for number in range(4)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_a_second_run_decodes_nothing_and_finds_the_same(cache, decoded, processor, data_config):
    config = data_config(max_prompt_length=120)
    first = PromptDataset(str(GEO3K), config, processor).validate()
    assert not first.cached and len(decoded) == 40 and 0 < len(first.dropped_overlong) < 40
    second = PromptDataset(str(GEO3K), config, processor).validate()
    assert second.cached and len(decoded) == 40
    assert replace(second, cached=False) == first
    # what is too long is decided anew
    wider = PromptDataset(str(GEO3K), data_config(max_prompt_length=2000), processor).validate()
    assert wider.cached and len(wider.kept) == 40
    with pytest.raises(DataError, match="rows cannot be used"):
        strict = data_config(max_prompt_length=120, filter_overlong_prompts=False)
        PromptDataset(str(GEO3K), strict, processor).validate()


def test_the_same_content_elsewhere_is_known(cache, decoded, tmp_path, processor, data_config):
    PromptDataset(str(GEO3K), data_config(), processor).validate()
    (tmp_path / GEO3K.name).write_bytes(GEO3K.read_bytes())
    assert PromptDataset(str(tmp_path / GEO3K.name), data_config(), processor).validate().cached


@pytest.mark.parametrize(
    "keys",
    [
        {"max_pixels": 50176},
        {"min_pixels": 6272},
        {"system_prompt": "Be brief."},
        {"answer_key": "letter"},
        {"format_prompt": "configs/prompts/math.jinja"},
        {"image_dir": "tests"},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_other_settings_are_counted_anew(cache, keys, processor, data_config):
    before = PromptDataset(str(GEO3K), data_config(max_prompt_length=2000), processor).validate()
    config = data_config(**({"max_prompt_length": 2000} | keys))
    after = PromptDataset(str(GEO3K), config, processor)
    assert not before.cached and not after.validate().cached
    assert max(len(prompt.token_ids) for prompt in after) == after.validate().longest


def test_another_template_or_tokenizer_is_counted_anew(cache, processor, data_config, monkeypatch):
    PromptDataset(str(GEO3K), data_config(), processor).validate()
    with monkeypatch.context() as patch:
        patch.setattr(processor, "chat_template", "Hello. " + processor.chat_template)
        assert not PromptDataset(str(GEO3K), data_config(), processor).validate().cached
    with monkeypatch.context() as patch:
        patch.setattr(
            processor.image_processor,
            "size",
            type(processor.image_processor.size)(shortest_edge=3136, longest_edge=28 * 28 * 50),
        )
        assert not PromptDataset(str(GEO3K), data_config(), processor).validate().cached
    with monkeypatch.context() as patch:
        patch.setattr(lengths, "LIBRARIES", ("torch",))
        assert not PromptDataset(str(GEO3K), data_config(), processor).validate().cached
    assert PromptDataset(str(GEO3K), data_config(), processor).validate().cached


def test_a_file_that_changed_is_counted_anew_whatever_its_time_says(cache, files, processor, data_config):
    path = files / "a.jsonl"
    stat, text = path.stat(), path.read_text()
    PromptDataset(str(path), data_config(image_dir=str(files)), processor).validate()
    path.write_text(text.replace("?", "!"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert not PromptDataset(str(path), data_config(image_dir=str(files)), processor).validate().cached


def test_a_picture_that_changed_or_went_is_seen(cache, files, processor, data_config):
    config = data_config(image_dir=str(files))

    def longest():
        report = PromptDataset(str(files / "a.jsonl"), config, processor).validate()
        return report.cached, report.longest

    first = longest()
    assert longest() == (True, first[1]) and not first[0]
    Image.new("RGB", (300, 300)).save(files / "2.png")
    cached, grown = longest()
    assert not cached and grown > first[1]
    (files / "1.png").unlink()
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*does not exist"):
        longest()
    (files / "1.png").write_bytes(png())  # what was missing is looked for again
    assert longest() == (False, grown)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"tokens": [', b'"tokens": [9, ', 1)),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
    ],
)
def test_a_broken_entry_is_counted_anew_and_replaced(cache, damage, processor, data_config):
    right = PromptDataset(str(GEO3K), data_config(), processor).validate()
    (entry,) = (cache / "lengths").iterdir()
    damage(entry)
    again = PromptDataset(str(GEO3K), data_config(), processor).validate()
    assert again == right and not again.cached
    assert PromptDataset(str(GEO3K), data_config(), processor).validate().cached


def test_faulty_rows_stay_faulty(cache, files, decoded, processor, data_config):
    (files / "0.png").write_bytes(b"GIF89a")
    skip = data_config(image_dir=str(files), on_bad_media="skip")
    reports = [PromptDataset(str(files / "a.jsonl"), skip, processor).validate() for _ in range(2)]
    assert [report.cached for report in reports] == [False, True] and reports[0].skipped == reports[1].skipped
    assert [row_id for row_id, _ in reports[1].skipped] == ["a.jsonl:0", "a.jsonl:3"] and reports[1].kept == (1, 2)
    with pytest.raises(DataError, match=r"(?s)2 of 4 rows.*a\.jsonl:0.*a\.jsonl:3"):
        PromptDataset(str(files / "a.jsonl"), data_config(image_dir=str(files)), processor).validate()
    assert len(decoded) == 4


def test_every_kind_of_source_is_known_again(cache, files, processor, data_config):
    (files / "set").mkdir()
    (files / "set" / "train.parquet").write_bytes(GEO3K.read_bytes())
    saved = datasets.Dataset.from_parquet(str(GEO3K), cache_dir=str(files / "hf")).select(range(3))
    saved.save_to_disk(str(files / "saved"))
    (files / "list.json").write_text(json.dumps([{"problem": "?", "answer": "a"}] * 2))
    names = ["set", "saved", "list.json", "set@train[:3]", "list.json@train[:1]"]
    names += [f"{name},{files}/a.jsonl" for name in names]
    for name in names:
        reports = [
            PromptDataset(f"{files}/{name}", data_config(image_dir=str(files)), processor).validate() for _ in range(2)
        ]
        assert [report.cached for report in reports] == [False, True], name
        assert replace(reports[1], cached=False) == reports[0]


def test_rows_given_as_objects_are_counted_each_time(cache, processor, data_config):
    table = [{"problem": "?", "answer": "a"}]
    assert [PromptDataset(table, data_config(), processor).validate().cached for _ in range(2)] == [False, False]
    assert not cache.exists()


def test_a_cache_that_cannot_be_written_is_said(tmp_path, monkeypatch, processor, data_config):
    monkeypatch.setenv("GRPO_VLM_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    report = PromptDataset(str(GEO3K), data_config(), processor).validate()
    assert len(report.kept) == 40 and "cannot be written" in report.notes[0]


def test_where_the_cache_is(monkeypatch):
    monkeypatch.delenv("GRPO_VLM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_module.cache_dir() == Path("/x/grpo_vlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_module.cache_dir() == Path.home() / ".cache" / "grpo_vlm"
