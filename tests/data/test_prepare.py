"""Prepared sets: verl's and EasyR1's columns, pictures byte for byte, verl's split, each raw folder and target."""

import io
import json
from collections import Counter
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_vlm.cli import main as cli
from grpo_vlm.data import PromptDataset
from grpo_vlm.data.prepare import easyvqa_rows, main
from grpo_vlm.data.prepared import ninety_ten
from grpo_vlm.errors import DataError
from tests.data.test_dataset import png

GEO3K = pq.read_table(Path(__file__).parent / "geo3k_40.parquet").to_pylist()
VERL = {"data_source", "ability", "reward_model", "extra_info", "prompt"}


def read(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def run(*arguments: object) -> int:
    return cli(["prepare", *map(str, arguments)])


@pytest.fixture
def geo3k(tmp_path) -> Path:
    """A raw folder of Geometry3K with two parts."""
    folder = tmp_path / "raw"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(GEO3K[:32]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(GEO3K[32:]), folder / "test.parquet")
    return folder


def test_geo3k_as_verl_and_easyr1_read_it(geo3k, tmp_path, processor, data_config):
    out = tmp_path / "out"
    assert (
        run("geo3k", "--local_dataset_path", geo3k, "--local_save_dir", out, "--hdfs_dir", "memory://copy/geo3k") == 0
    )
    assert fsspec.filesystem("memory").cat("/copy/geo3k/test.parquet") == (out / "test.parquet").read_bytes()
    for split, raw in (("train", GEO3K[:32]), ("test", GEO3K[32:])):
        # both trainers read parquet through `datasets`
        rows = list(datasets.load_dataset("parquet", data_files=str(out / f"{split}.parquet"), split="train"))
        for index, (row, source) in enumerate(zip(rows, raw, strict=True)):
            assert VERL | {"images", "problem", "answer"} == row.keys()
            assert [image["bytes"] for image in row["images"]] == [image["bytes"] for image in source["images"]]
            (message,) = row["prompt"]
            assert message["role"] == "user" and message["content"].startswith(source["problem"] + " ")
            assert "\\boxed{}" in message["content"] and message["content"].count("<image>") == 1
            assert row["reward_model"] == {"style": "rule", "ground_truth": source["answer"]}
            assert (row["data_source"], row["ability"]) == ("hiyouga/geometry3k", "math")
            assert row["extra_info"]["index"] == index and row["extra_info"]["split"] == split
            assert (row["problem"], row["answer"]) == (source["problem"], source["answer"])
        easyr1 = PromptDataset(str(out / f"{split}.parquet"), data_config(), processor)
        verl = PromptDataset(str(out / f"{split}.parquet"), data_config(prompt_key="prompt"), processor)
        for one, other, source in zip(easyr1, verl, raw, strict=True):
            assert one.ground_truth == other.ground_truth == source["answer"]
            assert one.image_keys == other.image_keys and len(other.text) > len(one.text)


@pytest.mark.parametrize("name", ["openr1mm", "clevr"])
def test_a_tenth_is_held_out_as_verl_does(name, tmp_path):
    pictures = [png((9 * n, 0, 0)) for n in range(20)]
    table = [
        {
            "image": {"bytes": pictures[n], "path": f"{n}.png"},
            "problem": f"P{n}?",
            "solution": f"So <answer> {n} </answer>",
        }
        for n in range(20)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "raw.parquet", row_group_size=7)
    assert run(name, "--local_dataset_path", tmp_path / "raw.parquet", "--out", tmp_path / "out") == 0
    parts = datasets.Dataset.from_list(table).train_test_split(test_size=0.1, seed=42)
    for split, size in (("train", 18), ("test", 2)):
        rows = read(tmp_path / "out" / f"{split}.parquet")
        assert len(rows) == size
        for row, raw in zip(rows, parts[split], strict=True):
            assert row["images"] == [raw["image"]] and row["reward_model"]["ground_truth"] == raw["solution"]
            assert row["problem"] == f"<image>\n{raw['problem']}" and row["answer"] == raw["problem"][1:-1]
            assert row["prompt"][0]["content"].startswith(f"<image>\n{raw['problem']}\n\n")
            assert "<answer> </answer>" in row["prompt"][0]["content"]


def test_rows_that_name_their_pictures_get_the_bytes(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(png((number, 0, 0)))
    lines = [json.dumps({"image": f"{n}.png", "problem": "?", "solution": "a"}) for n in range(10)]
    (tmp_path / "raw.jsonl").write_text("\n".join(lines))
    assert run("openr1mm", "--local_dataset_path", tmp_path / "raw.jsonl", "--out", tmp_path / "out") == 0
    rows = read(tmp_path / "out" / "train.parquet")
    assert all(row["images"][0]["bytes"] == (tmp_path / row["images"][0]["path"]).read_bytes() for row in rows)


def test_counting_questions_of_an_unpacked_clevr(tmp_path):
    for part in ("train", "val"):
        (tmp_path / "images" / part).mkdir(parents=True)
        (tmp_path / "images" / part / "a.png").write_bytes(png())
        asked = [
            {"question": "How many?", "answer": "3", "image_filename": "a.png", "program": [{"function": "count"}]},
            {"question": "Is it?", "answer": "yes", "image_filename": "a.png", "program": [{"function": "exist"}]},
        ]
        (tmp_path / "questions").mkdir(exist_ok=True)
        for index, question in enumerate(asked):
            question["question_index"] = index
        (tmp_path / "questions" / f"CLEVR_{part}_questions.json").write_text(json.dumps({"questions": asked}))
    assert run("clevr", "--local_dataset_path", tmp_path, "--out", tmp_path / "out") == 0
    for split in ("train", "test"):
        (row,) = read(tmp_path / "out" / f"{split}.parquet")
        assert row["answer"] == "3" and row["reward_model"]["ground_truth"] == "<answer> 3 </answer>"
        assert row["images"] == [{"bytes": png(), "path": "a.png"}] and row["ability"] == "counting"


def test_videos_are_named_with_their_settings_and_must_be_there(tmp_path, capsys):
    raw = tmp_path / "raw"
    names = [f"./NextQA/..clips/{number}.mp4" for number in range(10)]  # only the prefix goes, not every dot
    for name in names:
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_bytes(b"video")
    lines = [
        json.dumps({"problem": "What?\nOptions:\nA. x.", "solution": "<answer>A</answer>", "video_filename": name})
        for name in names
    ]
    (raw / "nextqa_0-30s.jsonl").write_text("\n".join(lines))
    arguments = ("tinyllava_video", "--data_dir", raw, "--out", tmp_path / "out", "--video_max_frames", 16)
    assert run(*arguments) == 0
    rows = [row for split in ("train", "test") for row in read(tmp_path / "out" / f"{split}.parquet")]
    assert len(rows) == 10 and len(read(tmp_path / "out" / "test.parquet")) == 1
    paths = {row["videos"][0]["video"] for row in rows}
    assert paths == {str(raw / name.removeprefix("./")) for name in names} and all(map(Path.is_file, map(Path, paths)))
    for row in rows:
        assert row["videos"][0] | {"video": ""} == {"video": "", "fps": 1.0, "max_frames": 16}
        assert row["problem"].startswith("<video>\nWhat?") and row["answer"] == "A"
        assert VERL | {"videos", "problem", "answer"} == row.keys() and row["ability"] == "video_qa"
    (raw / names[3]).unlink()
    assert run(*arguments) == 2
    assert "1 of 10 videos are not there, the first: nextqa_0-30s.jsonl:3" in capsys.readouterr().err


def test_the_prepared_video_rows_are_read(tmp_path, processor, data_config):
    frames = [Image.new("RGB", (64, 64), (60 * n, 0, 0)) for n in range(4)]
    raw = tmp_path / "raw"
    (raw / "NextQA").mkdir(parents=True)
    frames[0].save(raw / "NextQA" / "a.gif", save_all=True, append_images=frames[1:], duration=250)
    line = {"problem": "What?", "solution": "<answer>A</answer>", "video_filename": "./NextQA/a.gif"}
    (raw / "nextqa_0-30s.jsonl").write_text("\n".join([json.dumps(line)] * 10))
    assert run("tinyllava_video", "--local_dataset_path", raw, "--out", tmp_path, "--video_fps", 4) == 0
    (prompt,) = PromptDataset(str(tmp_path / "test.parquet"), data_config(), processor)
    assert len(prompt.videos) == 1 and len(prompt.videos[0].shape.indices) == 4
    assert prompt.ground_truth == "<answer>A</answer>"  # verl's, which the graders take apart


def test_easyvqa_is_balanced_and_the_same_each_time(tmp_path, capsys):
    for name in ("a", "b"):
        assert run("easyvqa", "--out", tmp_path / name, "--train-per-answer", 9, "--test-per-answer", 2) == 0
    assert "train.parquet: 117 rows" in capsys.readouterr().out
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    train = read(tmp_path / "a" / "train.parquet")
    assert set(Counter(row["answer"] for row in train).values()) == {9} and len({r["answer"] for r in train}) == 13
    assert all(row["problem"].startswith("<image>") for row in train)
    assert Image.open(io.BytesIO(train[0]["images"][0]["bytes"])).size == (64, 64)
    assert [row["answer"] for row in train] != sorted(row["answer"] for row in train)


def test_held_out_rows_come_from_the_test_split_and_seeds_differ():
    test = easyvqa_rows("test", 40, 0)
    assert len(test) == 520 and all(row["images"][0]["path"].startswith("test/") for row in test)
    assert [row["problem"] for row in easyvqa_rows("test", 40, 1)] != [row["problem"] for row in test]


def test_more_rows_than_there_are_is_an_error(capsys):
    with pytest.raises(DataError, match=r"easy-vqa has \d+ test questions with answer '\w+', not 1000"):
        easyvqa_rows("test", 1000, 0)
    assert main(["easyvqa", "--out", "unused", "--train-per-answer", "100000"]) == 2
    assert "lower --train-per-answer" in capsys.readouterr().err


def test_a_second_target_that_cannot_be_reached_is_found_before_anything_is_written(geo3k, tmp_path, capsys):
    assert run("geo3k", "--local_dataset_path", geo3k, "--out", tmp_path / "out", "--hdfs_dir", "s3://bucket/x") == 2
    assert "Run `pip install s3fs`" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [10, 37, 600])
def test_the_split_is_that_of_the_library(rows):
    parts = ninety_ten(rows)
    whole = datasets.Dataset.from_dict({"n": range(rows)}).train_test_split(test_size=0.1, seed=42)
    assert parts == {name: list(whole[name]["n"]) for name in ("train", "test")}


@pytest.mark.parametrize(
    ("name", "raw", "out", "message"),
    [
        ("geo3k", "gone", "out", "gone is no file or folder|gone does not exist"),
        ("openr1mm", "raw.jsonl", "out", ": no column 'solution' is filled; present: problem"),
        ("easyvqa", ".", "out", "holds no answers.txt"),
        ("tinyllava_video", ".", "out", "holds no nextqa_0-30s.jsonl"),
        ("clevr", "clevr", "out", "CLEVR_train_questions.json does not exist"),
        ("easyvqa", "", "raw.jsonl/x", "cannot be written|cannot be used"),
        ("easyvqa", "", "nosuch://x", "nosuch:// is no kind of address"),
    ],
)
def test_what_cannot_be_prepared_says_why(tmp_path, monkeypatch, capsys, name, raw, out, message):
    monkeypatch.chdir(tmp_path)
    Path("clevr/questions").mkdir(parents=True)
    Path("raw.jsonl").write_text("\n".join([json.dumps({"problem": "p"})] * 10))
    arguments = ["--local_dataset_path", str(Path(raw).absolute())] if raw else []
    assert run(name, *arguments, "--out", out) == 2
    error = capsys.readouterr().err
    assert any(part in error for part in message.split("|")) and "Traceback" not in error
