"""Rewards in worker processes: what hangs, dies or eats memory costs one sample its score and the step little time."""

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from grpo_vlm.errors import RewardError
from grpo_vlm.rewards.forms import RewardSample
from grpo_vlm.rewards.pool import Limits, RewardPool

TIMEOUT_S = 1.0
GOLD = "4"
GIANT = "\\boxed{\\dfrac{5^{\\left(5^{\\left(5^{\\left(5^5\\right)}\\right)} - 4\\right)} - 5}{16}}"  # Math-Verify#65

# what each answer does to the function that grades it
HOSTILE = r"""
import ctypes, os, re, subprocess, sys, time

def grade(text):
    print("grading", text[:20])
    if text == "sleep":
        time.sleep(3600)
    if text == "regex":
        re.match(r"(a|a)*b", "a" * 200)
    if text == "memory":
        return float(len(bytearray(30 << 30)))
    if text == "exit":
        os._exit(0)
    if text == "segfault":
        ctypes.string_at(0)
    if text == "child":
        subprocess.run(["sleep", "3600"])
    if text == "ignores signals":
        import signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            pass
    if text.startswith("\\boxed"):
        from math_verify import parse, verify
        return float(verify(parse("$4$"), parse(text)))
    if text == "raise":
        raise ZeroDivisionError(text)
    if text == "writes anywhere":
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b"written to a descriptor of another")
            except OSError:
                pass
    return float(text == "4")

def loop(reward_inputs):
    return [{"overall": grade(item["response"]), "batch": len(reward_inputs)} for item in reward_inputs]

def collected(completions):
    texts = [completion[0]["content"] for completion in completions]
    return [grade(text) for text in texts]

def single(solution_str, ground_truth):
    return grade(solution_str)
"""


def sample(index, response=GOLD):
    messages = [{"role": "user", "content": "2 + 2?"}]
    return RewardSample(f"rows:{index}", response, 3, (1, 2, 3), GOLD, messages, "2 + 2?", {"solution": GOLD})


def samples(*responses):
    return [sample(index, response) for index, response in enumerate(responses)]


GOOD = samples(*[GOLD] * 8)


@pytest.fixture
def pool():
    """A function: makes a pool that is closed at the end; `pool.faults` collects what it tells."""
    made = []

    def make(specs, kwargs=None, **options):
        faults = []
        limits = Limits(**{"num_workers": 2, "timeout_s": TIMEOUT_S, **options.pop("limits", {})})
        made.append(RewardPool(specs, kwargs, limits=limits, on_fault=faults.append, **options))
        made[-1].faults = faults
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def write(tmp_path):
    def make(text, name="reward.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return make


def offspring():
    """Everything that this process has started and that lives."""
    alive = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return {child.pid for child in alive}


CASES = [("loop", answer) for answer in ("sleep", "regex", "memory", "exit", "segfault", "child", "raise")]
CASES += [("collected", "sleep"), ("collected", "exit"), ("collected", "raise")]
CASES += [("single", "sleep"), ("single", "ignores signals"), ("single", GIANT), ("single", "memory")]


@pytest.mark.parametrize(("form", "answer"), CASES, ids=[f"{form}-{answer[:8]}" for form, answer in CASES])
def test_one_bad_row_costs_its_own_score_and_little_time(pool, write, capfd, form, answer):
    before = offspring()
    reward = pool(f"{write(HOSTILE)}:{form}")
    reward.load()
    began = time.perf_counter()
    found = reward(samples(GOLD, "5", GOLD, GOLD, answer, GOLD, "5", GOLD))
    assert time.perf_counter() - began < TIMEOUT_S + 5
    expected = [1.0, 0.0, 1.0, 1.0, None, 1.0, 0.0, 1.0]
    assert [score and score["overall"] for score in found] == expected
    if form == "loop":  # the others were scored by one call again
        assert {score["batch"] for score in found if score} == {7.0}
    (fault,) = reward.faults
    timed_out = answer in ("sleep", "regex", "child", "ignores signals", GIANT)
    assert fault.row_id == "rows:4" and fault.response == answer and (fault.cause == "timeout") == timed_out
    assert json.loads(json.dumps(fault.record()))["policy"] == "none"
    assert not timed_out or "in grade" in fault.text or answer == GIANT  # it says where the function hung
    counted = reward.metrics()
    assert (counted["reward/timeouts"], counted["reward/errors"]) == (timed_out, not timed_out)
    assert counted["reward/not_scored"] == 1.0 and reward.metrics()["reward/errors"] == 0.0
    for _ in range(100):
        assert [score["overall"] for score in reward(GOOD)] == [1.0] * 8
    assert f"grading {answer[:20]}" in capfd.readouterr().out
    assert offspring() - before <= set(reward.pids)
    reward.close()
    assert offspring() <= before


@pytest.mark.parametrize("form", ["loop", "collected"])
def test_several_bad_rows_of_a_batch(pool, write, form):
    reward = pool(f"{write(HOSTILE)}:{form}")
    found = reward(samples("5", "sleep", GOLD, "exit", GOLD, "raise", "5", GOLD))
    assert [score and score["overall"] for score in found] == [0.0, None, 1.0, None, 1.0, None, 0.0, 1.0]
    assert [(fault.row_id, fault.cause) for fault in reward.faults] == [
        ("rows:1", "timeout"),
        ("rows:3", "ended"),
        ("rows:5", "error"),
    ]


def test_a_row_that_writes_to_the_workers_socket_is_the_only_one_lost(pool, write):
    reward = pool(f"{write(HOSTILE)}:single")
    found = reward(samples(GOLD, "writes anywhere", GOLD))
    assert [score and score["overall"] for score in found] == [1.0, None, 1.0]


def test_a_closed_stream_is_no_rows_fault(pool, write):
    source = "import sys\ndef score(solution_str):\n    sys.stdout.close()\n    return float(solution_str == '4')\n"
    reward = pool(f"{write(source)}:score")
    for _ in range(2):
        assert [score["overall"] for score in reward(samples(GOLD, "5"))] == [1.0, 0.0]
    assert reward.faults == []


def test_a_batch_is_one_call_while_nothing_goes_wrong(pool):
    def ranked(reward_inputs):
        order = sorted(range(len(reward_inputs)), key=lambda place: len(reward_inputs[place]["response"]))
        return [{"overall": order.index(place)} for place in range(len(reward_inputs))]

    reward = pool(ranked)
    assert [score["overall"] for score in reward(samples("ccc", "a", "bb", "dddd"))] == [2.0, 0.0, 1.0, 3.0]


@pytest.mark.parametrize(("policy", "score"), [("zero", {"overall": 0.0, "batch": 0.0}), ("none", None)])
def test_policies(pool, write, policy, score):
    reward = pool(f"{write(HOSTILE)}:loop", limits={"on_error": policy})
    assert reward(samples(GOLD, "raise", GOLD))[1] == score
    assert "ZeroDivisionError: raise" in reward.faults[0].text and "in grade" in reward.faults[0].text
    for strict in (True, False):
        with pytest.raises(RewardError, match=r"not one of 4|raised on row rows:0"):
            reward(samples(*["raise"] * 4), strict=strict)


@pytest.mark.parametrize("form", ["loop", "single"])
def test_a_strict_call_and_the_policy_raise_end_the_run_and_name_the_row(pool, write, form):
    reward = pool(f"{write(HOSTILE)}:{form}", limits={"on_error": "raise"})
    with pytest.raises(RewardError, match=r"raised on row rows:1 \(response starts 'raise'\)(?s:.*)ZeroDivisionError"):
        reward(samples(GOLD, "raise", GOLD))
    with pytest.raises(RewardError, match=r"took more than 1 s .*on row rows:2(?s:.*)in grade"):
        reward(samples(GOLD, GOLD, "sleep"))
    with pytest.raises(RewardError, match=r"on row rows:0 .*ended with exit code 0"):
        reward(samples("exit"))
    assert len(reward(GOOD)) == 8 and not reward.faults


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[1.0]", r"main must return a list of 3 numbers.*returned 1 \(rows rows:0, rows:1, rows:2\)"),
        ("1.0", "main must return a list of 3 numbers"),
        ("[1.0, 10**400, 1.0]", "main, row rows:1: the score is inf"),
        (
            "[1.0, 1.0, __import__('numpy').complex64(1)]",
            "main, row rows:2: the score must be a number, got complex64",
        ),
        ("[1.0, float('nan'), 1.0]", "main, row rows:1: the score is nan"),
        ("[1.0, 1.0, float('inf')]", "main, row rows:2: the score is inf"),
        ("['0.5', 1.0, 1.0]", "main, row rows:0: the score must be a number, got str '0.5'"),
        ("[{'accuracy': 1.0}, 1.0, 1.0]", 'main, row rows:0: the dict has no number "overall"'),
    ],
)
def test_what_is_no_score_ends_the_run_whatever_the_policy(pool, write, result, message):
    reward = pool(write(f"def main(completions):\n    return {result}"))
    with pytest.raises(RewardError, match=message):
        reward(samples(GOLD, GOLD, GOLD))


@pytest.mark.parametrize(
    "result",
    [
        "[True, False, 1]",
        "np.array([1.0, 0.0, 1.0])",
        "[np.float32(1), np.bool_(False), np.int64(1)]",
        "[torch.tensor(1.0), torch.tensor([0]), torch.tensor(True)]",
        "torch.tensor([1, 0, 1], dtype=torch.bfloat16)",
    ],
)
def test_numbers_of_other_kinds_are_scores(pool, write, result):
    library = "torch" if "torch" in result else "numpy as np"
    reward = pool(write(f"import {library}\ndef main(completions):\n    return {result}"), limits={"timeout_s": 60})
    assert [score["overall"] for score in reward(samples(GOLD, "5", GOLD))] == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("form", ["single", "loop", "collected"])
def test_three_hanging_rows_of_a_thousand(pool, write, form):
    reward = pool(f"{write(HOSTILE)}:{form}")
    reward.load()
    answers = ["sleep" if row in (3, 500, 997) else GOLD for row in range(1000)]
    began = time.perf_counter()
    found = reward(samples(*answers))
    assert time.perf_counter() - began < 3 * TIMEOUT_S + 10
    assert [score is None for score in found] == [answer == "sleep" for answer in answers]
    assert [fault.row_id for fault in reward.faults] == ["rows:3", "rows:500", "rows:997"]


def test_functions_that_cannot_be_loaded_say_so(pool, write):
    with pytest.raises(RewardError, match=r"(?s)cannot be imported:.*line 2, in <module>.*ZeroDivisionError"):
        pool(write("x = 1\ny = x / 0\n")).load()
    with pytest.raises(RewardError, match=r"ends\.py ended with exit code 7 while it was loaded"):
        pool(write("import os\nos._exit(7)\n", "ends.py")).load()
    with pytest.raises(RewardError, match="fit no known form"):
        pool(lambda a, b: 0)
    with pytest.raises(RewardError, match="cannot be given to a worker process"):
        lock = threading.Lock()
        pool(lambda completions: [lock for _ in completions])


ASYNCHRONOUS = """
import asyncio, os, time

async def judge(text):
    await asyncio.sleep(3600 if text == "sleep" else 0.2)
    if text == "blocks":
        time.sleep(3600)
    if text == "raise":
        raise KeyError(text)
    return float(text == "4")

async def single(solution_str, ground_truth):
    return {"score": await judge(solution_str), "process": os.getpid()}

async def batch(reward_inputs):
    values = await asyncio.gather(*(judge(item["response"]) for item in reward_inputs))
    return [{"overall": value, "process": os.getpid()} for value in values]
"""


@pytest.mark.parametrize("form", ["single", "batch"])
def test_asynchronous_functions_run_at_once_in_one_process(pool, write, form):
    reward = pool(f"{write(ASYNCHRONOUS)}:{form}", limits={"timeout_s": 0.8})
    reward.load()
    began = time.perf_counter()
    found = reward(samples(*[GOLD, "5"] * 16))
    assert time.perf_counter() - began < 2.0  # one after the other they take 6.4 s
    assert [score["overall"] for score in found] == [1.0, 0.0] * 16
    assert len({score["process"] for score in found}) == 1
    bad_ones = ("sleep", "raise", "blocks") if form == "single" else ("sleep", "raise")
    for bad in bad_ones:
        began = time.perf_counter()
        found = reward(samples(GOLD, bad, "5", GOLD))
        assert [score and score["overall"] for score in found] == [1.0, None, 0.0, 1.0]
        assert time.perf_counter() - began < TIMEOUT_S + 5
    assert [fault.row_id for fault in reward.faults] == ["rows:1"] * len(bad_ones)
    hung = reward.faults[0].text  # where the coroutine waits, not where asyncio does
    assert re.search(r"it was at\n.* in sleep\n.*reward.py.* in judge", hung) and "selectors" not in hung, hung


def test_at_most_so_many_asynchronous_calls_are_in_flight(pool, write):
    text = """
        import asyncio
        running = 0

        async def main(solution_str, ground_truth):
            global running
            running += 1
            seen = running
            await asyncio.sleep(0.01)
            running -= 1
            return seen
    """
    found = pool(write(text), limits={"concurrency": 3})(GOOD)
    assert max(score["overall"] for score in found) == 3.0


def test_several_functions_are_summed_by_weight_and_logged_by_name(pool, write):
    first = write("def score(completions):\n    return [1.0, None, None, 3.0]")
    second = write(
        "def score(inputs, a=0):\n    return [{'overall': a, 'x': 2}, {'overall': a, 'x': 2}, None, None]", "b.py"
    )
    reward = pool([f"{first}:score", f"{second}:score", lambda solution_str: None], {"a": 5}, weights=[1.0, 0.1, 7.0])
    assert reward(samples(*"abcd")) == [
        {"overall": 1.5, "reward.score": 1.0, "b.score": 5.0, "b.score/x": 2.0},
        {"overall": 0.5, "b.score": 5.0, "b.score/x": 2.0},
        None,
        {"overall": 3.0, "reward.score": 3.0},
    ]
    assert reward.metrics()["reward/not_scored"] == 1.0 and not reward.faults
    with pytest.raises(RewardError, match="has 1 numbers for 2 function"):
        pool(["a.py", "b.py"], weights=[1.0])
    with pytest.raises(RewardError, match="no function has a parameter 'wieght'"):
        pool([f"{first}:score", f"{second}:score"], {"wieght": 5}).load()


def test_the_same_from_a_thread_and_from_asyncio(pool, write):
    reward = pool(f"{write(HOSTILE)}:loop")
    found = [reward(GOOD)]
    thread = threading.Thread(target=lambda: found.append(reward(GOOD)))
    thread.start()
    thread.join()

    async def called():
        return reward(GOOD), await asyncio.to_thread(reward, GOOD)

    found += asyncio.run(called())
    assert len(found) == 4 and all(scores == found[0] for scores in found)
    assert reward(GOOD) == found[0]  # its workers outlive the threads that called


def test_a_worker_is_light_and_a_call_takes_milliseconds(pool, write):
    text = """
        import sys

        def main(inputs):
            return [{"overall": "torch" in sys.modules or "numpy" in sys.modules} for _ in inputs]
    """
    reward = pool(write(text))
    many = samples(*[GOLD] * 64)
    assert reward(many)[0] == {"overall": 0.0}
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        reward(many)
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 0.05
    assert len(reward.pids) == 1  # a second one starts only when there is work for it


NOTEBOOK = """
import sys
from grpo_vlm.rewards.forms import RewardSample
from grpo_vlm.rewards.pool import Limits, RewardPool

REWARD_TYPE = "sequential"
bonus = 0.5

def helper(text):
    return len(text) + bonus

def mine(reward_input):
    return {"overall": helper(reward_input["response"])}

if __name__ == "__main__":
    reward = RewardPool(mine, limits=Limits(num_workers=1))
    print(reward([RewardSample("rows:0", "four", 1, (1,), "4", [], "")]))
else:
    print("ran twice")
"""


def test_a_function_of_the_main_script_needs_no_second_run_of_it(write):
    ran = subprocess.run([sys.executable, write(NOTEBOOK)], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[{'overall': 4.5}]\n", ran.stderr


LEAVES = """
import os, subprocess, sys

def main(solution_str, ground_truth):
    if solution_str == "fork" and os.fork() == 0:
        return 0.0  # a copy of the worker comes back from the function, too
    if solution_str in ("leave", "leave and exit"):
        code = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execlp('sleep', 'sleep', '3600.5')"
        subprocess.run([sys.executable, "-c", code])  # a daemon: in a group of its own, its parent gone
    if solution_str == "leave and exit":
        os._exit(3)
    return 1.0
"""
LEAVING = """
import sys
from grpo_vlm.rewards.forms import RewardSample
from grpo_vlm.rewards.pool import Limits, RewardPool

reward = RewardPool(sys.argv[1], limits=Limits(num_workers=1))
print(reward([RewardSample(str(row), text, 1, (1,), "4", [], "") for row, text in enumerate(sys.argv[2:])]))
"""


@pytest.mark.parametrize("answer", ["leave", "leave and exit", "fork"])
def test_what_a_function_leaves_behind_ends_with_its_worker(write, answer):
    """The daemon has the script's standard output: while it lives, whoever reads that waits for its end."""
    arguments = [sys.executable, write(LEAVING, "script.py"), write(LEAVES), "4", answer, "4"]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    bad = None if answer == "leave and exit" else {"overall": 1.0}
    assert ran.stdout == f"{[{'overall': 1.0}, bad, {'overall': 1.0}]}\n", ran.stderr
    assert not [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["sleep", "3600.5"]]


@pytest.mark.parametrize("answer", ["regex", "child"])
def test_nothing_is_left_when_the_trainer_is_interrupted(write, answer):
    trainer = f"""
        from grpo_vlm.rewards.forms import RewardSample
        from grpo_vlm.rewards.pool import Limits, RewardPool
        reward = RewardPool({write(HOSTILE)!r} + ":single", limits=Limits(num_workers=2, timeout_s=600))
        reward.load()
        reward([RewardSample(str(row), {answer!r}, 1, (1,), "4", [], "") for row in range(8)])
    """
    process = subprocess.Popen([sys.executable, write(trainer, "trainer.py")], stdout=-1, stderr=-1, text=True)
    assert process.stdout.readline().startswith("grading")
    time.sleep(0.2)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=20)[1]
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the death of a parent is Linux's")
def test_nothing_is_left_when_the_trainer_is_killed(write):
    trainer = f"""
        from grpo_vlm.rewards.forms import RewardSample
        from grpo_vlm.rewards.pool import Limits, RewardPool
        reward = RewardPool({write(HOSTILE)!r} + ":single", limits=Limits(num_workers=2, timeout_s=600))
        reward.load()
        reward([RewardSample(str(row), "regex", 1, (1,), "4", [], "") for row in range(8)])
    """
    process = subprocess.Popen([sys.executable, write(trainer, "trainer.py")], stdout=subprocess.PIPE)
    assert process.stdout.readline().startswith(b"grading")
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]
