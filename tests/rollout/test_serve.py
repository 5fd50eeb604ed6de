"""The command that starts a server for several runs: what it reads and refuses. (Run: test_placements_live.py.)"""

import socket

import pytest

from grpo_vlm.errors import ConfigError
from grpo_vlm.rollout.serve import read_key, read_settings
from tests.tiny import tiny_model


@pytest.fixture
def model(tmp_path_factory):
    return f"worker.actor.model.model_path={tiny_model('qwen2_5_vl', tmp_path_factory.getbasetemp())}"


def test_a_runs_own_configuration_will_do(model, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "worker: {rollout: {placement: dedicated, gpus: [3], n: 8}}\ntrainer: {n_gpus_per_node: 8}\n"
    )
    rollout = read_settings(str(tmp_path / "run.yaml"), [model]).worker.rollout
    assert (rollout.placement, rollout.gpus, rollout.port) == ("external", [], 8000)
    items = ["worker.rollout.placement=external", "worker.rollout.base_url=http://127.0.0.1:8123"]
    assert read_settings(None, [model, *items]).worker.rollout.port == 8123
    assert read_settings(None, [model, *items, "worker.rollout.port=8124"]).worker.rollout.port == 8124


def test_all_faults_are_named_at_once():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        items = ["x=1", "worker.rollout.max_model_len=5", "worker.rollout.engine_kwargs={host: a}"]
        with pytest.raises(ConfigError) as caught:
            read_settings(None, [*items, f"worker.rollout.port={port}"])
    message = str(caught.value)
    for part in (
        "x (command line): unknown key",
        "max_model_len: 5 is less",
        "engine_kwargs.host: cannot be set here",
    ):
        assert part in message
    assert "worker.actor.model.model_path: is empty" in message and f"worker.rollout.port: {port} is in use" in message


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (None, "is not set"),
        ("tiny", "is shorter than 16 characters"),
        ("a secret of a file\n", "has a blank at an end, a line break"),
        ("k" * 16 + "\u00e9", "or a letter outside ASCII"),
    ],
)
def test_there_must_be_a_key(key, problem, monkeypatch):
    monkeypatch.delenv("GRPO_VLM_ROLLOUT_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", key)
    with pytest.raises(ConfigError, match=rf"GRPO_VLM_ROLLOUT_KEY: .*{problem}.*; set it .* export") as caught:
        read_key()
    assert key is None or key not in str(caught.value)
    monkeypatch.setenv("GRPO_VLM_ROLLOUT_KEY", "k" * 16)
    assert read_key() == "k" * 16
