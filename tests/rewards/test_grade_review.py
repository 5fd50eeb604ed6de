"""Pairs a reviewer found graded wrongly, each fault with pairs on both sides of the line."""

import json
from pathlib import Path

import pytest

from grpo_vlm.rewards.grade import grade

FILE = Path(__file__).parents[1] / "data" / "grader_review_pairs.jsonl"
PAIRS = [json.loads(line) for line in FILE.open(encoding="utf-8")]


def test_both_directions_are_there():
    assert sum(pair["right"] for pair in PAIRS) > 80
    assert sum(not pair["right"] for pair in PAIRS) > 80


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair['gold']} | {pair['pred']}")
def test_reviewed_pairs(pair):
    verdict = grade(pair["pred"], pair["gold"], **pair.get("options", {}))
    assert verdict.correct is pair["right"], verdict
