"""`grpo-vlm reward`: what people see of their function before they train with it."""

import json
import re

import pytest

from grpo_vlm.cli import main

ROWS = [{"problem": "1/2?", "answer": "\\frac{1}{2}"}, {"problem": "6 x 8?", "answer": "48"}]
REWARD = """
import time

def score(reward_inputs):
    for item in reward_inputs:
        if item["response"] == "slow":
            time.sleep(0.2)
        if item["response"] == "bad":
            raise KeyError(item["row_id"])
    return [{"overall": item["response"].endswith(item["ground_truth"] + "}"), "length": item["response_length"]}
            for item in reward_inputs]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def cells(shown, first):
    (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {first} ")]
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_golds_in_several_wrappings_and_an_empty_answer(place, capsys):
    assert main(["reward", "reward.py:score", "--data", "rows.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert cells(shown, "thought, boxed")[1:5] == ["2", "1.000", "6.000", "0"]
    assert cells(shown, "in a sentence")[2] == cells(shown, "empty")[2] == "0.000"
    assert "slowest: rows.jsonl:" in shown and "<answer>48</answer>" in shown


def test_completions_of_a_run(place, capsys):
    lines = [("rows.jsonl:1", "\\boxed{48}"), ("rows.jsonl:0", "slow"), ("rows.jsonl:1", "bad")]
    text = "".join(json.dumps({"row_id": row, "response": text, "response_length": 9}) + "\n" for row, text in lines)
    (place / "samples.jsonl").write_text(text)
    assert main(["reward", "reward.py:score", "--data", "rows.jsonl", "--completions", "samples.jsonl"]) == 0
    shown = capsys.readouterr().out
    assert cells(shown, "samples.jsonl")[1:5] == ["3", "0.500", "9.000", "1"]
    assert "slowest: rows.jsonl:0 (samples.jsonl), 2" in shown
    assert "reward.py:score raised on row rows.jsonl:1" in shown and "KeyError" in shown


def test_the_slowest_row_may_be_one_that_was_stopped(place, capsys):
    (place / "samples.jsonl").write_text('"\\\\boxed{48}"\n"hang"\n')
    hangs = REWARD.replace("0.2)", "0.1)\n        if item['response'] == 'hang':\n            time.sleep(3600)")
    (place / "reward.py").write_text(hangs)
    arguments = ["--data", "rows.jsonl", "--completions", "samples.jsonl", "--set", "worker.reward.timeout_s=1"]
    assert main(["reward", "reward.py:score", *arguments]) == 0
    shown = capsys.readouterr().out
    slowest = re.search(r"slowest: rows.jsonl:1 \(timeout\), (\d+)\.\d ms: hang", shown)
    assert slowest and 1000 <= int(slowest[1]) < 4000, shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reward.py:scoer", "--data", "rows.jsonl"], "did you mean 'score'?"),
        (["reward.py:score", "--data", "rows.jsonl", "--completions", "gone.jsonl"], "gone.jsonl cannot be read"),
        (["reward.py:score", "--data", "rows.jsonl", "--completions", "rows.jsonl"], "no text under response"),
    ],
)
def test_what_can_be_mended_is_said(place, capsys, arguments, message):
    assert main(["reward", *arguments]) == 2
    assert message in capsys.readouterr().err
