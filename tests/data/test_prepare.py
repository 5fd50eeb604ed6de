"""easy-VQA from the installed package: balanced, held out, the same bytes each time."""

import io
from collections import Counter

import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_vlm.data.prepare import easyvqa_rows, main
from grpo_vlm.errors import DataError


def test_files_are_balanced_and_the_same_each_time(tmp_path, capsys):
    for name in ("a", "b"):
        assert (
            main(["easyvqa", "--out", str(tmp_path / name), "--train-per-answer", "9", "--test-per-answer", "2"]) == 0
        )
    assert "117 rows, 9 for each of 13 answers" in capsys.readouterr().out
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (tmp_path / "b" / "train.parquet").read_bytes()
    train = pq.read_table(tmp_path / "a" / "train.parquet").to_pylist()
    assert set(Counter(row["answer"] for row in train).values()) == {9} and len({r["answer"] for r in train}) == 13
    assert all(row["problem"].startswith("<image>") for row in train)
    image = Image.open(io.BytesIO(train[0]["images"][0]["bytes"]))
    assert image.size == (64, 64)
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
