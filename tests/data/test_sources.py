"""Several files, mixtures, URLs and ModelScope; rows of parquet files in any order in bounded memory."""

import itertools
import json
import os
import pickle
import random
import sys
from pathlib import Path

import datasets
import fsspec
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_vlm.data import PromptDataset, cache, parquet
from grpo_vlm.data.json_files import LineSource
from grpo_vlm.data.parquet import ParquetSource
from grpo_vlm.data.sources import open_source
from grpo_vlm.errors import ConfigError, DataError
from grpo_vlm.hub import model_folder
from tests.data.test_dataset import rows

GEO3K = Path(__file__).parent / "geo3k_40.parquet"
ROWS = 50


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """A cache that is empty."""
    monkeypatch.setenv("GRPO_VLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, table: list[dict], **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path, **options)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    return path


def numbered(count: int, first: int = 0) -> list[dict]:
    return [{"problem": f"question {number}", "answer": str(number)} for number in range(first, first + count)]


# ---------------------------------------------------------------- mixtures


def test_a_mixture_has_the_rows_of_its_parts_in_order(tmp_path, processor, data_config):
    first = write(tmp_path / "a.parquet", rows(3))
    second = write(tmp_path / "b.jsonl", numbered(4))
    mixed = PromptDataset(f"{first}@train[1:], {second}", data_config(), processor)
    assert mixed.validate().kept == tuple(range(6))
    assert [mixed.row_id(row) for row in (0, 1, 2, 5)] == [
        "a.parquet@train[1:]:0",
        "a.parquet@train[1:]:1",
        "b.jsonl:0",
        "b.jsonl:3",
    ]
    assert [prompt.ground_truth for prompt in mixed.prompts([5, 0, 2, 0])] == ["3", "1", "0", "1"]
    assert mixed.source.rows(1, 4) == [*open_source(str(first)).rows(2, 3), *numbered(2)]
    assert [row for batch in mixed.source.batches() for row in batch] == mixed.source.rows(0, 6)


def test_parts_of_different_shapes_are_each_read_as_they_are(tmp_path, processor, data_config):
    r1v = [{"problem": "How many?", "image": None, "solution": "<answer> 3 </answer>"}]
    mixed = f"{write(tmp_path / 'a.jsonl', numbered(1))},{write(tmp_path / 'b.parquet', r1v)}"
    prompts = PromptDataset(mixed, data_config(prompt_key="prompt"), processor)
    assert [schema.name for schema in prompts.schemas.values()] == ["easyr1", "r1v"]
    assert [prompt.ground_truth for prompt in prompts] == ["0", "3"]


def test_parts_of_the_same_name_stay_apart(tmp_path):
    one, two = write(tmp_path / "one" / "a.jsonl", numbered(2)), write(tmp_path / "two" / "a.jsonl", numbered(2))
    source = open_source(f"{one},{two},{two}")
    assert [source.row_id(row) for row in (0, 2, 4)] == [f"{one}:0", f"{two}:0", f"{two}(2):0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{a},", "path of the data set is empty"),
        ("{a}, ,{a}", "path of the data set is empty"),
        ("{a},{a}x", "does not exist"),
        ("{a}@", "name the split"),
        ("{a},{empty}", "empty.jsonl: there are no rows"),
    ],
)
def test_a_faulty_part_is_named(tmp_path, text, message):
    write(tmp_path / "empty.jsonl", [])
    names = {"a": str(write(tmp_path / "a.jsonl", numbered(2))), "empty": str(tmp_path / "empty.jsonl")}
    with pytest.raises(DataError, match=message):
        open_source(text.format(**names))


def test_a_path_with_a_comma_is_a_path(tmp_path):
    assert len(open_source(str(write(tmp_path / "a,b.jsonl", numbered(3))))) == 3


# ---------------------------------------------------------------- URLs


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_a_url_gives_the_rows_of_the_file(tmp_path, own_cache, name):
    local = tmp_path / name
    if name.endswith(".json"):
        local.write_text(json.dumps(numbered(5)))
    else:
        write(local, numbered(5))
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/sources/{name}", local.read_bytes())
    source = open_source(f"memory://sources/{name}@train[:4]")
    assert source.rows(0, 9) == numbered(4) and source.row_id(3) == f"{name}@train[:4]:3"
    memory.pipe(f"/sources/{name}", (json.dumps(numbered(1, 7)[0])).encode() if name.endswith("l") else b"[")
    if name.endswith("l"):  # what changed at the address is read again, and the old copy is gone
        assert open_source(f"memory://sources/{name}").rows(0, 9) == numbered(1, 7)
        assert len(list((own_cache / "remote").glob("*/*/"))) == 1


def test_a_url_of_a_folder(tmp_path, own_cache):
    memory = fsspec.filesystem("memory")
    for split, count in (("train", 3), ("test", 2)):
        memory.pipe(f"/set/{split}.parquet", write(tmp_path / f"{split}.parquet", numbered(count)).read_bytes())
    source = open_source("memory://set@test")
    assert source.rows(0, 9) == numbered(2) and source.row_id(1) == "set@test:1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere/a.parquet", r"memory://nowhere/a\.parquet does not exist; check the address"),
        ("nosuch://bucket/a.parquet", r"nosuch:// is no kind of address that fsspec knows \(.*\bmemory\b"),
        ("s3://bucket/a.parquet", r"reading s3:// needs another package: Install s3fs.* Run `pip install s3fs`"),
    ],
)
def test_addresses_that_cannot_be_opened(url, message):
    with pytest.raises(DataError, match=message):
        open_source(url)


def test_a_device_is_no_file():
    with pytest.raises(DataError, match="/dev/null is a device or a pipe, not a file"):
        open_source("/dev/null")


def test_hdfs_without_hadoop_says_what_is_missing():
    with pytest.raises(DataError, match=r"hdfs://.*cannot be (reached|used): \w+: "):
        open_source("hdfs://namenode:9000/a.parquet")


# ---------------------------------------------------------------- ModelScope


@pytest.mark.parametrize("call", [lambda: open_source("org/set"), lambda: model_folder("org/model")])
def test_without_modelscope_the_error_names_it(monkeypatch, call):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    with pytest.raises(
        (DataError, ConfigError), match=r"'org/\w+'.*modelscope is not installed; run `pip install mod"
    ):
        call()
    assert "modelscope" not in sys.modules


def test_modelscope_is_asked_for_models_and_sets_and_only_when_it_is_to_be(tmp_path, monkeypatch):
    """Its client is stood in for by one with the same two functions, since it needs a network."""
    write(tmp_path / "org" / "set" / "train.jsonl", numbered(2))
    package = tmp_path / "packages" / "modelscope" / "hub"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "snapshot_download.py").write_text(
        "def snapshot_download(model_id):\n    return f'/models/{model_id}'\n"
        "def dataset_snapshot_download(dataset_id):\n"
        "    if dataset_id != 'org/set':\n        raise ValueError('no such set')\n"
        f"    return {str(tmp_path)!r} + '/' + dataset_id\n"
    )
    monkeypatch.syspath_prepend(str(package.parent.parent))
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "0")
    assert model_folder("org/model") == "org/model"
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "true")
    assert model_folder("org/model") == "/models/org/model" and model_folder(str(tmp_path)) == str(tmp_path)
    assert open_source("org/set").rows(0, 5) == numbered(2)
    with pytest.raises(DataError, match="'org/other' cannot be had from ModelScope: ValueError: no such set"):
        open_source("org/other")
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "maybe")
    with pytest.raises(ConfigError, match="USE_MODELSCOPE_HUB=maybe"):
        model_folder("org/model")


# ---------------------------------------------------------------- parquet in bounded memory


def big_rows(count: int, size: int) -> list[dict]:
    draw = random.Random(0)
    return [
        {"problem": f"q{n}", "answer": str(n), "images": [{"bytes": draw.randbytes(size), "path": None}]}
        for n in range(count)
    ]


@pytest.mark.parametrize("group", [7, ROWS])
@pytest.mark.parametrize("kept", [1, 64 << 20])
def test_rows_in_any_order_are_those_of_the_file(tmp_path, own_cache, monkeypatch, group, kept):
    """Row groups as they are, one kept or all; and one row group, which is copied by rows."""
    monkeypatch.setattr(parquet, "KEPT_BYTES", kept)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 100_000)
    monkeypatch.setattr(parquet, "BATCH_BYTES", 40_000)
    table = big_rows(ROWS, 9_000)
    source = ParquetSource([write(tmp_path / "a.parquet", table, row_group_size=group)], "a.parquet")
    assert (own_cache / "rows").exists() == bool(source.notes) == (group == ROWS and kept == 1)
    order = random.Random(1).sample(range(ROWS), ROWS)
    assert [source.rows(row, row + 1)[0] for row in order] == [table[row] for row in order]
    assert source.rows(3, 41) == table[3:41] and source.rows(48, 99) == table[48:]
    assert list(itertools.chain(*source.batches())) == table
    source.select(10, 20)
    assert source.rows(0, 99) == table[10:20] == list(itertools.chain(*source.batches()))


def test_a_column_is_read_without_the_others(tmp_path, own_cache):
    """The pictures' bytes in the file are wiped out, and the column is still there; also of parts without it."""
    table = [row | {"data_source": f"s{number % 3}"} for number, row in enumerate(big_rows(ROWS, 900))]
    path = write(tmp_path / "a.parquet", table, row_group_size=7, use_dictionary=False, compression="none")
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    content = bytearray(path.read_bytes())
    for chunk in chunks:
        if chunk.path_in_schema.endswith("bytes"):
            first, size = chunk.data_page_offset, chunk.total_compressed_size
            content[first : first + size] = bytes(size)
    path.write_bytes(content)
    write(tmp_path / "b.jsonl", [{"problem": "q", "answer": "a", "data_source": "s9"}] * 9)
    write(tmp_path / "c.parquet", numbered(4))
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(table[:5]).save_to_disk(saved)
    source = open_source(f"{path}@train[10:30],{tmp_path / 'b.jsonl'},{tmp_path / 'c.parquet'},{saved}")
    expected = [row["data_source"] for row in table[10:30]] + ["s9"] * 9 + [None] * 4
    expected += [row["data_source"] for row in table[:5]]
    assert list(source.column("data_source")) == expected and len(source) == len(expected)
    assert list(source.column("nowhere")) == [None] * len(source)
    assert list(open_source(table).column("answer")) == [row["answer"] for row in table]
    with pytest.raises(DataError, match="cannot be read"):
        source.rows(0, 1)


def test_a_copy_by_rows_is_used_again_and_made_again_when_the_file_changes(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    path = write(tmp_path / "a.parquet", numbered(5))
    open_source(str(path))
    (copy,) = (own_cache / "rows").glob("*/*/")
    made = (copy / "rows.arrow").stat()
    assert open_source(str(path)).rows(0, 9) == numbered(5)
    again = (copy / "rows.arrow").stat()
    assert (again.st_ino, again.st_ctime_ns) == (made.st_ino, made.st_ctime_ns)
    stat = path.stat()
    write(path, numbered(5, 3))  # as large and as old as before
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert open_source(str(path)).rows(0, 9) == numbered(5, 3)
    assert len(list((own_cache / "rows").glob("*/*/"))) == 1


def test_categories_and_metadata_survive_the_copy(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"kind": column, "n": [1, 2, 3]}), tmp_path / "a.parquet", row_group_size=2)
    assert [row["kind"] for row in open_source(str(tmp_path / "a.parquet")).rows(0, 3)] == ["a", "b", "a"]


def test_a_disk_without_room_is_an_error_that_names_the_way_out(tmp_path, own_cache, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    path = write(tmp_path / "a.parquet", numbered(5))
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: cache.shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(DataError, match=r"needs about 0\.0 GB in .*which has 0\.0 GB left; .*GRPO_VLM_CACHE"):
        open_source(str(path))
    monkeypatch.setenv("GRPO_VLM_CACHE", str(path))
    with pytest.raises(DataError, match=r"cannot be written .*GRPO_VLM_CACHE"):
        open_source(str(path))


def test_a_set_larger_than_what_is_kept_is_drawn_shuffled_in_little_memory(tmp_path, own_cache):
    """160 MB in one row group, of random bytes so that nothing is compressed."""
    path = tmp_path / "a.parquet"
    write(path, big_rows(160, 1_000_000), row_group_size=160)
    process = psutil.Process()
    source = ParquetSource([path], "a.parquet")
    assert source.notes == ["a.parquet: has row groups of up to 160 MB; rows are drawn from a copy in the cache"]
    before, most = process.memory_info().rss, 0
    for row in random.Random(0).sample(range(160), 160):
        assert source.rows(row, row + 1)[0]["problem"] == f"q{row}"
        most = max(most, process.memory_info().rss)
    for batch in source.batches():
        assert sum(len(row["images"][0]["bytes"]) for row in batch) <= parquet.CHECKED_BYTES
        most = max(most, process.memory_info().rss)
    assert sum(table.nbytes for table in source._kept.values()) <= parquet.KEPT_BYTES
    assert most - before < 140e6  # 64 MiB kept, 32 MiB given out; the set would be 160


def test_damaged_pages_name_file_rows_and_remedy(tmp_path, own_cache, monkeypatch, processor, data_config):
    path = write(tmp_path / "a.parquet", big_rows(20, 3_000), row_group_size=10)
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(2).data_page_offset
    content[start : start + 20] = b"x" * 20
    path.write_bytes(content)
    place = r"a\.parquet, rows 10 to 19: cannot be read: \w+: .*"
    with pytest.raises(DataError, match=place + "write or download the file again"):
        PromptDataset(str(path), data_config(), processor).validate()

    def nested(*arguments, **options):
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetFile, "read_row_group", nested)
        with pytest.raises(DataError, match=r"rows 0 to 9: .*Nested data.*row_group_size=1000"):
            open_source(str(path)).rows(0, 1)
    monkeypatch.setattr(parquet, "KEPT_BYTES", 1)
    monkeypatch.setattr(parquet, "GROUP_BYTES", 1)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: \w+: .*; write or download the file again"):
        open_source(str(path))
    source = open_source(str(write(tmp_path / "b.parquet", numbered(3))))
    (copy,) = (own_cache / "rows").glob("*/*/rows.arrow")
    copy.write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.parquet, rows 0 to 2: .*delete .*, the copy in the cache"):
        source.rows(0, 1)


# ---------------------------------------------------------------- lines


def test_lines_are_found_again_whatever_stands_between_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xb6"}\r\n\r\n{"b": 2}\n  \n{"a": 3}')
    source = LineSource(path, "a.jsonl")
    assert source.columns == ["a", "b"] and source.rows(0, 9) == [{"a": "ö"}, {"b": 2}, {"a": 3}]
    assert source.rows(2, 3) == [{"a": 3}] and list(source.batches()) == [source.rows(0, 3)]
    source.select(1, 3)
    assert source.rows(0, 9) == [{"b": 2}, {"a": 3}] and len(source) == 2


def test_the_rows_of_a_file_with_lines_are_not_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(60):
            file.write(json.dumps({"problem": "x" * 1_000_000, "answer": number}) + "\n")
    process = psutil.Process()
    before = process.memory_info().rss
    source = LineSource(path, "a.jsonl")
    assert [source.rows(row, row + 1)[0]["answer"] for row in (59, 0, 31)] == [59, 0, 31]
    assert max(len(batch) for batch in source.batches()) <= 34
    assert process.memory_info().rss - before < 50e6


# ---------------------------------------------------------------- never what a file held before


def csv_file(path: Path, table: list[dict]) -> None:
    path.write_text("problem,answer\n" + "".join(f"{row['problem']},{row['answer']}\n" for row in table))


@pytest.mark.parametrize("split", ["train", "train[:2]"])
@pytest.mark.parametrize("file", ["set/train.jsonl", "set/train.parquet", "set/train.csv", "a.jsonl", "a.parquet"])
def test_a_file_of_the_same_size_and_time_is_read_anew(tmp_path, own_cache, file, split):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    put = csv_file if path.suffix == ".csv" else write
    name = f"{path.parent if file.startswith('set') else path}@{split}"
    put(path, numbered(3))
    stat, source = path.stat(), open_source(name)
    before = source.digest()
    assert [row["problem"] for row in source.rows(0, 2)] == ["question 0", "question 1"]
    put(path, numbered(3, 5))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = open_source(name)
    assert path.stat().st_size == stat.st_size and after.digest() != before
    assert [row["problem"] for row in after.rows(0, 2)] == ["question 5", "question 6"]
    assert open_source(name).digest() == after.digest() and len(after) == (2 if ":" in split else 3)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: write(path, numbered(3, 5))])
def test_a_file_that_changes_while_it_is_in_use_is_not_read_on(tmp_path, own_cache, name, spoil):
    path = write(tmp_path / name, numbered(3))
    source = pickle.loads(pickle.dumps(open_source(str(path))))  # as a worker gets it
    spoil(path)
    with pytest.raises(DataError, match=rf"{name} has been changed or moved since it was opened; .*start it again"):
        source.rows(0, 1)


def test_one_of_several_configurations_of_a_folder(tmp_path, own_cache):
    folder = tmp_path / "set"
    for name, first in (("a", 0), ("b", 5)):
        write(folder / f"{name}.jsonl", numbered(3, first))
    parts = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (folder / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    with pytest.raises(DataError, match=rf"Config name is missing.*'a', 'b'.*; write {folder}:CONFIG@train"):
        open_source(str(folder))
    source = open_source(f"{folder}:b@train[:2],{folder}:a")
    assert source.rows(0, 9) == [*numbered(2, 5), *numbered(3)] and source.row_id(1) == "set:b@train[:2]:1"
    with pytest.raises(DataError, match="BuilderConfig 'c' not found"):
        open_source(f"{folder}:c")
    with pytest.raises(DataError, match=r"x\.csv does not exist"):
        open_source("x.csv")
