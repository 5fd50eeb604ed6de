"""The reward files that users start from, loaded the way a run loads them."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_vlm.rewards import RewardSample, load_reward

ROOT = Path(__file__).parents[2]


def score(spec, response, truth, **kwargs):
    sample = RewardSample("rows:0", response, 1, (), truth, [], "")
    return load_reward(spec, kwargs, base_dir=ROOT)([sample])[0]


@pytest.mark.parametrize(
    ("response", "truth", "format_", "accuracy"),
    [
        ("<think>so</think> \\boxed{4}", "4", 1, 1),
        ("<think>a\nb</think>\n\\boxed{4 \\sqrt{6}}\n", "4 \\sqrt { 6 }", 1, 1),
        ("\\boxed{\\frac{1}{2}}", "0.5", 0, 1),
        ("<think>x</think>\\boxed{2}. Wait: \\boxed{3}", "3", 1, 1),
        ("<think>x</think>\\boxed{3}. Wait: \\boxed{2}", "3", 1, 0),
        ("<think>x</think> the answer is 4", "4", 0, 0),
        ("\\boxed{4", "4", 0, 0),
        ("<think>x</think>\\boxed{}", "4", 1, 0),
        ("", "4", 0, 0),
        ("\\boxed{-8}", "- 8", 0, 1),
        ("< think >so< / think > \\boxed{4}", "4", 1, 1),
        ("<think>so</ think\n>\\boxed{1 / 2}", "0.5", 1, 1),
        ("<thi nk>so</think> \\boxed{4}", "4", 0, 1),
    ],
)
def test_geo3k(response, truth, format_, accuracy):
    result = score("rewards/geo3k.py:compute_score", response, truth)
    assert (result["format"], result["accuracy"]) == (format_, accuracy)
    assert result["overall"] == pytest.approx(0.9 * accuracy + 0.1 * format_)


def test_geo3k_weight_comes_from_the_configuration():
    assert score("rewards/geo3k.py:compute_score", "\\boxed{4}", "4", format_weight=0.5)["overall"] == 0.5


def test_every_real_answer_grades_itself():
    answers = pq.read_table(ROOT / "tests" / "data" / "geo3k_40.parquet")["answer"].to_pylist()
    reward = load_reward("rewards/geo3k.py:compute_score", base_dir=ROOT)
    samples = [RewardSample(f"r:{i}", f"\\boxed{{{a}}}", 1, (), a, [], "") for i, a in enumerate(answers)]
    assert [row["accuracy"] for row in reward(samples)] == [1.0] * 40


@pytest.mark.parametrize(
    ("response", "overall", "names_it"),
    [
        ("\\boxed{red}", 1, 1),
        (" \\boxed{red}\n", 1, 1),
        ("it is red", 0, 1),
        ("\\boxed{red} \\boxed{blue}", 0, 1),
        ("\\boxed{redder}", 0, 0),
        ("\\boxed{blue}", 0, 0),
    ],
)
def test_easyvqa(response, overall, names_it):
    assert score("rewards/easyvqa.py:compute_score", response, "red") == {"overall": overall, "names_it": names_it}
