"""Data sets: each kind of source, all faults at once, the overlong filter, DataLoader workers."""

import io
import json
import os
import pickle
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from grpo_vlm import Run
from grpo_vlm.data import PromptDataset
from grpo_vlm.errors import DataError
from tests.training.rigs import settings

GEO3K = Path(__file__).parent / "geo3k_40.parquet"


def png(color="red", size=(64, 64)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def rows(count=4, **columns):
    return [
        {"problem": f"<image>Question {i}?", "images": [{"bytes": png(), "path": None}], "answer": str(i), **columns}
        for i in range(count)
    ]


def json_rows(folder, count=3):
    (folder / "a.png").write_bytes(png())
    return [{"problem": f"<image>Question {i}?", "images": ["a.png"], "answer": i} for i in range(count)]


def test_real_rows_of_geometry3k(processor, data_config, pytestconfig):
    template = str(pytestconfig.rootpath / "configs" / "prompts" / "math.jinja")
    prompts = PromptDataset(str(GEO3K), data_config(format_prompt=template), processor)
    report = prompts.validate()
    assert (report.rows, len(report.kept), report.dropped_overlong) == (40, 40, ())
    everything = [prompts[index] for index in range(len(prompts))]
    assert max(len(prompt.token_ids) for prompt in everything) == report.longest
    assert everything[17].row_id == "geo3k_40.parquet:17"
    assert {"choices", "letter"} <= everything[0].columns.keys()
    assert all(torch.isfinite(prompt.pixel_values).all() for prompt in everything)


def test_every_row_passes_the_scan(processor, data_config):
    """The 40 rows of the repository; all 600 where GRPO_VLM_SHARED names the folder that holds data/geo3k."""
    paths, expected = [GEO3K], 40
    if shared := os.environ.get("GRPO_VLM_SHARED"):
        paths, expected = [Path(shared) / "data" / "geo3k" / f"{split}.parquet" for split in ("train", "test")], 600
    assert sum(len(PromptDataset(str(path), data_config(), processor).validate().kept) for path in paths) == expected


def test_every_kind_of_source_gives_the_same_prompts(processor, data_config, tmp_path):
    table = rows()
    expected = [prompt.token_ids for prompt in PromptDataset(table, data_config(), processor)]
    folder = tmp_path / "folder"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(table), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(table[:2]), folder / "test.parquet")
    datasets.Dataset.from_list(table).save_to_disk(str(tmp_path / "saved"))
    pictures = datasets.Dataset.from_list(table).cast_column("images", datasets.Sequence(datasets.Image()))
    pictures.to_parquet(str(tmp_path / "features.parquet"))
    sources = ["a.parquet", "a.parquet@train", "folder", "folder@train", "saved", "features.parquet"]
    for source in sources:
        prompts = PromptDataset(str(tmp_path / source), data_config(), processor)
        assert [prompt.token_ids for prompt in prompts] == expected, source
    held_out = PromptDataset(str(tmp_path / "folder@test"), data_config(), processor)
    assert len(held_out) == 2 and held_out[1].row_id == "folder@test:1"
    assert len(PromptDataset(str(tmp_path / "a.parquet@train[:3]"), data_config(), processor)) == 3
    assert len(PromptDataset(datasets.Dataset.from_list(table), data_config(), processor).validate().kept) == 4


def test_json_and_jsonl_with_paths_blank_lines_and_a_byte_order_mark(processor, data_config, tmp_path):
    table = json_rows(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(table))
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, table)) + "\n", encoding="utf-8")
    config = data_config(image_dir=str(tmp_path))
    for name in ("a.json", "a.jsonl"):
        prompts = PromptDataset(str(tmp_path / name), config, processor)
        assert len(prompts.validate().kept) == 3 and prompts[2].ground_truth == "2"
        assert prompts[1].row_id == f"{name}:1" and len(prompts[1].images) == 1
    assert len(PromptDataset(str(tmp_path / "a.json@train[1:]"), config, processor)) == 2


def test_large_nested_row_groups_can_be_read(processor, data_config, tmp_path):
    filler = os.urandom(400_000)  # 40 rows x 2 x 400 kB in one row group of list<struct<bytes>>
    table = [
        {"problem": "q", "answer": "a", "images": [], "extra": [{"bytes": filler, "path": None}] * 2}
        for _ in range(40)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "big.parquet", row_group_size=40)
    prompts = PromptDataset(str(tmp_path / "big.parquet"), data_config(), processor)
    assert prompts[39].columns["extra"][1]["bytes"] == filler


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.parquet", None, r"gone\.parquet does not exist"),
        ("a.csv", "problem,answer\n", r"files of type \.csv are not read"),
        ("a.jsonl", '{"problem": "a", "answer": "b"}\n{"problem": "a",}\n', r"a\.jsonl, line 2: not valid JSON"),
        ("a.json", '[{"problem": "a"},]', r"a\.json, line 1: not valid JSON"),
        ("a.jsonl", '["x"]\n', r"a\.jsonl:0: a row must be a dict"),
        ("a.jsonl", '{"problem": "a"}\n"x"\n', r"a\.jsonl, line 2: a row must be a dict of columns, got str"),
        (
            "a.jsonl",
            '{"problem"\n\n{"problem": "a", "answer": "b"}\n[1]\n{"a": "\\ud8\n',
            r"(?s)^\S+a\.jsonl: 3 lines cannot be read:\n  line 1: not valid JSON: .*\n  line 4: a row must be .*"
            r"\n  line 5: not valid JSON: [^\n]*; write one row a line or a list of rows$",
        ),
        ("a.jsonl", "{\n" * 50, r"(?s)jsonl: 50 lines .*\n  line 20: .*list of rows\n  \.\.\. and 30 more$"),
        ("a.json", "[{}, 1, 2]", r"(?s)^a\.json: 2 rows cannot be read:\n  a\.json:1: a row must.*\n  a\.json:2: "),
        ("a.jsonl", "", "there are no rows"),
        ("a.parquet", "this is not parquet", r"a\.parquet@train cannot be read"),
        ("a.jsonl", '{"prompt": "a", "label": "b"}', r"missing column 'problem' \(data\.prompt_key\)"),
        ("a.jsonl", '{"prompt": "a", "label": "b"}', "present: prompt, label"),
    ],
)
def test_sources_that_cannot_be_read(processor, data_config, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        PromptDataset(str(tmp_path / name), data_config(), processor)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_json_that_is_not_utf8_names_line_and_byte(processor, data_config, tmp_path, name):
    content = b'[{"problem": "a"},\n' + b" " * 20_000 + '{"problem": "größer"}]'.encode("latin-1")
    (tmp_path / name).write_bytes(content)
    place = rf"{name}, line 2, byte {content.index(0xF6)} of the file \(0xf6\): is not UTF-8; save the file as UTF-8"
    with pytest.raises(DataError, match=place):
        PromptDataset(str(tmp_path / name), data_config(), processor)


def test_a_broken_saved_folder(processor, data_config, tmp_path):
    datasets.Dataset.from_list([{"problem": "a", "answer": "b"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"saved@train cannot be read: JSONDecodeError"):
        PromptDataset(str(tmp_path / "saved"), data_config(), processor)
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=r"dict@train cannot be read: FileNotFoundError"):
        PromptDataset(str(tmp_path / "dict"), data_config(), processor)


def test_splits_and_folders_that_do_not_exist(processor, data_config, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(rows(1, images=[])[0]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"the one split 'train'.*drop @test"):
        PromptDataset(str(tmp_path / "a.jsonl@test"), data_config(), processor)
    with pytest.raises(DataError, match="the folder is empty"):
        PromptDataset(str(tmp_path / "empty"), data_config(), processor)
    with pytest.raises(DataError, match="data\\.train_files"):
        PromptDataset("", data_config(), processor)


def test_all_faults_are_reported_at_once(processor, data_config):
    table = rows(15)
    table[1]["images"] = []
    table[4]["images"] = [{"bytes": png()[:60], "path": None}]
    table[9]["answer"] = None
    prompts = PromptDataset(table, data_config(), processor)
    with pytest.raises(DataError) as fault:
        prompts.validate()
    text = str(fault.value)
    assert text.startswith("3 of 15 rows cannot be used:")
    for row_id in ("rows:1:", "rows:4: column 'images', picture 0", "rows:9:"):
        assert row_id in text
    for row in table:
        row["images"] = []
    with pytest.raises(DataError, match=r"(?s)15 of 15 rows.*rows:9.*and 5 more") as fault:
        prompts = PromptDataset(table, data_config(), processor)
        prompts.validate()
    assert str(fault.value).count("\n") == 11


def test_more_faults_than_are_listed_name_the_command_that_lists_them(processor, data_config, tmp_path):
    path = tmp_path / "my rows.jsonl"
    path.write_text('{"problem": "<image>?", "answer": "a"}\n' * 11)
    with pytest.raises(DataError, match=r"and 1 more; `grpo-vlm data check '\S+/my rows\.jsonl'` lists them all"):
        PromptDataset(str(path), data_config(), processor).validate()


@pytest.mark.parametrize("give", [list, iter, tuple, datasets.Dataset.from_list])
def test_a_run_takes_rows_of_any_kind_and_decodes_no_picture_of_a_set(processor, data_config, tmp_path_factory, give):
    given = give(rows(3))
    if isinstance(given, datasets.Dataset):
        given = given.cast_column("images", datasets.List(datasets.Image()))
    config = settings(tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("run"))
    run = Run(config, train_rows=given, val_rows=give(rows(2)), reward=len)
    for _ in range(2):
        made = PromptDataset(run.train_rows, data_config(), processor)
        assert set(made.source.rows(0, 1)[0]["images"][0]) == {"bytes", "path"}
        assert len(made.validate().kept) == 3 and len(list(run.val_rows)) == 2


def test_overlong_rows_are_dropped_or_refused_never_cut(processor, data_config):
    table = rows(6)
    table[2]["problem"] += " word" * 300
    config = data_config(max_prompt_length=200)
    prompts = PromptDataset(table, config, processor)
    report = prompts.validate()
    assert report.kept == (0, 1, 3, 4, 5) and len(prompts) == 5 and prompts[2].row_id == "rows:3"
    ((row_id, tokens),) = report.dropped_overlong
    assert row_id == "rows:2" and tokens > 300 and report.longest < 200
    strict = PromptDataset(table, data_config(max_prompt_length=200, filter_overlong_prompts=False), processor)
    with pytest.raises(DataError, match=rf"1 of 6 rows.*\n.*rows:2: the prompt has {tokens} tokens .* raise it"):
        strict.validate()
    with pytest.raises(DataError, match=r"all 6 prompts are longer than data\.max_prompt_length=5"):
        PromptDataset(table, data_config(max_prompt_length=5), processor).validate()
    strict.select(report.kept)
    assert len(strict) == 5


def test_the_scan_counts_the_tokens_that_the_prompt_gets(processor, data_config):
    table = [
        {"problem": "<image>" * n + "?", "answer": "a", "images": [Image.new("RGB", size)] * n}
        for n, size in enumerate([(1, 1), (709, 380), (30, 1500), (2000, 40)], start=1)
    ]
    prompts = PromptDataset(table, data_config(min_pixels=262144, max_pixels=4194304), processor)
    assert prompts.validate().longest == max(len(prompt.token_ids) for prompt in prompts)


def test_dataloader_workers_give_the_same_prompts(processor, data_config):
    prompts = PromptDataset(str(GEO3K), data_config(), processor)
    prompts.validate()
    pickled = pickle.dumps(prompts)
    assert len(pickled) < 2**20
    loader = torch.utils.data.DataLoader(
        pickle.loads(pickled), batch_size=4, num_workers=2, collate_fn=list, sampler=range(8)
    )
    loaded = [prompt for batch in loader for prompt in batch]
    assert [prompt.row_id for prompt in loaded] == [f"geo3k_40.parquet:{i}" for i in range(8)]
    assert torch.equal(loaded[5].pixel_values, prompts[5].pixel_values)
    assert loaded[5].images[0].tobytes() == prompts[5].images[0].tobytes()


@pytest.mark.parametrize("kind", ["struct", "list of struct", "binary", "list of binary"])
def test_pictures_embedded_in_parquet_lose_no_row(processor, data_config, tmp_path, kind):
    """Report B1.8: every row of such a file was dropped without a word."""
    cells = [{"bytes": png(), "path": None}, {"bytes": png("blue"), "path": "b.png"}, {"bytes": png(), "path": ""}]
    cells = [cell["bytes"] for cell in cells] if "binary" in kind else cells
    table = [
        {"problem": "<image>?", "answer": "a", "images": [cell] if kind.startswith("list") else cell} for cell in cells
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    prompts = PromptDataset(str(tmp_path / "a.parquet"), data_config(), processor)
    assert prompts.validate().kept == (0, 1, 2) and [len(prompt.images) for prompt in prompts] == [1, 1, 1]


@pytest.mark.parametrize(("filtering", "long_row"), [(True, 5), (False, 5), (False, None), (True, None)])
def test_image_tokens_are_never_cut(processor, data_config, filtering, long_row):
    """Reports B2.1 and B2.2: a picture of 64 tokens above the limit, in one row of eight or in all."""
    side = 224 if processor.image_processor.patch_size == 14 else 256
    table = rows(8)
    for number, row in enumerate(table):
        large = long_row is None or number == long_row
        row["images"] = [{"bytes": png(size=(side, side) if large else (56, 56)), "path": None}]
    config = data_config(max_prompt_length=50, filter_overlong_prompts=filtering)
    prompts = PromptDataset(table, config, processor)
    if long_row is not None and filtering:
        report = prompts.validate()
        assert len(report.kept) == 7 and [row_id for row_id, _ in report.dropped_overlong] == ["rows:5"]
        image = processor.image_token_id
        assert all(prompt.token_ids.count(image) == prompt.pixel_values.shape[0] // 4 for prompt in prompts)
        return
    with pytest.raises(DataError) as fault:
        prompts.validate()
    text = str(fault.value)
    if filtering:
        assert "all 8 prompts are longer than data.max_prompt_length=50" in text and "data.max_pixels" in text
    else:
        assert f"rows:{long_row or 0}: the prompt has " in text and "(64 of them for media)" in text
        for part in (
            "data.max_prompt_length is 50",
            "raise it to",
            "lower data.max_pixels",
            "filter_overlong_prompts=true",
        ):
            assert part in text


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "<image>?"}], "image": "a.png"},
        {"promt": "?", "answer": "a"},
        {"problem": "?", "anwser": "a"},
    ],
)
def test_columns_of_no_known_shape_name_those_that_are(processor, data_config, tmp_path, row):
    """Report B1.15: a set of one's own failed deep in the loader."""
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError) as fault:
        PromptDataset(str(tmp_path / "a.jsonl"), data_config(prompt_key="prompt"), processor)
    text = str(fault.value)
    assert text.startswith("a.jsonl: ") and all(key in text for key in (*row, "data.prompt_key"[:5]))
    assert "messages, problem" in text and "ground_truth" in text
