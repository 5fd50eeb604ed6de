"""The server's life: failing starts say why, and no process outlives the trainer."""

import dataclasses
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from grpo_vlm.config import Config, load_config
from grpo_vlm.errors import RolloutError
from grpo_vlm.rollout.engine import ignored_on_cpu, server_settings
from grpo_vlm.rollout.server import GUARD, ServerSettings, VLLMServer, server_command, server_environment
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


def test_a_failing_start_shows_the_log_and_the_remedy(settings, tmp_path):
    server = VLLMServer(dataclasses.replace(settings, max_model_len=100_000), tmp_path / "vllm.log")
    with pytest.raises(RolloutError) as caught:
        server.start()
    message = str(caught.value)
    assert "Likely remedy: lower worker.rollout.max_model_len" in message and "vllm.log" in message
    assert 10 < message.count("\n") <= 40
    assert server.api_key not in (tmp_path / "vllm.log").read_text()


def test_a_slow_start_is_ended_and_names_the_key(settings, tmp_path):
    server = VLLMServer(dataclasses.replace(settings, start_timeout_s=1.0), tmp_path / "vllm.log")
    waited = []
    with pytest.raises(RolloutError, match=r"not ready after 1 s \(worker.rollout.start_timeout_s\)"):
        server.start(waited.append)
    assert waited and not server.alive()


def test_no_secret_on_the_command_line_and_loopback_only(settings):
    command = server_command(settings, 1234)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    environment = server_environment(settings, "the-key")
    assert environment["VLLM_API_KEY"] == "the-key" and not any("the-key" in part for part in command)
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"


def test_cuda_server_uses_ipc_and_may_sleep(settings):
    cuda = dataclasses.replace(settings, device="cuda", dtype="bfloat16", gpu_memory_utilization=0.3)
    command = server_command(cuda, 1234)
    assert '{"backend": "ipc"}' in command and "--enable-sleep-mode" in command and "--enforce-eager" not in command
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.3"
    assert server_environment(cuda, "key")["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"


def test_what_a_cpu_server_ignores_is_named():
    assert ignored_on_cpu(server_settings(Config(), "cpu")) == []
    items = ["worker.rollout.enable_chunked_prefill=true", "worker.rollout.gpu_memory_utilization=0.5"]
    assert ignored_on_cpu(server_settings(load_config(None, items), "cpu")) == [
        "worker.rollout.enable_chunked_prefill",
        "worker.rollout.gpu_memory_utilization",
    ]


def test_the_launchers_variables_do_not_reach_the_server(settings, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.setenv(name, "1")
    names = server_environment(settings, "key").keys()
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"} & names


def test_guard_ends_the_whole_tree_on_sigterm():
    guard = subprocess.Popen([sys.executable, "-I", GUARD, str(os.getpid()), sys.executable, "-c", TREE])
    assert wait_until(lambda: len(psutil.Process(guard.pid).children(recursive=True)) == 2, 10)
    tree = psutil.Process(guard.pid).children(recursive=True)
    guard.terminate()
    guard.wait(8)
    assert gone(tree)


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


def test_no_vllm_process_outlives_a_killed_trainer(settings, tmp_path):
    trainer_code = f"""
        import time
        from grpo_vlm.rollout.server import ServerSettings, VLLMServer
        server = VLLMServer(ServerSettings(**{dataclasses.asdict(settings)!r}), {str(tmp_path / "vllm.log")!r})
        server.start()
        print(server.process.pid, flush=True)
        time.sleep(300)
    """
    command = [sys.executable, "-c", textwrap.dedent(trainer_code)]
    place = Path(tempfile.mkdtemp())  # where the guard makes the folder of vLLM's sockets, whose paths must be short
    env = {**os.environ, "TMPDIR": str(place)}
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    guard = psutil.Process(int(trainer.stdout.readline()))
    processes = [guard, *guard.children(recursive=True)]
    assert len(processes) >= 3  # guard, API server, engine
    assert list(place.glob("grpo_vlm-*/*"))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    assert wait_until(lambda: gone(processes), 10)
    assert not list(place.glob("grpo_vlm-*"))
