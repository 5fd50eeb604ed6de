"""No input makes the grader raise, hang or fill the memory."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_vlm.rewards import grade_symbolic
from grpo_vlm.rewards.grade import Verdict, grade
from grpo_vlm.rewards.grade_deadline import OutOfTime, call_within

LIMIT_S = 1.0  # processor time of one grading
HANGING = [  # the first four are reported; they stop math-verify or mathruler for more than 5 s
    "\\boxed{\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}}",
    "$9^{9^{9^{9}}}$",
    "$10000000!$",
    "9**9**9**9",
    "9^9^9",
    "(((2^{9999})^{9999})^{9999})^{9999}",
    "((1.5^{9999.5})^{9999.5})^{9999.5}",
    "((3000!)!)!",
    "e^{e^{e^{e^{e}}}}",
    "\\sin(10^{9999})",
    "\\binom{10^{9}}{5}",
    "1e9999",
    "9" * 4000,
    "2^" * 100 + "2",
    "\\frac{" * 5000,
    "\\boxed{" * 5000,
    "(" * 5000 + "1" + ")" * 5000,
    "\\sqrt{" * 60 + "2" + "}" * 60,
    "-" * 20000,
    "1," * 5000,
    "answer is " * 5000,
    "Answer:" + " " * 20000,
    "**a" * 5000,
    "A. " * 5000,
    "<answer>" * 5000,
    "\\text{" * 500 + "}" * 500,
    "\\begin{pmatrix} 9^{9^{9}} \\end{pmatrix}",
    "\\int \\frac{1}{x^{5}+x+1} \\sin(x) \\cos(x) \\tan(x) e^{x} dx",
    "\\sum_{i=1}^{50}\\sum_{j=1}^{50}\\sum_{k=1}^{50}\\frac{1}{i+j+k}",
    "\\prod_{n=1}^{99999999} n",
    "\\lim_{x\\to 0} \\frac{\\sin(\\tan x)-\\tan(\\sin x)}{x^7}",
]
OTHER = ("1", "\\int \\sqrt{\\tan x} dx")


def timed(prediction, gold, **options):
    begun = time.thread_time()
    verdict = grade(prediction, gold, **options)
    assert time.thread_time() - begun < LIMIT_S, (prediction[:80], gold[:80])
    return verdict


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loading sympy is not grading."""
    grade_symbolic.agree("\\begin{pmatrix} a \\end{pmatrix}", "\\begin{pmatrix} b \\end{pmatrix}")
    for _ in range(2):  # what integrals need is loaded when it is first used, and not all of it before the time is up
        grade("\\int \\frac{1}{x^{5}+x+1} dx", "\\int \\sqrt{\\tan x} dx")


@pytest.mark.parametrize("text", HANGING, ids=lambda text: text[:30])
def test_hanging_inputs_end_and_are_wrong(text):
    for other in OTHER:
        assert not timed(text, other)
        assert not timed(other, text)
        assert not timed(text, other, choices=[text, other, "7"], tolerance=0.1)
        assert not timed(f"The answer is ${text}$", other)
    assert grade("so \\boxed{2}", "2")  # and the next one works


def test_memory_is_bounded():
    """In a process of its own, where the peak is that of the grader."""
    code = (
        "import json, resource, sys\n"
        "from grpo_vlm.rewards.grade import grade\n"
        "grade('\\\\begin{pmatrix} a \\\\end{pmatrix}', '\\\\begin{pmatrix} b \\\\end{pmatrix}')\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "for text, other in json.load(sys.stdin): grade(text, other); grade(other, text)\n"
        "print((peak() - before) / 1024)\n"
    )
    pairs = json.dumps([(text, other) for text in HANGING for other in OTHER])
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, input=pairs, capture_output=True, text=True, check=True, timeout=120)
    assert float(done.stdout) < 100  # MB


def never_ends():
    while True:
        abs(-1)


def swallows_what_it_gets():
    try:
        never_ends()
    except BaseException:
        never_ends()


@pytest.mark.parametrize("function", [never_ends, swallows_what_it_gets])
def test_a_deadline_stops_python_code_in_any_thread(function):
    def stopped():
        begun = time.thread_time()
        with pytest.raises(OutOfTime):
            call_within(0.1, function)
        return time.thread_time() - begun

    assert stopped() < LIMIT_S
    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(lambda _: stopped(), range(2))) < LIMIT_S
    time.sleep(0.5)  # the watching threads see that they are done
    assert [thread for thread in threading.enumerate() if thread.name == "grade-deadline"] == []


def test_a_deadline_leaves_alone_what_ends_in_time():
    def busy(until_s):
        begun = time.thread_time()
        while time.thread_time() - begun < until_s:
            pass
        return "done"

    assert call_within(5, busy, 0.05) == "done"
    ends = set()
    for look in range(20):  # ends about when the clock is looked at
        try:
            ends.add(call_within(0.02, busy, 0.015 + look / 2000))
        except OutOfTime:
            ends.add("out of time")
        busy(0.005)  # nothing is raised behind it
    assert "done" in ends
    with pytest.raises(ZeroDivisionError):
        call_within(5, lambda: 1 / 0)


PIECES = st.sampled_from(
    (
        "1 2 10 99 0.5 1e3 x y e i \\pi \\infty + - * / ^ ^{ } { ( ) [ ] \\frac{ \\sqrt{ \\sin( \\log ! | , ; : = < "
        "\\le \\in \\cup and or \\pm % cm m ^\\circ \\text{ $ \\boxed{ ** ... _{ A B is Answer: <answer> </answer> "
        "</think> \\{ \\} \\\\ & \\begin{pmatrix} \\end{pmatrix} \\int \\sum_{n=1}^{ \\binom{ ½ ² ° "
        "π √ − ≤ not because"
    ).split()
)
JOINED = st.tuples(st.lists(PIECES, max_size=40), st.sampled_from(["", " "])).map(lambda pair: pair[1].join(pair[0]))
ANSWERS = st.one_of(st.text(max_size=60), JOINED)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(ANSWERS, ANSWERS, st.booleans(), st.sampled_from([0.0, 0.005]))
@example("\ud800", "\x00", True, 0.0)
@example("፩①", "٣", True, 0.0)
def test_grade_never_raises_and_ends(prediction, gold, with_choices, tolerance):
    choices = [gold, prediction, "1"] if with_choices else None
    assert isinstance(timed(prediction, gold, choices=choices, tolerance=tolerance), Verdict)


WRAPPINGS = st.sampled_from(["{}", "\\boxed{{{}}}", "The answer is ${}$.", "<answer> {} </answer>"])
NUMBERS = st.integers(-(10**9), 10**9).map(str)
FORMULAS = st.recursive(
    st.one_of(st.integers(1, 99).map(str), st.sampled_from(["\\pi", "x", "y", "0.25"])),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("\\frac{{{0[0]}}}{{{0[1]}}}".format),
        st.tuples(inner, inner).map("({0[0]} + {0[1]})".format),
        inner.map("\\sqrt{{{}}}".format),
        inner.map("{}^2".format),
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.one_of(NUMBERS, FORMULAS),
    st.sampled_from(["{}", "\\boxed{{{}}}", "The answer is ${}$.", "<answer> {} </answer>"]),
)
def test_a_gold_is_right_and_its_successor_wrong(gold, wrapping):
    assert timed(wrapping.format(gold), gold)
    assert not timed(wrapping.format(f"{gold} + 1"), gold)
