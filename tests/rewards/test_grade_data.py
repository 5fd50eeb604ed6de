"""The grader over real answers: 600 golds of Geometry3K with their options and 304 of MATH-Vision; in every thread."""

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest

from grpo_vlm.rewards.grade import grade
from grpo_vlm.rewards.grade_answers import read
from grpo_vlm.rewards.grade_spelling import clean
from grpo_vlm.rewards.grade_values import evaluate

DATA = Path(__file__).parents[1] / "data"
ROWS = [json.loads(line) for line in (DATA / "geo3k_answers.jsonl").open(encoding="utf-8")]
EXACT = [row for row in ROWS if row["kind"] in ("frac", "sqrt", "pi")]
WRAPPINGS = (
    "{}",
    "\\boxed{{{}}}",
    "${}$",
    "The answer is {}",
    "The answer is ${}$.",
    "<think>Is it 7?</think> So it is \\boxed{{{}}}.",
    "<think>...</think><answer>{}</answer>",
    "**Answer:** {}",
)


def wrong(verdicts):
    return [(text, gold, verdict) for text, gold, verdict in verdicts if not verdict]


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_gold_grades_itself(wrapping):
    assert len(ROWS) == 600
    texts = [(wrapping.format(row["answer"]), row["answer"]) for row in ROWS]
    assert wrong((text, gold, grade(text, gold)) for text, gold in texts) == []


@pytest.mark.parametrize("with_choices", [False, True])
def test_the_other_options_are_wrong(with_choices):
    """1,800 pairs, no exception: a choice 40.84 beside the gold 13π is a rounded value, so wrong at tolerance 0."""
    others = 0
    for row in ROWS:
        for index, choice in enumerate(row["choices"]):
            verdict = grade(choice, row["answer"], choices=row["choices"] if with_choices else None)
            assert verdict.correct is (index == ord(row["letter"]) - ord("A")), (row["id"], choice, verdict)
            others += not verdict
    assert others == 1800


def test_letters_stand_for_options():
    for row in ROWS:
        given = [grade(f"\\boxed{{{letter}}}", row["answer"], choices=row["choices"]).correct for letter in "ABCD"]
        assert given == [letter == row["letter"] for letter in "ABCD"], row["id"]


def test_rounded_values_of_exact_golds_need_a_tolerance():
    rounded_golds = 0
    for row in EXACT:
        value = evaluate(read(clean(row["answer"])).node)
        rounded = f"{float(value):.2f}"
        is_exact = isinstance(value, Fraction) and Fraction(rounded) == value  # 15/2 is 7.50
        assert grade(rounded, row["answer"]).correct is is_exact, (row["id"], rounded)
        assert grade(rounded, row["answer"], tolerance=0.005), (row["id"], rounded)
        rounded_golds += not is_exact
    assert rounded_golds > 80


def test_math_vision_golds_grade_themselves():
    rows = [json.loads(line) for line in (DATA / "mathv_answers.jsonl").open(encoding="utf-8")]
    assert len(rows) == 304
    for row in rows:  # the gold is "<answer> X </answer>"
        assert grade(row["answer"], row["answer"], choices=row["choices"] or None), row
        assert grade(f"The answer is {clean(row['answer'].split()[1])}", row["answer"]), row


def test_verdicts_are_the_same_from_every_thread():
    rng = random.Random(1)
    pairs = [(rng.choice(row["choices"]), row["answer"], row["choices"]) for row in ROWS]
    matrices = [f"\\begin{{pmatrix}} {n} & 2 \\\\ 3 & 4 \\end{{pmatrix}}" for n in ("1", "\\frac22", "2")]
    pairs += [(a, b, None) for a in matrices for b in matrices]  # these go through math-verify

    def verdict(pair):
        return grade(pair[0], pair[1], choices=pair[2])

    async def as_tasks():
        return await asyncio.gather(*(asyncio.to_thread(verdict, pair) for pair in pairs))

    async def in_the_loop():
        return [verdict(pair) for pair in pairs]

    expected = [verdict(pair) for pair in pairs]
    assert [v.correct for v in expected[600:]] == [True, True, False, True, True, False, False, False, True]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(verdict, pairs)) == expected
    assert asyncio.run(as_tasks()) == expected
    assert asyncio.run(in_the_loop()) == expected
