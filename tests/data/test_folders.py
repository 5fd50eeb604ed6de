"""Whatever a set is kept in, its rows are those of FILE.jsonl: folders, what `datasets` writes, parquet."""

import json

import datasets
import pyarrow.parquet as pq
import pytest

from grpo_vlm.data import PromptDataset, parquet
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import DataError
from tests.data.test_dataset import png

PARTS = [{"type": "image"}, {"type": "text", "text": "How many?"}]
MIXED = [  # of each column or field the rows differ in type, so that `datasets` keeps JSON text
    {"prompt": [{"role": "user", "content": PARTS}], "images": ["a.png"], "answer": ["x", 2], "extra": {"a": 1}},
    {"prompt": [{"role": "user", "content": "Why? <image>"}], "images": ["a.png"], "answer": "no", "extra": "b"},
    {"prompt": [{"role": "user", "content": "Two <image>?"}], "images": ["a.png"], "answer": 2, "extra": None},
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_VLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def lines(path, rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def kept(tmp_path, kind, monkeypatch):
    """The MIXED rows in one of the things that `datasets` makes of them."""
    made = datasets.Dataset.from_json(str(lines(tmp_path / "rows.jsonl", MIXED)), cache_dir=str(tmp_path / "made"))
    if kind == "object":
        return made
    if kind == "saved":
        made.save_to_disk(tmp_path / "saved")
        return str(tmp_path / "saved")
    if kind == "folder":
        return str(lines(tmp_path / "folder" / "train.jsonl", MIXED).parent)
    if kind == "copied parquet":
        monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
        monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    made.to_parquet(tmp_path / "made.parquet")
    return str(tmp_path / "made.parquet")


@pytest.mark.parametrize("kind", ["object", "saved", "folder", "parquet", "copied parquet"])
def test_json_columns_of_datasets_are_decoded(tmp_path, monkeypatch, processor, data_config, kind):
    lines(tmp_path / "rows.jsonl", MIXED)
    (tmp_path / "a.png").write_bytes(png("red"))
    source = open_source(kept(tmp_path, kind, monkeypatch))
    assert source.rows(0, 9) == MIXED and list(source.column("answer")) == [row["answer"] for row in MIXED]
    settings = data_config(prompt_key="prompt", image_dir=str(tmp_path))
    given = [open_source(str(tmp_path / "rows.jsonl")).rows(0, 9), source.rows(0, 9)]
    plain, decoded = (PromptDataset(rows, settings, processor) for rows in given)
    for one, other in zip(plain, decoded, strict=True):
        assert (one.text, one.ground_truth, one.image_keys) == (other.text, other.ground_truth, other.image_keys)
        assert len(other.images) == 1


@pytest.mark.parametrize("kind", ["object", "parquet", "saved"])
def test_a_class_label_is_its_name(tmp_path, kind):
    labels = datasets.ClassLabel(names=["cat", "dog"])
    made = datasets.Dataset.from_dict({"problem": ["a?", "b?", "c?"], "answer": [1, 0, None]})
    made = made.cast_column("answer", labels)
    if kind == "saved":
        made.save_to_disk(tmp_path / "saved")
    made.to_parquet(tmp_path / "a.parquet")
    source = open_source(made if kind == "object" else str(tmp_path / ("saved" if kind == "saved" else "a.parquet")))
    assert [row["answer"] for row in source.rows(0, 3)] == list(source.column("answer")) == ["dog", "cat", None]


def test_answers_of_a_folder_are_those_of_its_files(tmp_path):
    first = [{"problem": "when?", "answer": "2024-01-01"}, {"problem": "how many?", "answer": 1}]
    second = [{"problem": "how much?", "answer": 2.5}]
    lines(tmp_path / "set" / "train-0.jsonl", first)
    (tmp_path / "set" / "train-1.json").write_text(json.dumps(second))
    lines(tmp_path / "set" / "test.jsonl", [{"problem": "held out", "answer": "x"}])
    whole = open_source(str(tmp_path / "set"))
    assert whole.rows(0, 9) == first + second and whole.row_id(2) == "set:2"
    assert open_source(f"{tmp_path / 'set'}@train[1:]").rows(0, 9) == [first[1], *second]
    assert open_source(f"{tmp_path / 'set'}@train[:1]+test").rows(0, 9)[-1]["problem"] == "held out"
    with pytest.raises(DataError, match="validation"):
        open_source(f"{tmp_path / 'set'}@validation")


def test_cells_of_csv_are_text(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text('problem,answer\n"a, b",007\nc,1.50\nd,NA\n')
    answers = [row["answer"] for row in open_source(str(tmp_path / "set")).rows(0, 9)]
    assert answers == ["007", "1.50", "NA"]


def test_a_saved_dict_of_splits_can_be_cut(tmp_path):
    rows = datasets.Dataset.from_list([{"problem": str(n), "answer": str(n)} for n in range(4)])
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(tmp_path / "saved")
    assert [row["answer"] for row in open_source(f"{tmp_path / 'saved'}@test[1:3]").rows(0, 9)] == ["1", "2"]
    with pytest.raises(DataError, match="no split 'val'; present: train, test"):
        open_source(f"{tmp_path / 'saved'}@val")


def test_a_parquet_that_is_written_again_during_a_run_is_an_error(tmp_path, monkeypatch):
    """Also where its reader is open already and the group was not read before."""
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    rows = datasets.Dataset.from_list([{"problem": str(n), "answer": str(n)} for n in range(40)])
    pq.write_table(rows.data.table, tmp_path / "a.parquet", row_group_size=10)
    source = open_source(str(tmp_path / "a.parquet"))
    assert source.rows(0, 1)[0]["answer"] == "0"
    content = (tmp_path / "a.parquet").read_bytes()
    with (tmp_path / "a.parquet").open("r+b") as file:  # in place: the open reader sees the new bytes
        file.write(content + b" ")
    for read in (lambda: source.rows(15, 16), lambda: list(source.column("answer"))):
        with pytest.raises(DataError, match=r"a\.parquet has been changed or moved since it was opened"):
            read()
