"""The reward files that users start from, loaded the way a run loads them."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards import RewardSample, load_reward

ROOT = Path(__file__).parents[2]


def score(spec, response, truth, *, length=1, prompt="", columns=None, images=(), **kwargs):
    sample = RewardSample("rows:0", response, length, (), truth, [], prompt, columns or {}, list(images))
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
        ("<think>\\boxed{4}", "4", 0, 1),
        ("<think>x</think>\\boxed{4 or 5}", "4", 1, 0),
        ("<think>x</think>\\boxed{5\\text{ cm}}", "5 m", 1, 0),
        ("<think>x</think>$\\boxed{5}$ cm", "5 m", 1, 0),
        ("<think>x</think>$\\boxed{5}$ cm", "50 mm", 1, 1),
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


GEO3K, R1V, DAPO = (f"rewards/{name}.py:compute_score" for name in ("geo3k", "r1v", "dapo"))


@pytest.mark.parametrize(
    ("spec", "response"), [(GEO3K, "so</think> \\boxed{4}"), (R1V, "so</think>\n<answer>4</answer>")]
)
def test_a_prefilled_think_counts_for_the_format(spec, response):
    """A template that ends the prompt with <think> takes it away from the response."""
    assert score(spec, response, "4", prompt="<|im_start|>assistant\n<think>\n")["overall"] == 1
    bare = score(spec, response, "4", prompt="<|im_start|>assistant\n")
    assert (bare["format"], bare["accuracy"]) == (0, 1)


def test_geo3k_tolerance_comes_from_the_configuration():
    assert score(GEO3K, "\\boxed{3.14}", "\\pi")["accuracy"] == 0
    assert score(GEO3K, "\\boxed{3.14}", "\\pi", tolerance=0.005)["accuracy"] == 1


@pytest.mark.parametrize(
    ("response", "format_", "accuracy"),
    [
        ("<think>so</think> <answer>4</answer>", 1, 1),
        ("<think>a\nb</think>\n<answer>\n4\n</answer>\n", 1, 1),
        ("<think>so</think> <answer>5</answer>", 1, 0),
        ("<think>so</think> <answer>A or B or 4</answer>", 1, 0),
        ("<think>so</think> It is <answer>4</answer>", 0, 1),
        ("<think>so</think> \\boxed{4}", 0, 1),
        ("<answer>4</answer>", 0, 1),
        ("<think>so</think> <answer></answer>", 1, 0),
        ("", 0, 0),
    ],
)
def test_r1v(response, format_, accuracy):
    expected = {"overall": 0.5 * accuracy + 0.5 * format_, "format": format_, "accuracy": accuracy}
    assert score(R1V, response, "4") == expected


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("Answer: 4", 1),
        ("answer :  $4$.", 1),
        ("Answer: 5\nNo.\nAnswer: 4", 1),
        ("Answer: 4\nAnswer: 5", -1),
        ("Answer: 4" + " " * 300, -1),
        ("the answer is 4", -1),
        ("\\boxed{4}", -1),
        ("", -1),
    ],
)
def test_dapo_accuracy(response, accuracy):
    limits = {"max_response_length": 100, "overlong_buffer_length": 20, "overlong_penalty_factor": 1.0}
    assert score(DAPO, response, "4", **limits) == {
        "overall": accuracy,
        "accuracy": accuracy,
        "overlong": 0.0,
        "accuracy_normalized": (accuracy + 1) / 2,
    }


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (80, 0), (85, -0.25), (100, -1), (101, -1), (5000, -1)])
def test_overlong_penalty(length, penalty):
    limits = {"max_response_length": 100, "overlong_buffer_length": 20}
    dapo = score(DAPO, "Answer: 4", "4", length=length, overlong_penalty_factor=0.5, **limits)
    assert (dapo["overlong"], dapo["overall"]) == (penalty, 1 + 0.5 * penalty)
    assert score("rewards/length.py:compute_score", "", "4", length=length, **limits) == {"overall": penalty}


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_buffer_must_fit(buffer):
    with pytest.raises(RewardError, match=f"overlong_buffer_length is {buffer}; it must be 1 to max_response_length"):
        score("rewards/length.py:compute_score", "", "", max_response_length=100, overlong_buffer_length=buffer)


@pytest.mark.parametrize(
    ("response", "truth", "format_", "accuracy"),
    [
        ("<answer>B</answer>", "B", 1, 1),
        ("<think>A?</think><answer>12 cm</answer>", "B", 1, 1),
        ("\\boxed{B. 12 cm}", "12 cm", 1, 1),
        ("\\boxed{B. 10 cm}", "B", 1, 0),
        ("<answer>A or B</answer>", "B", 1, 0),
        ("The answer is B.", "B", 0, 1),
        ("<answer></answer>", "B", 0, 0),
    ],
)
def test_choice(response, truth, format_, accuracy):
    result = score("rewards/choice.py:compute_score", response, truth, columns={"choices": ["10 cm", "12 cm"]})
    assert (result["format"], result["accuracy"]) == (format_, accuracy)
    assert result["overall"] == pytest.approx(0.9 * accuracy + 0.1 * format_)


def test_choice_without_the_column_reads_letters():
    assert score("rewards/choice.py:compute_score", "\\boxed{(B)}", "B", columns={"choices": None})["accuracy"] == 1
    assert (
        score("rewards/choice.py:compute_score", "\\boxed{C}", "B", columns={"options": ["1", "2"]})["accuracy"] == 0
    )


@pytest.mark.parametrize(
    ("response", "accuracy", "near"),
    [
        ("<answer>8</answer>", 1, 1),
        ("<think>1, 2, ...</think><answer>There are eight cubes.</answer>", 1, 1),
        ("<answer>6</answer>", 0, 0.75),
        ("<answer>80</answer>", 0, 0),
        ("<answer>7 or 8</answer>", 0, 0),
        ("I see 3 red and 5 blue cubes", 0, 0),
    ],
)
def test_counting(response, accuracy, near):
    for weight in (0.0, 0.5):
        result = score("rewards/counting.py:compute_score", response, "8", near_weight=weight)
        overall = (1 - weight) * accuracy + weight * near
        assert result == {"overall": overall, "accuracy": accuracy, "near": near}


GROUNDING = "rewards/grounding.py:compute_score"
# one box of a picture of 1000 x 500 pixels that the model saw as 504 x 252
SPACES = {"original": [100, 50, 600, 300], "resized": [50.4, 25.2, 302.4, 151.2], "thousandths": [100, 100, 600, 600]}
PICTURE = {"columns": {"width": 1000, "height": 500}, "images": [Image.new("RGB", (504, 252))]}


@pytest.mark.parametrize("answer_space", SPACES)
@pytest.mark.parametrize("gold_space", SPACES)
def test_grounding_knows_three_spaces(answer_space, gold_space):
    spaces = {"answer_space": answer_space, "gold_space": gold_space}
    answer, gold = f"<answer>{SPACES[answer_space]}</answer>", str(SPACES[gold_space])
    assert score(GROUNDING, answer, gold, **spaces, **PICTURE) == pytest.approx({"overall": 1, "iou": 1, "format": 1})


@pytest.mark.parametrize(
    ("response", "gold", "iou", "format_"),
    [
        ("[0, 0, 10, 10]", "[0, 0, 10, 20]", 0.5, 1),
        ("[0, 0, 10, 10]", "[10, 10, 20, 20]", 0, 1),
        ("<think>[0,0,1,1]</think>[[0, 0, 10, 10]]", "[[0, 0, 10, 10]]", 1, 1),
        ('```json\n[{"bbox_2d": [0, 0, 10, 10], "label": "cat"}]\n```', '{"bbox_2d": [0, 0, 10, 10]}', 1, 1),
        ("[[20, 0, 30, 10], [0, 0, 10, 10]]", "[[0, 0, 10, 10], [20, 0, 30, 10]]", 1, 1),  # another order
        ("[[0, 0, 10, 10]]", "[[0, 0, 10, 10], [20, 0, 30, 10]]", 0.5, 1),  # one missing
        ("[[0, 0, 10, 10], [0, 0, 10, 10]]", "[0, 0, 10, 10]", 0.5, 1),  # the same one twice
        ("[[0, 0, 10, 10], [0, 0, 10, 9]]", "[[0, 0, 10, 10], [0, 0, 10, 10]]", 0.95, 1),
        ("[10, 10, 0, 0]", "[0, 0, 10, 10]", 0, 0),  # corners swapped
        ('["0", "0", "10", "10"]', "[0, 0, 10, 10]", 0, 0),
        ("[0, 0, 10]", "[0, 0, 10, 10]", 0, 0),
        ("[0, 0, NaN, 10]", "[0, 0, 10, 10]", 0, 0),
        ("[0, 0, 1" + "0" * 5000 + ", 10]", "[0, 0, 10, 10]", 0, 0),
        ("[0, 0, 10, 10", "[0, 0, 10, 10]", 0, 0),
        ("[" * 100000, "[0, 0, 10, 10]", 0, 0),
        ("[]", "[0, 0, 10, 10]", 0, 0),
        ("null", "[0, 0, 10, 10]", 0, 0),
        ('[{"box": 3}]', "[0, 0, 10, 10]", 0, 0),
        ("", "[0, 0, 10, 10]", 0, 0),
    ],
)
def test_grounding(response, gold, iou, format_):
    result = score(GROUNDING, response, gold, answer_space="thousandths", gold_space="thousandths")
    assert result == pytest.approx({"overall": 0.9 * iou + 0.1 * format_, "iou": iou, "format": format_})


def test_grounding_names_a_wrong_gold_and_a_wrong_space():
    with pytest.raises(RewardError, match="the gold 'cat' is no JSON box"):
        score(GROUNDING, "[0, 0, 1, 1]", "cat", gold_space="thousandths")
    with pytest.raises(RewardError, match="'pixels'"):
        score(GROUNDING, "[0, 0, 1, 1]", "[0, 0, 1, 1]", gold_space="pixels")
