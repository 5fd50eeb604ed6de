"""The server's life: failing starts say why, and no process outlives the trainer."""

import dataclasses
import importlib.metadata
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import psutil
import pytest

from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout import versions
from grpo_vlm.rollout.command import ServerSettings
from grpo_vlm.rollout.guard import end_in_words
from grpo_vlm.rollout.server import GUARD, ExternalServer, VLLMServer
from grpo_vlm.rollout.wire import WEIGHTS_PATH
from tests.tiny import tiny_model

# A process that starts another in a session of its own, as a daemon would, and waits.
TREE = "import subprocess, sys, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    path = tiny_model("qwen2_5_vl", tmp_path_factory.getbasetemp())
    return ServerSettings(model_path=str(path), device="cpu", max_model_len=256, cpu_kv_cache_gb=0.25)


def wait_until(condition, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def gone(processes):
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def test_a_taken_port_names_the_key(settings, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        server = VLLMServer(dataclasses.replace(settings, port=port), tmp_path / "vllm.log")
        with pytest.raises(RolloutError, match=rf"worker.rollout.port: port {port} .*null to have one chosen"):
            server.start()
    assert server.process is None


def test_a_missing_plugin_is_said_before_anything_starts(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    server = VLLMServer(settings, tmp_path / "vllm.log")
    with pytest.raises(RolloutError, match=r"grpo_vlm_file_weights is not registered .* pip install"):
        server.start()
    assert server.process is None


@pytest.mark.parametrize(("version", "message"), [((0, 25), "vLLM 0.25 is installed; .* 0.26 to 0.31"), (None, "pip")])
def test_a_vllm_of_another_release_is_said_before_anything_starts(settings, tmp_path, monkeypatch, version, message):
    if version is None:
        monkeypatch.setattr(versions, "NAMES", ())
        monkeypatch.setattr(versions, "installed", versions.installed.__wrapped__)
    else:
        monkeypatch.setattr(versions, "installed", lambda: version)
    server = VLLMServer(settings, tmp_path / "vllm.log")
    with pytest.raises(RolloutError, match=message):
        server.start()
    assert server.process is None
    assert versions.problem((0, 26)) == versions.problem((0, 31)) == ""


UNKNOWN = {"max_nun_seqs": 3, "swap_spaces": [1], "fancy": True}


@pytest.fixture(scope="module")
def failing(settings, tmp_path_factory):
    """What two servers said that cannot start, side by side, and the second one and its log."""
    changes = [{"engine_kwargs": UNKNOWN}, {"max_model_len": 100_000}]
    logs = [tmp_path_factory.mktemp("failing") / "vllm.log" for _ in changes]
    servers = [VLLMServer(dataclasses.replace(settings, **c), log) for c, log in zip(changes, logs, strict=True)]

    def failure(server):
        with pytest.raises(RolloutError) as caught:
            server.start()
        return str(caught.value)

    with ThreadPoolExecutor() as threads:
        return list(threads.map(failure, servers)), servers[1], logs[1]


def test_a_failing_start_shows_the_log_and_the_remedy(failing):
    (_, message), server, log = failing
    assert message.startswith("the vLLM server ended with exit code 1 while starting. Likely remedy: lower worker.")
    assert "First error: ModelConfig: User-specified max_model_len (100000) is greater" in message
    assert str(log) in message and 10 < message.count("\n") <= 40
    assert server.api_key not in log.read_text()


def test_arguments_that_vllm_does_not_know_are_named_in_one_line(failing):
    (message, _), _, _ = failing
    key = "worker.rollout.engine_kwargs."
    start = rf"vLLM 0\.\d+ has no such argument: {key}max_nun_seqs \(did you mean max_num_seqs\?\); {key}swap_spaces"
    assert re.fullmatch(rf"{start}.*; {key}fancy.*\. Correct or remove it", message)


def test_a_slow_start_is_ended_and_names_the_key(settings, tmp_path):
    server = VLLMServer(dataclasses.replace(settings, start_timeout_s=1.0), tmp_path / "vllm.log")
    waited = []
    with pytest.raises(RolloutError, match=r"not ready after 1 s \(worker.rollout.start_timeout_s\)"):
        server.start(waited.append)
    assert waited and not server.alive()


def test_guard_ends_the_whole_tree_on_sigterm():
    guard = subprocess.Popen([sys.executable, "-I", GUARD, str(os.getpid()), sys.executable, "-c", TREE])
    assert wait_until(lambda: len(psutil.Process(guard.pid).children(recursive=True)) == 2, 10)
    tree = psutil.Process(guard.pid).children(recursive=True)
    guard.terminate()
    assert end_in_words(guard.wait(8)) == "was killed by SIGTERM"
    assert gone(tree)


@pytest.mark.parametrize("stopped", [False, True])
def test_guard_ends_the_whole_tree_when_the_trainer_is_killed(stopped):
    start = f"import os, subprocess, sys, time; command = [sys.executable, '-I', {str(GUARD)!r}, str(os.getpid())]\n"
    start += f"subprocess.Popen([*command, sys.executable, '-c', {TREE!r}]); time.sleep(300)"
    trainer = subprocess.Popen([sys.executable, "-c", start])
    assert wait_until(lambda: len(psutil.Process(trainer.pid).children(recursive=True)) == 3, 10)
    tree = psutil.Process(trainer.pid).children(recursive=True)
    if stopped:
        for process in tree:
            process.suspend()
    trainer.kill()
    trainer.wait()
    assert wait_until(lambda: gone(tree), 8)


def test_guard_passes_on_the_exit_code_and_leaves_no_orphan():
    code = "import subprocess, sys; subprocess.Popen(['sleep', '301'], start_new_session=True); sys.exit(3)"
    guard = subprocess.run([sys.executable, "-I", GUARD, str(os.getpid()), sys.executable, "-c", code], timeout=20)
    assert guard.returncode == 3
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "301"]]


def test_killed_guard_takes_the_server_with_it():
    guard = subprocess.Popen([sys.executable, "-I", GUARD, str(os.getpid()), "sleep", "302"])
    assert wait_until(lambda: psutil.Process(guard.pid).children(), 10)
    tree = psutil.Process(guard.pid).children()
    guard.kill()
    guard.wait()
    assert wait_until(lambda: gone(tree), 5)


# Processes as our plugin finds vLLM's. The first forks, in its main thread and in one that ends at once, and spawns.
FAMILY = """
import multiprocessing, os, sys, threading, time
from grpo_vlm.rollout import lifeline

def live(kind):
    if kind == "spawned":
        multiprocessing.get_context("fork").Process(target=live, args=["grandchild"]).start()
    open(os.path.join(sys.argv[1], kind), "w").write(str(os.getpid()))
    time.sleep(300)

if __name__ == "__main__":
    lifeline.hold()
    forked = multiprocessing.get_context("fork").Process
    forked(target=live, args=["forked"]).start()
    by_thread = threading.Thread(target=forked(target=live, args=["by a thread"]).start)
    by_thread.start()
    by_thread.join()
    multiprocessing.get_context("spawn").Process(target=live, args=["spawned"]).start()
    live("first")
"""


def test_killed_guard_takes_children_of_the_server_with_it(tmp_path):
    script, notes = tmp_path / "family.py", tmp_path / "notes"
    script.write_text(FAMILY)
    notes.mkdir()
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-I", GUARD, str(os.getpid()), sys.executable, str(script), str(notes)]
    guard = subprocess.Popen(command, env=env)
    assert wait_until(lambda: len([note for note in notes.iterdir() if note.read_text()]) == 5, 60)
    family = {note.name: psutil.Process(int(note.read_text())) for note in notes.iterdir()}
    assert not gone([family["by a thread"]])  # its thread has ended, but no parent of it has
    guard.kill()
    guard.wait()
    by_thread = family.pop("by a thread")
    assert wait_until(lambda: gone(family.values()), 5)
    by_thread.kill()


def test_a_guard_removes_the_folders_of_killed_ones_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    guards = [subprocess.Popen([sys.executable, "-I", GUARD, str(os.getpid()), "sleep", "303"]) for _ in range(2)]
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 2, 10)
    guards[0].kill()
    guards[0].wait()
    assert len(list(tmp_path.iterdir())) == 2
    assert subprocess.run([sys.executable, "-I", GUARD, str(os.getpid()), "true"], timeout=20).returncode == 0
    assert len(list(tmp_path.iterdir())) == 1  # of the one that runs
    guards[1].terminate()
    guards[1].wait(8)
    assert not list(tmp_path.iterdir())


class Answers(BaseHTTPRequestHandler):
    """What an external server says of itself."""

    models: ClassVar = {"data": [{"id": "policy", "max_model_len": 256}]}

    def do_GET(self):
        wrong = self.path != "/health" and self.headers["Authorization"] != "Bearer key"
        self.send_response(401 if wrong else 200)
        self.end_headers()
        answer = {"held": None, "adapters": False} if self.path == WEIGHTS_PATH else self.models
        self.wfile.write(answer.encode() if isinstance(answer, str) else json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def external(settings, monkeypatch):
    """`external(key, models)`: such a server, and what a trainer knows of it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    quick = dataclasses.replace(settings, placement="external", start_timeout_s=1.0)

    def make(key="key", models=Answers.models):
        monkeypatch.setattr(Answers, "models", models)
        return ExternalServer(quick, f"http://127.0.0.1:{server.server_port}/", key)

    yield make
    server.shutdown()
    server.server_close()


def test_an_external_server_is_found_and_left_alone(external):
    server = external()
    assert server.start() < 5 and server.alive() and not server.url.endswith("/")
    server.stop()
    assert server.healthy()


@pytest.mark.parametrize(
    ("key", "served", "message"),
    [
        ("other", {}, "GRPO_VLM_ROLLOUT_KEY holds another key"),
        ("key", {"id": "Qwen"}, "serves Qwen, not 'policy'"),
        ("key", {"max_model_len": 128}, "max_model_len 128; this run needs 256"),
    ],
)
def test_an_external_server_that_will_not_do(external, key, served, message):
    with pytest.raises(RolloutError, match=message):
        external(key, {"data": [{"id": "policy", "max_model_len": 256} | served]}).start()


def test_a_server_for_whole_models_is_refused_by_a_run_with_adapters(external):
    server = external()
    server.settings = dataclasses.replace(server.settings, lora_rank=8)
    with pytest.raises(RolloutError, match="was started for whole models, and this run sends LoRA adapters"):
        server.start()


def test_a_page_is_no_server(external):
    with pytest.raises(RolloutError, match="is no rollout server: it sends no JSON"):
        external(models="<html>").start()


def test_an_external_server_that_is_not_there(settings):
    waited = []
    server = ExternalServer(dataclasses.replace(settings, start_timeout_s=1.0), "http://127.0.0.1:9", "key")
    with pytest.raises(RolloutError, match=r"worker.rollout.base_url: no server answers at http://127.0.0.1:9"):
        server.start(waited.append)
    assert waited
