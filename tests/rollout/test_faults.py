"""The fault table of docs/faults.md, each row with a real vLLM server on a CPU. In each row that can be survived the
step completes, and it and the next one equal an unbroken run's, bit for bit."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from grpo_vlm.cli import guarded
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import server as server_module
from grpo_vlm.rollout.command import ServerSettings, server_command
from grpo_vlm.rollout.guard import SOCKETS
from grpo_vlm.rollout.supervise import Watchdog
from tests.rollout import steps
from tests.rollout.faulty import VARIABLE
from tests.tiny import tiny_model

STEPS = 3
ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def gone_within(processes, seconds):
    return wait_until(lambda: steps.gone(processes), seconds)


class Run:
    """A started engine, the answers of its first STEPS steps while nothing was broken, and what it said since."""

    def __init__(self, path, run_dir):
        self.path, self.said = path, []
        self.model = steps.load(path)
        self.engine = steps.make_engine(path, run_dir, self.model, max_restarts=4)
        self.engine.warn = self.said.append
        self.engine.start()
        self.unbroken = {step: self.step(step) for step in range(1, STEPS + 1)}

    @property
    def guard_pid(self):
        return self.engine.server.process.pid

    def sync(self, step):
        steps.set_weights(self.model, self.path, step)
        self.engine.sync(self.model, step)

    def generate(self, step, on_progress=None):
        return self.engine.generate(steps.step_requests(self.engine.processor, step), on_progress)

    def step(self, step, on_progress=None):
        self.sync(step)
        return self.generate(step, on_progress)

    def check_survived(self, restarts=1):
        """What the server's fall left behind: counts, a message, and a step that is like any other."""
        metrics = self.engine.metrics()
        assert metrics["rollout/restarts"] == restarts
        assert len([line for line in self.said if f"of at most {self.engine.max_restarts}" in line]) == restarts
        self.said.clear()
        assert self.step(3) == self.unbroken[3]
        assert self.engine.metrics() == {"rollout/restarts": 0, "rollout/retries": 0}
        return metrics


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def two_ranks(model_path, tmp_path_factory):
    """A run on two ranks (two_ranks.py), on its way in the background, and its folder."""
    folder = tmp_path_factory.mktemp("two-ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = []
    for rank in ("0", "1"):
        env = {**os.environ, **places, "RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.rollout.two_ranks", str(model_path), str(folder)]
        with (folder / f"rank-{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    yield folder, processes
    for process in processes:
        if process.poll() is None:
            process.kill()


TRAINER = """
import dataclasses, json, sys, time
from tests.rollout import steps
engine = steps.make_engine(sys.argv[1], sys.argv[2], steps.load(sys.argv[1]))
engine.settings = dataclasses.replace(engine.settings, **json.loads(sys.argv[3]))
engine.start()
print(engine.server.process.pid, flush=True)
time.sleep(600)
"""


class Trainer:
    """A process with an engine, on its way in the background. settings: of its server, other than usual."""

    def __init__(self, model_path, run_dir, **settings):
        self.place = Path(tempfile.mkdtemp())  # a short name: vLLM's sockets lie in it
        command = [sys.executable, "-c", TRAINER, str(model_path), str(run_dir), json.dumps(settings)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.place)}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def server(self):
        """All processes of its server, the guard first, as soon as it is ready."""
        lines = (line.strip() for line in self.process.stdout)  # a process id among what the libraries print
        return steps.server_processes(next(int(line) for line in lines if line.isdigit()))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def socket_folders(self):
        return list(self.place.glob(f"{SOCKETS}*"))

    def close(self):
        self.kill()
        shutil.rmtree(self.place, ignore_errors=True)


@pytest.fixture(scope="module")
def trainer(model_path, tmp_path_factory):
    started = Trainer(model_path, tmp_path_factory.mktemp("killed"))
    yield started
    started.close()


ENGINES = {"data_parallel_size": 2}
WORKERS = {"tensor_parallel_size": 2, "engine_kwargs": {"distributed_executor_backend": "mp"}}


@pytest.fixture(
    scope="module",
    params=[ENGINES, pytest.param(ENGINES | WORKERS, marks=pytest.mark.slow)],
    ids=["engines", "engines-and-workers"],
)
def large(request, model_path, tmp_path_factory):
    """Two engines and their coordinator, and two workers of each."""
    started = Trainer(model_path, tmp_path_factory.mktemp("large"), **request.param)
    yield started
    started.close()


@pytest.fixture(scope="module")
def run(two_ranks, trainer, model_path, tmp_path_factory):
    started = Run(model_path, tmp_path_factory.mktemp("faults"))
    yield started
    started.engine.close()


def once(action):
    """For on_progress: `action` at the first prompt that is done; `counts` are the numbers that were told."""
    counts = []

    def told(done):
        counts.append(done)
        if len(counts) == 1:
            action()

    return told, counts


def test_killed_while_idle_and_the_port_taken_between_choice_and_bind(run, monkeypatch, tmp_path):
    """Asleep, as a shared server is while the trainer trains. The port that is chosen for the new one is bound by
    somebody else before the server binds it. The new server also has the middleware of the next test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path.parent / "fault.json"))
    extra = ["--middleware", "tests.rollout.faulty.FailPrompt"]
    monkeypatch.setattr(server_module, "server_command", lambda *args: server_command(*args) + extra)
    choose, chosen = server_module.choose_port, []
    with socket.socket() as other:

        def taken_at_first(*args):
            port = choose(*args)
            if not chosen:
                other.bind(("127.0.0.1", port))
                other.listen()
            chosen.append(port)
            return port

        monkeypatch.setattr(server_module, "choose_port", taken_at_first)
        with monkeypatch.context() as patch:
            patch.setattr(ServerSettings, "sleeps", True)  # a CPU server answers, and stays awake
            run.engine.release()
        assert run.engine.asleep
        steps.api_process(run.guard_pid).kill()
        assert run.step(1) == run.unbroken[1]
        assert not run.engine.asleep
    assert len(chosen) == 2 and run.engine.server.port == chosen[1] != chosen[0]
    assert run.check_survived()["rollout/retries"] == 0  # the sync found it, before anything was asked


def test_500_for_one_prompt(run, tmp_path):
    """Once: it is asked again. Each time: the run ends and names the row, the server goes on."""
    fault = tmp_path.parent / "fault.json"
    run.sync(1)
    seed = steps.step_requests(run.engine.processor, 1)[2].seed
    fault.write_text(json.dumps({"seed": seed, "times": 1}))
    assert run.generate(1) == run.unbroken[1]
    assert run.engine.metrics() == {"rollout/restarts": 0, "rollout/retries": 1}
    fault.write_text(json.dumps({"seed": seed, "times": 99}))
    with pytest.raises(RolloutError, match=r"row .*:2: .*500.*made by the test"):
        run.generate(1)
    fault.write_text(json.dumps({"seed": seed, "times": 0}))
    run.engine.metrics()
    run.check_survived(restarts=0)


def test_killed_while_syncing(run, monkeypatch):
    """The engine's process dies between two parts of a transfer; its API process lives on for some seconds."""
    post, killed = run.engine.client.post, []

    def post_and_kill(path, *args, **kwargs):
        if path == "/update_weights" and not killed:
            killed.append(steps.engine_process(run.guard_pid))
            killed[0].kill()
        return post(path, *args, **kwargs)

    monkeypatch.setattr(run.engine.client, "post", post_and_kill)
    assert run.step(2) == run.unbroken[2]
    assert killed
    run.check_survived()


def test_hanging_server(run, monkeypatch):
    """SIGSTOP to all of its processes, with half of the answers there: those are kept."""
    monkeypatch.setattr(Watchdog, "probe_timeout_s", 1.0)
    monkeypatch.setattr(Watchdog, "silent_probes", 2)
    stopped = []

    def stop():
        stopped.extend(steps.server_processes(run.guard_pid))
        for process in stopped:
            process.suspend()

    on_progress, counts = once(stop)
    run.sync(1)
    assert run.generate(1, on_progress) == run.unbroken[1]
    assert counts == [1, 2, 3, 4]  # none is lost, none comes twice
    assert any("hangs" in line for line in run.said)
    assert run.check_survived()["rollout/retries"] == 2  # the two long answers
    assert gone_within(stopped, 5)


def test_prompt_longer_than_the_context(run):
    run.sync(1)
    batch = steps.step_requests(run.engine.processor, 1)
    batch[1] = steps.too_long(batch[1])
    with pytest.raises(RolloutError, match=r"row train:77: .*320.* Remedy: lower data.max_prompt_length"):
        run.engine.generate(batch)
    run.check_survived(restarts=0)


def test_a_step_that_takes_too_long_names_the_row_and_the_key(run):
    run.sync(1)
    run.engine.step_timeout_s = 1.0
    on_progress, _ = once(steps.api_process(run.guard_pid).suspend)
    try:
        with pytest.raises(RolloutError, match=r"row .*: no answer .* after 1 s \(worker.rollout.step_timeout_s\)"):
            run.generate(1, on_progress)
    finally:
        steps.api_process(run.guard_pid).resume()
        run.engine.step_timeout_s = 3600.0
    run.check_survived(restarts=0)


def test_silent_engine_and_restarts_used_up(run):
    """The last row for this engine: a prompt's time is over before the watchdog is sure, but no restart is left."""
    processes = steps.server_processes(run.guard_pid)
    run.engine.max_restarts = run.engine.restarts
    run.engine.client.request_timeout_s = 1.0
    on_progress, _ = once(steps.engine_process(run.guard_pid).suspend)
    run.sync(2)
    with pytest.raises(RolloutError) as caught:
        run.generate(2, on_progress)
    words = (
        r"row rows:\d: no answer .* within 1 s \(worker.rollout.request_timeout_s\). It is not started again: worker"
    )
    assert re.match(words, str(caught.value))
    assert "max_restarts is 3 and 3 are used. Rows without an answer: rows:1, rows:3." in str(caught.value)
    run.engine.close()
    assert gone_within(processes, 10)


def test_killed_while_one_of_two_ranks_generates(run, two_ranks):
    """Both take part in giving the new server its sharded weights; only rank 1's second prompt is generated again. A
    refused prompt of rank 1, and a server that falls too often, end both ranks with the same words and exit code 1."""
    folder, processes = two_ranks
    assert [process.wait(240) for process in processes] == [1, 1], (folder / "rank-0.log").read_text()[-3000:]
    guard = int((folder / "guard").read_text())
    assert wait_until(lambda: not psutil.pid_exists(guard), 10)
    notes = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    unbroken = steps.plain(run.unbroken[1])
    assert [notes[0]["answers"], notes[1]["answers"]] == [unbroken[:1], unbroken[2:]]
    assert [notes[0]["again"], notes[1]["again"]] == [unbroken[:1], unbroken[2:]]
    assert notes[0]["metrics"] == notes[1]["metrics"] == {"rollout/restarts": 1, "rollout/retries": 1}
    assert "was killed by SIGKILL. It is started again (restart 1 of at most 1 in a run)" in notes[0]["warnings"][0]
    assert "1 prompt(s) are asked again" in notes[0]["warnings"][1] and not notes[1]["warnings"]
    for name, words in {"refused": "row train:77: ", "end": "max_restarts is 1 and 1 are used. Rows without"}.items():
        assert words in notes[0][name] and words in notes[1][name]


def test_no_vllm_process_outlives_a_killed_trainer(trainer):
    """Not even when the guard has been stopped before: the trainer's end wakes it."""
    processes = trainer.server()
    assert len(processes) >= 3  # guard, API process, engine
    assert trainer.socket_folders()
    processes[0].suspend()
    trainer.kill()
    assert gone_within(processes, 10)
    assert not trainer.socket_folders()


def test_all_processes_listen_on_loopback_and_none_outlives_trainer_and_guard(large):
    processes = large.server()
    kinds = " ".join(process.name() for process in processes)
    assert "DPCoordinator" in kinds and "EngineCore_DP1" in kinds
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    open_to = {entry.laddr.ip for entry in sockets if entry.status == psutil.CONN_LISTEN or not entry.raddr}
    assert open_to == {"127.0.0.1"}
    (folder,) = large.socket_folders()
    assert folder.stat().st_mode & 0o077 == 0 and list(folder.iterdir())
    processes[0].kill()
    large.kill()
    assert gone_within(processes, 10)


def test_a_lost_engine_ends_the_command_with_1(capsys):
    def lose(arguments):
        raise RolloutError("the vLLM server has ended")

    assert guarded(lose, []) == 1
    assert "RolloutError: the vLLM server has ended" in capsys.readouterr().err
