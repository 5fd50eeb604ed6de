"""Processes that build prompts: the same prompts, each picture opened in one of them, errors and deaths told."""

import io
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor

from grpo_vlm.data import PromptDataset, workers
from grpo_vlm.data.workers import PromptPool, share_out, worker_count
from grpo_vlm.errors import DataError
from tests.tiny import tiny_model

GEO3K = Path(__file__).parent / "geo3k_40.parquet"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return AutoProcessor.from_pretrained(tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module")
def pool():
    """Two workers for all tests of this file, since they take seconds to start; they end when their trainer does."""
    pool = PromptPool(2)
    yield pool
    for worker in pool._workers:
        worker.connection.close()  # what happens when the trainer dies, however it dies
        assert worker.process.wait(timeout=60) == 0
    pool.close()


def picture_rows(count: int) -> list[dict]:
    """Rows of which each two neighbours show the same picture."""
    table = []
    for number in range(count):
        file = io.BytesIO()
        Image.new("RGB", (64, 64), (number // 2 * 9, 90, 10)).save(file, "PNG")
        table.append({"problem": "<image>?", "images": [{"bytes": file.getvalue()}], "answer": str(number)})
    return table


def test_workers_build_what_the_process_itself_builds(pool, qwen, data_config):
    rows = PromptDataset(str(GEO3K), data_config(max_prompt_length=2000), qwen)
    shown = PromptDataset(picture_rows(6), data_config(), qwen)
    order = [31, 4, 4 + 1, 0, 17]
    first, second = pool.submit(rows, order), pool.submit(shown, range(6))
    # taken in another order than asked for
    for prompts, expected in ((second.prompts(), shown.prompts(range(6))), (first.prompts(), rows.prompts(order))):
        assert [prompt.row_id for prompt in prompts] == [prompt.row_id for prompt in expected]
        for ours, theirs in zip(prompts, expected, strict=True):
            assert ours.token_ids == theirs.token_ids and ours.image_keys == theirs.image_keys
            assert torch.equal(ours.pixel_values, theirs.pixel_values) and ours.columns == theirs.columns
            assert ours.images[0].tobytes() == theirs.images[0].tobytes()
        pixels = [prompt.pixels[0].data_ptr() for prompt in prompts]
        assert len(set(pixels)) == len({prompt.image_keys[0] for prompt in prompts})
    assert pool.prompts(shown, []) == []


def test_a_faulty_row_is_the_same_error_as_without_workers(pool, qwen, data_config):
    table = picture_rows(3)
    table[1]["images"] = [{"bytes": b"GIF89a"}]
    rows = PromptDataset(table, data_config(), qwen)
    with pytest.raises(DataError) as alone:
        rows.prompts(range(3))
    pending = pool.submit(rows, range(3))
    with pytest.raises(DataError) as ahead:
        pending.prompts()
    assert str(ahead.value) == str(alone.value) and "rows:1: column 'images', picture 0" in str(ahead.value)
    assert [prompt.row_id for prompt in pool.prompts(rows, [0, 2])] == ["rows:0", "rows:2"]  # they go on


def test_a_fault_of_ours_comes_with_its_traceback(pool, qwen, data_config):
    rows = PromptDataset(picture_rows(2), data_config(), qwen)
    rows.builder.max_prompt_length = None
    with pytest.raises(RuntimeError, match=r"(?s)building rows \[0, 1\] failed in a worker.*_check_length.*TypeError"):
        pool.prompts(rows, [0, 1])


def test_workers_keep_to_one_core_and_ctrl_c_does_not_reach_them(pool):
    for worker in pool._workers:
        environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes().split(b"\0")
        assert b"OMP_NUM_THREADS=1" in environment
        assert os.getpgid(worker.process.pid) == worker.process.pid  # the terminal signals the trainer's group alone


def test_a_killed_worker_is_an_error_that_says_so_and_not_a_hang(qwen, data_config):
    rows = PromptDataset(picture_rows(8), data_config(), qwen)
    pool = PromptPool(1)
    pending = pool.submit(rows, range(8))
    (worker,) = pool._workers
    worker.process.send_signal(signal.SIGKILL)
    with pytest.raises(DataError, match=r"was killed by SIGKILL with 8 rows to build; .*data\.num_workers \(now 1;"):
        pending.prompts()
    with pytest.raises(DataError, match="was killed by SIGKILL"):
        pool.prompts(rows, [0])
    pool.close()


def test_a_worker_that_cannot_start_is_an_error(qwen, data_config, monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    pool = PromptPool(1)
    with pytest.raises(DataError, match="ended with exit code 1"):
        pool.prompts(PromptDataset(picture_rows(2), data_config(), qwen), [0])
    pool.close()


def test_rows_that_cannot_travel_name_the_way_out(pool, qwen, data_config):
    rows = PromptDataset(
        [{"problem": "?", "images": [], "answer": "a", "check": lambda text: True}], data_config(), qwen
    )
    with pytest.raises(DataError, match=r"rows: the rows cannot be given to another process: .*data\.num_workers=0"):
        pool.prompts(rows, [0])


def test_closing_does_not_wait_for_a_row():
    pool = PromptPool(1)
    (worker,) = pool._workers
    began = time.perf_counter()
    pool.close()
    assert worker.process.returncode == -signal.SIGKILL and time.perf_counter() - began < 5


def test_without_workers_nothing_is_built_before_it_is_needed(qwen, data_config, monkeypatch):
    rows = PromptDataset(picture_rows(4), data_config(), qwen)
    built = []
    monkeypatch.setattr(rows, "prompts", lambda indices: built.extend(indices) or list(indices))
    pending = PromptPool(0).submit(rows, [3, 1])
    assert built == [] and pending.prompts() == [3, 1] == built


@given(
    st.dictionaries(st.integers(0, 30), st.lists(st.integers(0, 12), max_size=3), max_size=20),
    st.integers(1, 4),
)
def test_shares_hold_every_row_once_and_no_picture_twice(sources, count):
    shares = share_out(sources, count)
    assert len(shares) == count and sorted(row for share in shares for row in share) == sorted(sources)
    shown = [{picture for row in share for picture in sources[row]} for share in shares]
    assert sum(map(len, shown)) == len(set().union(*shown))


def test_rows_without_common_pictures_are_shared_evenly():
    assert sorted(map(len, share_out({row: [row] for row in range(10)}, 4))) == [2, 2, 3, 3]


@pytest.mark.parametrize(
    ("asked", "cores", "processes", "expected"),
    [
        (None, 2, 1, 0),
        (None, 3, 1, 3),
        (None, 16, 1, 4),
        (None, 16, 8, 2),
        (None, 6, 8, 0),
        (3, 1, 8, 3),
        (0, 9, 1, 0),
    ],
)
def test_the_number_of_workers(monkeypatch, asked, cores, processes, expected):
    monkeypatch.setattr(workers.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_count(asked, processes) == expected
