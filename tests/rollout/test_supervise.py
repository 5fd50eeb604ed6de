"""What is decided when a server fails, how ranks wait for one another, and what the watchdog does to a server that
hangs. Real processes throughout, but none of vLLM: test_faults.py has those."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import ranks, supervise
from grpo_vlm.rollout.failures import RequestRefused, RequestTimedOut, ServerGone
from grpo_vlm.rollout.ranks import Meeting
from grpo_vlm.rollout.supervise import Job, Report, Verdict, Watchdog, agree, judge
from grpo_vlm.rollout.types import Completion, Request, Sampling

ANSWERED = Report()
GONE = Report("gone", "the connection broke", missing=1, rows=("train:3",))


def never():
    raise AssertionError("the server's health does not matter here")


@pytest.mark.parametrize(
    ("report", "well", "failed_rounds", "action"),
    [
        (ANSWERED, never, 0, "done"),
        (GONE, lambda: False, 0, "restart"),
        (GONE, lambda: True, 0, "again"),
        (GONE, lambda: True, 2, "restart"),  # well, but it breaks off each time
        (GONE, lambda: True, 3, "raise"),
        (Report("refused", "row a: 400", status=400), never, 0, "raise"),
        (Report("refused", "row a: 500", status=500), lambda: True, 0, "raise"),
        (Report("refused", "row a: 500: the engine died", status=500), lambda: False, 0, "restart"),
        (Report("timeout", "row a: no answer"), never, 0, "restart"),
        (Report("timeout", "row a: no answer", repeated=True), never, 0, "raise"),
        (Report("lost", "the server holds other weights"), never, 0, "restart"),  # which begins with a sync
        (Report("error", "row a: another prompt"), never, 0, "raise"),
    ],
)
def test_each_failure_has_its_verdict(report, well, failed_rounds, action):
    verdict = judge([ANSWERED, report], well, failed_rounds)
    assert verdict.action == action
    assert verdict.message.startswith(report.message)


def test_what_cannot_be_mended_outweighs_what_can():
    refused = Report("refused", "row a: 400", status=400)
    assert judge([GONE, refused], never, 0) == Verdict("raise", "row a: 400")
    assert agree([Verdict("again"), Verdict("restart"), Verdict("done")]) == "restart"
    assert agree([Verdict("restart"), Verdict("raise")]) == "raise"
    assert agree([Verdict("done"), Verdict("done")]) == "done"


def test_a_refused_prompt_that_is_too_long_gets_a_remedy():
    long = Report("refused", "row a: 400: longer than the maximum model length of 320", status=400)
    assert "Remedy: lower data.max_prompt_length, or raise" in judge([long], never, 0).message


def test_failures_keep_what_they_say_on_their_way_to_another_process():
    import pickle

    for error in (RequestRefused("train:7", 500, "why"), RequestTimedOut("train:7", 600.0), ServerGone("gone")):
        copy = pickle.loads(pickle.dumps(error))
        assert str(copy) == str(error) and vars(copy) == vars(error)
    assert "row train:7" in str(RequestTimedOut("train:7", 2.5)) and "2.5 s (worker" in str(RequestTimedOut("a", 2.5))


# ---- a job


class Client:
    """Answers some of what it is asked for, then fails."""

    def __init__(self, *answers, failure=None, retries=0):
        self.indices, self.failure, self.asked = answers, failure, []
        self.retries, self.more = 0, retries

    def generate(self, batch, version, *, on_answer, watch):
        self.asked = [request.prompt.row_id for request in batch]
        watch()
        self.retries += self.more
        for index in self.indices:
            on_answer(index, [Completion((index,), (0.0,), "stop", self.asked[index], version)])
        if self.failure is not None:
            raise self.failure


def job(*row_ids, seen=None):
    batch = [Request(SimpleNamespace(row_id=row_id), Sampling(), seed=0) for row_id in row_ids]
    return Job(batch, None if seen is None else seen.append)


def test_answers_are_kept_and_only_the_others_asked_for_again():
    seen = []
    work = job("a", "b", "c", seen=seen)
    report = work.attempt(Client(1, failure=ServerGone("gone"), retries=2), 5, lambda: None)
    assert report == Report("gone", "gone", missing=2, rows=("a", "c"))  # attempts that reached nobody do not count
    client = Client(1, 0, retries=1)
    assert work.attempt(client, 5, lambda: None) == Report(retries=3)
    assert client.asked == ["a", "c"] and seen == [1, 2, 3]
    assert [work.answers[index][0].text for index in range(3)] == ["a", "b", "c"]


def test_a_row_that_times_out_twice_is_known():
    work = job("a", "b")
    late = RequestTimedOut("b", 1.0)
    assert not work.attempt(Client(0, failure=late), 0, lambda: None).repeated
    assert work.attempt(Client(failure=late), 0, lambda: None).repeated


def test_what_the_look_at_the_clock_raises_is_reported():
    def watch():
        raise RolloutError("row a: over (worker.rollout.step_timeout_s)")

    report = job("a").attempt(Client(0), 0, watch)
    assert report.failure == "error" and "step_timeout_s" in report.message and report.missing == 1


# ---- a meeting


@pytest.fixture
def meetings(monkeypatch):
    """Two ranks' ends of one meeting, over a store in memory."""
    monkeypatch.setattr(ranks, "POLL_S", 0.01)
    store, ends = dist.HashStore(), []
    for rank in range(2):
        end = Meeting(SimpleNamespace(process_index=rank, num_processes=1))
        end.size, end.store = 2, store
        ends.append(end)
    return ends


def test_all_ranks_get_all_values_in_any_number_of_rounds(meetings):
    found = {0: [], 1: []}

    def attend(end):
        for number in range(20):
            time.sleep(0.002 * end.rank)
            found[end.rank].append(end.exchange({"rank": end.rank, "number": number}, limit_s=5, what="come"))

    threads = [threading.Thread(target=attend, args=(end,)) for end in meetings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found[0] == found[1] == [[{"rank": r, "number": n} for r in range(2)] for n in range(20)]
    assert meetings[0].store.num_keys() <= 4  # what was read is removed


def test_a_rank_that_does_not_come_is_named(meetings):
    waited = []
    with pytest.raises(RolloutError, match=r"rank\(s\) \[1\] did not start the vLLM server within 0.1 s"):
        meetings[0].exchange(None, limit_s=0.1, what="start the vLLM server", on_wait=waited.append)
    assert waited[0] == [1]


def test_one_rank_alone_meets_nobody():
    alone = Meeting(SimpleNamespace(process_index=0, num_processes=1))
    assert alone.exchange("x", limit_s=0, what="come") == ["x"]


# ---- the watchdog

SERVER = """
import http.server, sys, threading
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(int(sys.argv[1])); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
print(server.server_port, flush=True)
if sys.argv[2] == "busy":
    while True: pass
server.serve_forever()
"""
GUARD = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.fixture
def serve(monkeypatch):
    """`serve(status, mode)`: a process behind another one, as vLLM behind its guard; it answers `status`."""
    monkeypatch.setattr(supervise, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(supervise, "SETTLE_S", 0.3)
    monkeypatch.setattr(Watchdog, "probe_timeout_s", 0.2)
    started = []

    def start(status=200, mode="serve"):
        command = [sys.executable, "-c", GUARD, SERVER, str(status), mode]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        port = int(process.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        return SimpleNamespace(process=process, url=url, api_key="key", alive=lambda: process.poll() is None)

    yield start
    for process in started:
        supervise.kill(process)
        process.wait(5)


def wait_for(condition, seconds=8):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_a_stopped_server_is_killed_and_said_to_hang(serve):
    server = serve()
    watchdog = Watchdog(server)
    assert watchdog.well()
    (child,) = psutil.Process(server.process.pid).children()
    with watchdog:
        child.suspend()
        assert wait_for(lambda: watchdog.fault is not None)
        assert "hangs (no answer and no work for" in watchdog.fault
        assert wait_for(lambda: not child.is_running())
    assert not watchdog.well()


def test_a_busy_server_is_left_alone(serve):
    server = serve(mode="busy")  # it listens and computes, but answers nothing
    with Watchdog(server) as watchdog:
        time.sleep(8 * 0.3)
        assert watchdog.fault is None and server.alive()


def test_a_dead_engine_behind_a_living_api_is_found(serve):
    with Watchdog(serve(status=500)) as watchdog:
        assert not watchdog.well()
        assert wait_for(lambda: watchdog.fault is not None)
    assert watchdog.fault == "the vLLM server's engine is dead (it answers 500)"


def test_somebody_elses_server_is_not_watched_and_never_well(serve):
    server = serve()
    theirs = SimpleNamespace(process=None, url=server.url, api_key="key", alive=lambda: True)
    with Watchdog(theirs) as watchdog:
        assert not watchdog.well()
        assert watchdog.cause("the connection broke") == "the connection broke"


def test_an_ended_server_is_noticed_and_nobody_else_is_touched(serve):
    server = serve()
    with Watchdog(server) as watchdog:
        supervise.kill(server.process)
        assert wait_for(lambda: watchdog.fault == "the vLLM server was killed by SIGKILL")
    with watchdog:
        assert watchdog.fault is None  # each use begins anew
