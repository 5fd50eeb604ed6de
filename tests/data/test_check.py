"""`grpo-vlm data check`: rows in = rows out + itemised drops, in every shape; what it prints and its exit code."""

import base64
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from rich.console import Console

from grpo_vlm.cli import main as cli
from grpo_vlm.data import PromptDataset
from grpo_vlm.data.check import _step, check, stand_in
from tests.data.test_dataset import png
from tests.tiny import tiny_model

FILE = Path(__file__).parent / "geo3k_40.parquet"
GEO3K = pq.read_table(FILE).to_pylist()


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """A terminal in which no line of a table is broken."""
    monkeypatch.setenv("COLUMNS", "200")


def uri(image: dict) -> str:
    return f"data:image/png;base64,{base64.b64encode(image['bytes']).decode()}"


def parts(row: dict) -> list[dict]:
    text = {"type": "text", "text": row["problem"].removeprefix("<image>")}
    return [{"type": "image_url", "image_url": {"url": uri(row["images"][0])}}, text]


def user(content) -> list[dict]:
    return [{"role": "user", "content": content}]


SHAPES = {  # each the same question, picture and answer as EasyR1's row
    "easyr1": lambda row: {"images": row["images"], "problem": row["problem"], "answer": row["answer"]},
    "verl": lambda row: {
        "data_source": "geo3k",
        "prompt": user(row["problem"]),
        "images": row["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": row["source_id"]},
    },
    "trl": lambda row: {
        "prompt": user(row["problem"].removeprefix("<image>")),
        "image": row["images"][0],
        "answer": row["answer"],
    },
    "r1v": lambda row: {
        "image": row["images"][0],
        "problem": row["problem"].removeprefix("<image>"),
        "solution": f"<answer> {row['answer']} </answer>",
    },
    "openai": lambda row: {"messages": user(parts(row)), "answer": row["answer"]},
}


def written(table: list[dict], path: Path) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in table))
    return path


def report(path: Path | str, *items: str, capsys) -> tuple[int, str]:
    """Exit code and what is printed, boxes and line breaks of the tables removed."""
    code = cli(["data", "check", str(path), *items])
    printed = capsys.readouterr()
    return code, re.sub(r"[│┃┏┓┗┛━─┳┻╇┡┩┴┼├┤└┘\s]+", " ", printed.out + printed.err)


@pytest.mark.parametrize("shape", SHAPES)
def test_geo3k_in_every_shape_and_back(shape, tmp_path, processor, data_config):
    path = written([SHAPES[shape](row) for row in GEO3K], tmp_path / ("a.jsonl" if shape == "openai" else "a.parquet"))
    rows = PromptDataset(str(path), data_config(prompt_key="prompt", max_prompt_length=2000), processor)
    assert rows.schemas["a.jsonl" if shape == "openai" else "a.parquet"].name == shape
    verdict = check(str(path), rows.settings, processor, Console(quiet=True))
    assert len(verdict.kept) == 40 and not (verdict.overlong or verdict.skipped or verdict.faults)
    original = PromptDataset(str(FILE), data_config(max_prompt_length=2000), processor)
    for ours, theirs in zip(rows, original, strict=True):
        assert (ours.token_ids, ours.image_keys) == (theirs.token_ids, theirs.image_keys)
        assert ours.ground_truth == theirs.ground_truth


@pytest.mark.parametrize(("limit", "filtering"), [(2000, True), (90, True), (90, False)])
def test_rows_in_are_rows_out_and_itemised_drops(limit, filtering, tmp_path, processor, data_config):
    """Bad pictures, bad rows and long rows at once, with each policy."""
    table = [SHAPES["easyr1"](row) for row in GEO3K[:12]]
    table[3]["images"] = [{"bytes": png()[:60], "path": None}]
    table[7]["answer"] = None
    table[8]["images"] = []
    for policy, faults, skipped in (("error", 3, 0), ("skip", 2, 1)):
        config = data_config(max_prompt_length=limit, filter_overlong_prompts=filtering, on_bad_media=policy)
        verdict = check(str(written(table, tmp_path / "a.parquet")), config, processor, Console(quiet=True))
        long = [
            row for row in (verdict.overlong if filtering else verdict.faults) if limit == 90 and "tokens" in str(row)
        ]
        named = [row_id for row_id, _ in (*verdict.overlong, *verdict.skipped, *verdict.faults)]
        assert len(verdict.kept) + len(named) == 12 and len(set(named)) == len(named)
        assert len(verdict.skipped) == skipped and {"a.parquet:3", "a.parquet:7", "a.parquet:8"} <= set(named)
        if limit == 2000:
            assert len(verdict.faults) == faults and len(verdict.kept) == 9
        else:
            assert bool(verdict.overlong) == filtering and len(verdict.kept) < 9
            assert long or filtering


def test_the_report_of_a_sound_file(tmp_path, capsys):
    model = tiny_model("qwen2_5_vl", tmp_path)
    code, text = report(
        FILE,
        f"worker.actor.model.model_path={model}",
        "data.format_prompt=configs/prompts/boxed.jinja",
        "data.max_prompt_length=100",
        capsys=capsys,
    )
    assert code == 0 and "model_path is set" not in text
    assert "easyr1 rows: question in 'problem', answer in 'answer'" in text
    dropped, usable = (int(re.search(rf"{name} (\d+)", text)[1]) for name in ("tokens, left out", "usable"))
    assert "in the source 40" in text and "faulty 0" in text and dropped + usable == 40 and dropped > 0
    assert sum(int(n) for n in re.findall(r"\d+-\d+ (\d+) ", text)) == 40  # the histogram has every row
    longest = re.search(rf"Longest of the {dropped} rows left out: {min(dropped, 10)} \S+: (\d+) tokens", text)[1]
    assert f"data.max_prompt_length={longest} keeps all rows (now 100), a lower data.max_pixels (now 4194304)" in text
    assert "pictures: 40 (" in text and "picture width, pixels" in text
    assert text.count("As it will be sent: geo3k_40.parquet:") == 3 and "<|image_pad|>" in text
    assert "Answer in \\boxed{}" in text and "right answer" in text and "pixels, RGB" in text


def test_faults_are_all_listed_and_the_exit_code_is_2(tmp_path, capsys):
    rows = [{"problem": "<image>?" if n % 2 else "?", "images": [], "answer": "[b]x[/b]"} for n in range(40)]
    path = written(rows, tmp_path / "a.jsonl")
    code, text = report(path, capsys=capsys)
    assert code == 2 and "faulty 20" in text and "Faults: 20" in text
    assert all(f"a.jsonl:{n}: 1 <image> marks" in text for n in range(1, 40, 2))
    assert "No worker.actor.model.model_path is set" in text and "right answer [b]x[/b]" in text


@pytest.mark.parametrize("keys", [(), ("data.allow_empty_answer=true",)])
def test_rows_without_a_right_answer_are_faults_or_counted_and_named(keys, tmp_path, capsys, processor, data_config):
    """One among others is a fault, and is counted where it is allowed; a set without any is told."""
    table = [{"messages": user(f"{n}?"), "answer": "" if n in (2, 3, 5, 6) else "a"} for n in range(8)]
    code, text = report(written(table, tmp_path / "a.jsonl"), *keys, capsys=capsys)
    note = "4 of 8 rows have no right answer (a.jsonl:2, a.jsonl:3, a.jsonl:5, ...): the reward gets an empty ground_t"
    if keys:
        assert code == 0 and note in text and "of them without a right answer 4" in text
    else:
        assert code == 2 and "Faults: 4" in text and "a.jsonl:6: column 'answer' is empty; fill" in text
    path = written([{"messages": user("a?")}, {"messages": user("b?")}], tmp_path / "b.jsonl")
    code, text = report(path, *keys, capsys=capsys)
    assert code == 0 and "2 of 2 rows have no right answer (b.jsonl:0, b.jsonl:1): the reward" in text
    assert "no answers (ground_truth is empty; data.answer_key names their column)" in text
    rows = PromptDataset(str(path), data_config(prompt_key="messages"), processor)
    (note,) = rows.validate().notes
    assert note == rows.validate().notes[0] and note.startswith("2 of 2 rows have no right answer")  # from the cache
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [*user("a?"), {"role": "assistant", "content": "b"}]}))
    code, text = report(tmp_path / "c.jsonl", *keys, capsys=capsys)
    assert code == 0 and "answer in the last message of 'messages'" in text and "no right answer" not in text


def test_both_files_of_a_configuration_are_checked(tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        written([{"problem": "?", "answer": name}], tmp_path / f"{name}.jsonl")
    (tmp_path / "c.yaml").write_text(f"data: {{train_files: {tmp_path}/a.jsonl, val_files: {tmp_path}/b.jsonl}}")
    code, text = report("--config", str(tmp_path / "c.yaml"), capsys=capsys)
    assert code == 0 and "a.jsonl:0" in text and "b.jsonl:0" in text


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((), "name what to check"),
        (("gone.parquet",), "gone.parquet does not exist"),
        (("data.min_pixel=3",), "data.min_pixels"),
    ],
)
def test_what_cannot_be_checked(items, message, capsys):
    assert cli(["data", "check", *items]) == 2
    assert message in capsys.readouterr().err


def test_moving_pictures_and_videos_are_shown(tmp_path, capsys):
    frames = [Image.new("RGB", (80, 60), (30 * n, 0, 0)) for n in range(8)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=125)
    rows = [
        {"problem": "<image>?", "images": ["a.gif"], "videos": None, "answer": "a"},
        {"problem": "<video>?", "images": None, "videos": ["a.gif"], "answer": "b"},
    ]
    path = written(rows, tmp_path / "a.jsonl")
    code, text = report(path, f"data.image_dir={tmp_path}", capsys=capsys)
    assert code == 0 and "Moving pictures, first frame used: 1 a.jsonl:0" in text
    assert "videos: 1" in text and "video frames in the file 8 8 8" in text


def test_without_a_model_pictures_are_counted_as_qwen_does():
    processor = stand_in()
    assert (processor.image_processor.size["shortest_edge"], processor.image_processor.size["longest_edge"]) == (
        3136,
        12845056,
    )
    made = processor.image_processor(images=[Image.new("RGB", (560, 560))], return_tensors="pt")
    assert made["image_grid_thw"].prod() // 4 == 400


@pytest.mark.parametrize(
    ("width", "step"), [(0, 1), (1, 1), (1.5, 2), (3, 5), (6, 10), (12, 20), (21, 50), (400, 500)]
)
def test_the_histogram_has_round_steps(width, step):
    assert _step(width) == step
