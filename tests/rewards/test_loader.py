"""Reward functions in the three forms, and every way in which one can be wrong."""

import functools

import numpy as np
import pytest
import torch

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards import RewardSample, load_reward


def sample(index=0, response="4", truth="4", **columns):
    return RewardSample(
        row_id=f"rows:{index}",
        response=response,
        response_length=7,
        token_ids=(1, 2, 3),
        ground_truth=truth,
        prompt_messages=[{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}],
        prompt_text="<|im_start|>user\n2 + 2?",
        columns=columns,
        images=["picture"],
    )


SAMPLES = [sample(0), sample(1, response="5"), sample(2)]


@pytest.fixture
def write(tmp_path):
    """A function: writes a reward file and returns its path."""

    def make(text, name="reward.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return make


EASYR1_BATCH = """
from typing import Any
REWARD_NAME = "mine"
def compute_score(reward_inputs: list[dict[str, Any]], weight: float = 1.0):
    exact = [float(r["response"] == r["ground_truth"]) for r in reward_inputs]
    return [{"overall": weight * e, "length": r["response_length"]} for e, r in zip(exact, reward_inputs)]
"""
EASYR1_SEQUENTIAL = """
REWARD_TYPE = "sequential"
def main(reward_input):
    return {"overall": 1.0 if reward_input["response"] == reward_input["ground_truth"] else 0.0}
"""
TRL = """
def exact(completions, prompts, solution, **kwargs):
    assert prompts[0][0]["role"] == "user" and kwargs["completion_ids"][0] == [1, 2, 3] and "images" not in kwargs
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "mine" and extra_info["index"] == 3 and extra_info["solution"] == "4"
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": solution_str}
"""


def test_easyr1_batch_with_options(write):
    reward = load_reward(f"{write(EASYR1_BATCH)}:compute_score", {"weight": 0.5})
    assert reward(SAMPLES) == [{"overall": v, "length": 7.0} for v in (0.5, 0.0, 0.5)]
    assert reward([]) == []


def test_easyr1_sequential_and_the_default_function(write):
    assert load_reward(write(EASYR1_SEQUENTIAL))(SAMPLES) == [{"overall": v} for v in (1.0, 0.0, 1.0)]


def test_easyr1_inputs_hold_what_the_reward_may_want(write):
    seen = []

    def look(inputs):
        seen.extend(inputs)
        return [{"overall": 0} for _ in inputs]

    load_reward(look)([sample(4, tag="x")])
    assert seen[0]["columns"] == {"tag": "x"} and seen[0]["row_id"] == "rows:4" and "images" not in seen[0]
    assert seen[0]["prompt"][0]["role"] == "user" and seen[0]["token_ids"] == (1, 2, 3)


def test_trl_gets_message_lists_and_columns(write):
    reward = load_reward(f"{write(TRL)}:exact")
    assert reward([sample(0, solution="4"), sample(1, response="5", solution="4")]) == [{"overall": 1}, {"overall": 0}]
    assert load_reward(lambda completions, answer: [len(a) for a in answer])(SAMPLES)[0] == {"overall": 1.0}


def test_verl_gets_its_four_arguments(write):
    reward = load_reward(f"{write(VERL)}:compute_score")
    row = {"data_source": "mine", "extra_info": {"index": 3}, "solution": "4"}
    assert reward([sample(0, **row), sample(1, response="5", **row)]) == [
        {"overall": 1.0, "acc": 1.0},
        {"overall": 0.0, "acc": 0.0},
    ]
    assert load_reward(lambda solution_str, ground_truth: 0.25)(SAMPLES[:1]) == [{"overall": 0.25}]


def test_module_names_relative_paths_and_callables(write, tmp_path, monkeypatch):
    write(EASYR1_SEQUENTIAL, "my_rewards.py")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("my_rewards:main")(SAMPLES)[1] == {"overall": 0.0}
    assert load_reward("./my_rewards.py:main", base_dir=tmp_path)(SAMPLES)[0] == {"overall": 1.0}


def test_partials_objects_and_methods_work_and_show_their_own_lines():
    class Scorer:
        def __call__(self, reward_inputs, value=2):
            return [{"overall": value / len(item["response"].strip("5"))} for item in reward_inputs]

    scorer = Scorer()
    for function in (scorer, scorer.__call__, functools.partial(scorer, value=2)):
        reward = load_reward(function)
        assert reward(SAMPLES[:1]) == [{"overall": 2.0}] and reward.name.endswith("Scorer.__call__")
        with pytest.raises(RewardError, match=r"rows:1(?s:.*)value / len\(item(?s:.*)ZeroDivisionError"):
            reward(SAMPLES)
    with pytest.raises(RewardError, match="shows no parameters"):
        load_reward(max)


def test_two_files_of_one_name_do_not_mix(write, tmp_path):
    (tmp_path / "b").mkdir()
    one = load_reward(write("def main(i):\n    return [{'overall': 1} for _ in i]"))
    two = load_reward(write("def main(i):\n    return [{'overall': 2} for _ in i]", "b/reward.py"))
    assert one(SAMPLES)[0]["overall"] == 1 and two(SAMPLES)[0]["overall"] == 2


def test_pictures_come_only_on_request(write):
    text = "def main(inputs):\n    return [{'overall': len(i.get('images', []))} for i in inputs]\n"
    assert load_reward(write(text))(SAMPLES)[0]["overall"] == 0
    assert load_reward(write("NEEDS_IMAGES = True\n" + text, "b.py"))(SAMPLES)[0]["overall"] == 1
    assert load_reward(lambda inputs, images: [{"overall": len(i)} for i in images])(SAMPLES)[0]["overall"] == 1
    assert load_reward(lambda completions, images: [len(i) for i in images])(SAMPLES)[0]["overall"] == 1
    assert load_reward(lambda solution_str, images: len(images))(SAMPLES)[0]["overall"] == 1


@pytest.mark.parametrize(
    "values", [np.array([1, 0, 1]), torch.tensor([1.0, 0.0, 1.0]), [np.float32(1), False, torch.tensor(1)]]
)
def test_numbers_of_other_libraries_are_fine(values):
    assert load_reward(lambda completions: values)(SAMPLES) == [{"overall": v} for v in (1.0, 0.0, 1.0)]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"<lambda> must return a list of 3 numbers.*returned 1 \(rows rows:0, rows:1, rows:2\)"),
        ([], "returned 0"),
        (1.0, "must return a list of 3 numbers.* returned float '1.0'"),
        ("abc", "returned str 'abc'"),
        ([1.0, "0.5", 1.0], "row rows:1: the score must be a number, got str '0.5'"),
        ([1.0, float("nan"), 1.0], "row rows:1: the score is nan; return a finite number"),
        ([1.0, 1.0, float("inf")], "row rows:2: the score is inf"),
        ([[1.0], [1.0], [1.0]], "row rows:0: the score must be a number, got list"),
        ([{"score": 1.0}] * 3, "the dict has no number \"overall\"; keys \\['score'\\]"),
    ],
)
def test_wrong_results_name_function_and_row(result, message):
    with pytest.raises(RewardError, match=message):
        load_reward(lambda completions: result)(SAMPLES)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([1.0] * 3, 'row rows:0: each sample needs a dict with "overall" or None, got float'),
        ([{"accuracy": 1.0}] * 3, r'no number "overall"; keys \[\'accuracy\'\]'),
        (
            [{"overall": 1.0}, {"overall": 1.0, "b": "x"}, {"overall": 0}],
            "row rows:1: 'b' must be a number, got str 'x'",
        ),
        ([{"overall": 1.0}, {"overall": 1.0, "b": 0}, {"overall": 0}], "rows:1 got the keys .* return the same keys"),
        ({"overall": 1.0}, 'for one dict a call set REWARD_TYPE = "sequential"'),
    ],
)
def test_wrong_dicts(results, message):
    with pytest.raises(RewardError, match=message):
        load_reward(lambda reward_inputs: results)(SAMPLES)


RAISES = """
def helper(item):
    return 1 / int(item["response"] == "4")

def main(reward_inputs):
    return [{"overall": helper(item)} for item in reward_inputs]
"""


def test_a_raising_reward_shows_the_row_and_only_the_users_lines(write):
    path = write(RAISES)
    with pytest.raises(RewardError) as fault:
        load_reward(path)(SAMPLES)
    text = str(fault.value)
    assert f"{path}:main raised on row rows:1 (response starts '5')" in text
    assert "ZeroDivisionError" in text and 'return 1 / int(item["response"] == "4")' in text
    assert "loader.py" not in text and text.count("File ") == text.count(path) - 1 == 3
    assert fault.value.__cause__ is None and fault.value.__suppress_context__


def test_a_fault_of_the_whole_batch_names_its_first_row():
    def main(reward_inputs):
        if len(reward_inputs) > 1:
            raise KeyError("batch")
        return [{"overall": 0}]

    with pytest.raises(RewardError, match=r"raised on a batch of 3 from row rows:0 on:(?s:.*)KeyError: 'batch'"):
        load_reward(main)(SAMPLES)


def test_exit_inside_a_reward_does_not_end_the_run(write):
    with pytest.raises(RewardError, match="SystemExit"):
        load_reward(write("import sys\ndef main(inputs):\n    sys.exit(0)"))(SAMPLES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gone.py:main", r"gone\.py does not exist"),
        ("no_such_package.sub:f", "there is no module 'no_such_package.sub'"),
        ("json:loadz", "json has no function 'loadz'; did you mean 'load"),
        ("just_a_name", "is neither 'path.py:function' nor"),
        (None, "got NoneType"),
    ],
)
def test_specs_that_lead_nowhere(spec, message):
    with pytest.raises(RewardError, match=message):
        load_reward(spec)


def test_files_that_cannot_be_used(write):
    with pytest.raises(RewardError, match=r"has no function 'main'; functions there: compute_score"):
        load_reward(write(EASYR1_BATCH))
    with pytest.raises(RewardError, match=r"(?s)cannot be imported:.*reward\.py.*line 2.*SyntaxError"):
        load_reward(write("x = 1\ndef main(:\n"))
    with pytest.raises(
        RewardError, match=r"(?s)cannot be imported:.*line 1, in <module>.*No module named 'absent_one'"
    ):
        load_reward(write("import absent_one\n"))
    write("x = 1\n", "beside_it.py")
    with pytest.raises(RewardError, match=r"'beside_it' lies beside the reward file.*to PYTHONPATH"):
        load_reward(write("import beside_it\n"))
    with pytest.raises(RewardError, match=r"reward\.py:Judge is a class; make an object of it there"):
        load_reward(write("class Judge:\n    def __call__(self, completions): ...\n") + ":Judge")
    with pytest.raises(RewardError, match="REWARD_TYPE is 'each'"):
        load_reward(write('REWARD_TYPE = "each"\ndef main(inputs): ...'))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda a, b: 0, r"the parameters \(a, b\) fit no known form.*EasyR1.*TRL.*verl"),
        (lambda completions, solution_str: 0, "fit no known form"),
        (lambda: 0, r"\(none\) fit no known form"),
        (lambda ground_truth: 0, "fit no known form"),
        (lambda solution_str, judge: 0, "looks like verl's form but also needs 'judge'"),
    ],
)
def test_functions_of_no_known_form(function, message):
    with pytest.raises(RewardError, match=message):
        load_reward(function)(SAMPLES)


async def later(reward_inputs):
    return [{"overall": len(item["response"])} for item in reward_inputs]


async def later_each(solution_str, ground_truth):
    return float(solution_str == ground_truth)


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        (later, [1.0, 1.0, 1.0]),
        (functools.partial(later), [1.0, 1.0, 1.0]),
        (lambda reward_inputs: later(reward_inputs), [1.0, 1.0, 1.0]),
        (later_each, [1.0, 0.0, 1.0]),
    ],
)
def test_asynchronous_functions_are_waited_for(function, scores):
    assert load_reward(function)(SAMPLES) == [{"overall": score} for score in scores]


@pytest.mark.parametrize(
    "function",
    [
        lambda reward_inputs: [None, {"overall": None, "b": 1}, {"overall": 1.0, "c": 2.0}],
        lambda completions: [None, None, 1.0],
        lambda solution_str, ground_truth: None if solution_str != "5" else {"score": 2.0, "pred": "x"},
    ],
)
def test_none_leaves_a_sample_unscored(function):
    found = load_reward(function)(SAMPLES)
    assert sum(score is None for score in found) == 2 and sum(score is not None for score in found) == 1


def test_unknown_options_are_refused():
    with pytest.raises(RewardError, match=r"no parameter 'wieght'; its parameters are reward_inputs, weight"):
        load_reward(lambda reward_inputs, weight=1: 0, {"wieght": 2})
    assert load_reward(lambda a, b: [{"overall": b} for _ in a], {"b": 3})(SAMPLES)[0] == {"overall": 3.0}


def test_a_missing_trl_column_is_told_by_the_functions_own_error():
    with pytest.raises(RewardError, match="missing 1 required positional argument: 'solution'"):
        load_reward(lambda completions, solution: [0])(SAMPLES)
