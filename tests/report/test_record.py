"""Records are strict JSON whatever is in them."""

import json

from grpo_vlm.report import Sample, StepRecord


def test_non_finite_numbers_become_null():
    record = StepRecord(3, {"actor/pg_loss": float("nan"), "actor/lr": 1e-6}, [], {"gen": float("inf")})
    expected = {"step": 3, "timing_s/gen": None, "actor/pg_loss": None, "actor/lr": 1e-6}
    assert json.loads(record.to_json(), parse_constant=lambda name: 1 / 0) == expected


def test_metrics_win_over_seconds_of_the_same_name():
    assert StepRecord(1, {"timing_s/gen": 2.0}, [], {"gen": 1.0, "sync": 0.5}).scalars() == {
        "timing_s/gen": 2.0,
        "timing_s/sync": 0.5,
    }


def test_a_sample_is_one_line_with_any_text():
    text = "line\nbreak \u2028 \u4e2d \x1b \x00"
    sample = Sample(1, "val", "test.parquet:7", text, text, text, {"overall": 1.0}, None, 4, "length")
    line = sample.to_json()
    assert "\n" not in line
    assert json.loads(line)["response"] == text and json.loads(line)["advantage"] is None
