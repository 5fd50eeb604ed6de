"""Checkpoints: what is in them, what is refused, which one a run goes on from, what `grpo-vlm export` makes of it."""

import base64
import dataclasses
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from grpo_vlm.cli import main
from grpo_vlm.errors import ConfigError
from grpo_vlm.report import checkpoint_steps
from grpo_vlm.training import room, snapshot
from grpo_vlm.training.checkpoint import find_resume
from grpo_vlm.training.manifest import find_fault, read_manifest
from grpo_vlm.training.snapshot import Shards, shard_files
from tests.training.rigs import session, settings
from tests.training.saved import files

LORA = {"worker.actor.model.lora.rank": 4, "worker.actor.model.lora.alpha": 8, "worker.actor.optim.lr": 1e-2}


def train(root, folder, **changes):
    """A finished run; returns its trainer."""
    with session(settings(root, folder, **{"trainer.save_freq": 1, "trainer.max_steps": 2, **changes})) as parts:
        parts.train()
        return parts.trainer


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run of two steps with a checkpoint each, and the root of the models."""
    root, folder = tmp_path_factory.getbasetemp(), tmp_path_factory.mktemp("done") / "run"
    train(root, folder)
    return root, folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (cut, "state/optimizer.safetensors", "were written"),
        (flip, "model/model.safetensors", "has other contents than were written"),
        (lambda path: path.unlink(), "state/rng.json", "is absent"),
        (cut, "manifest.json", "is absent or cannot be read"),
    ],
    ids=["truncated", "one bit", "absent", "manifest"],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(done, tmp_path, damage, name, said):
    root, folder = done
    config, path = settings(root, tmp_path / "run"), tmp_path / "run"
    shutil.copytree(folder, path)
    damage(path / "global_step_2" / name)
    found = find_resume(config, path)
    assert found.step == 1 and len(found.warnings) == 1
    assert all(part in found.warnings[0] for part in ("global_step_2 IS DAMAGED", name, said, "global_step_1"))

    named = dataclasses.replace(config.trainer, load_checkpoint_path=str(path / "global_step_2"))
    with pytest.raises(ConfigError, match=r"not a whole checkpoint(.|\n)*beside it: global_step_1"):
        find_resume(dataclasses.replace(config, trainer=named), path)
    damage(path / "global_step_1" / name)
    with pytest.raises(ConfigError, match="does not begin again by itself"):
        find_resume(config, path)


def test_a_run_goes_on_from_the_one_before_and_ends_alike(done, tmp_path, capsys):
    root, folder = done
    shutil.copytree(folder, tmp_path / "run")
    cut(tmp_path / "run" / "global_step_2" / "model" / "model.safetensors")
    train(root, tmp_path / "run")
    shown = capsys.readouterr().out
    assert "global_step_2 IS DAMAGED" in shown and "resumed after 1" in shown
    assert files(tmp_path / "run", 2) == files(folder, 2)
    assert (tmp_path / "run" / "global_step_2.superseded").is_dir()


def test_direct_and_in_the_background_are_the_same_bytes(done, tmp_path, monkeypatch, capsys):
    root, folder = done
    trainer = train(root, tmp_path / "direct", **{"trainer.save_in_background": False})
    assert files(tmp_path / "direct", 2) == files(folder, 2)
    listed = read_manifest(folder / "global_step_2")["files"]
    actual = sum(entry["bytes"] for name, entry in listed.items() if name.endswith(".safetensors"))
    assert room.predict(trainer).total == pytest.approx(actual, rel=0.01)
    monkeypatch.setattr("grpo_vlm.training.checkpoint.fits_in_memory", lambda trainer: False)
    train(root, tmp_path / "no-memory")
    assert files(tmp_path / "no-memory", 2) == files(folder, 2)
    assert "written while training waits" in capsys.readouterr().out


def test_what_cannot_fit_is_refused_before_the_first_step(done, tmp_path, monkeypatch):
    root, _ = done
    monkeypatch.setattr(room, "free_in_memory", lambda: 1 << 20)
    monkeypatch.setattr(room, "free_on_disk", lambda path: 1 << 20)
    with pytest.raises(ConfigError) as caught:
        train(root, tmp_path / "run")
    text = str(caught.value)
    assert all(part in text for part in ("save_checkpoint_path", "save_in_background", "MiB", "save_model_only"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("background", [True, False])
def test_shards(tmp_path, background):
    tensors = {f"t{number}": torch.randn(25, 10) for number in range(5)} | {"big": torch.randn(100, 10)}
    tensors["half"] = torch.randn(7).bfloat16()
    shards = Shards(tmp_path, "model", background=background, shard_bytes=2048)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        shards.add(name, tensor)
        tensor.zero_()  # the trainer goes on
    shards.copied()
    shards.finish()
    where = shard_files(tmp_path, "model")
    assert list(where) == sorted(copies) and len(set(where.values())) == 5
    for name, path in where.items():
        assert torch.equal(load_file(path)[name], copies[name])
    assert not list(tmp_path.glob("*.part"))


def test_a_model_of_several_files_loads(done, tmp_path, monkeypatch):
    root, folder = done
    monkeypatch.setattr(snapshot, "SHARD_BYTES", 1 << 20)
    train(root, tmp_path / "run")
    model = tmp_path / "run" / "global_step_2" / "model"
    assert len(list(model.glob("model-0000*-of-0000*.safetensors"))) > 2
    ours, theirs = (
        AutoModelForImageTextToText.from_pretrained(at / "global_step_2" / "model")
        for at in (model.parents[1], folder)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    )


def test_the_limit_keeps_the_best_and_the_last(done, tmp_path):
    root, _ = done
    config = settings(
        root, tmp_path / "run", **{"trainer.max_steps": 4, "trainer.save_freq": 1, "trainer.save_limit": 1}
    )
    scores = iter([0.1, 0.9, 0.5, 0.3])
    with session(config) as parts:
        finish = parts.trainer.saver.submit
        parts.trainer.saver.submit = lambda draft, facts, score: finish(draft, facts, score=next(scores))
        parts.train()
    assert checkpoint_steps(tmp_path / "run") == [2, 4]
    best = json.loads((tmp_path / "run" / "checkpoint_tracker.json").read_text())
    assert (best["best_global_step"], best["last_global_step"]) == (2, 4)


# ---- grpo-vlm export


def test_export_a_full_model(done, tmp_path, capsys):
    _, folder = done
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 0
    assert "global_step_2" in capsys.readouterr().out
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    saved = AutoModelForImageTextToText.from_pretrained(folder / "global_step_2" / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), saved.parameters(), strict=True))
    AutoProcessor.from_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    for part in ("Base model | tiny-qwen2_5_vl", "Reward in training", "reward.svg", "worker.actor.optim.lr: 0.0001"):
        assert part in card
    assert (tmp_path / "out" / "reward.svg").read_text().count("<polyline") == 1
    assert main(["export", str(folder), "--to", str(tmp_path / "out")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert main(["export", str(folder), "--to", str(tmp_path / "other"), "--step", "9"]) == 2
    assert "it has 1, 2" in capsys.readouterr().err


def test_export_an_adapter_alone_and_merged(done, tmp_path):
    root, _ = done
    train(root, tmp_path / "whole", **LORA, **{"trainer.max_steps": 1})
    train(root, tmp_path / "alone", **LORA, **{"trainer.max_steps": 1, "trainer.save_merged": False})
    assert not (tmp_path / "alone" / "global_step_1" / "model").exists()
    for run in ("whole", "alone"):
        assert main(["export", str(tmp_path / run), "--to", str(tmp_path / f"{run}-adapter")]) == 0
        assert main(["export", str(tmp_path / run), "--to", str(tmp_path / f"{run}-model"), "--merge"]) == 0
        AutoProcessor.from_pretrained(tmp_path / f"{run}-adapter")
        AutoProcessor.from_pretrained(tmp_path / f"{run}-model")
    for name in ("adapter/adapter_model.safetensors", "state/optimizer.safetensors"):
        assert files(tmp_path / "whole", 1)[name] == files(tmp_path / "alone", 1)[name]
    merged, saved = (load_file(tmp_path / f"{run}-model" / "model.safetensors") for run in ("alone", "whole"))
    assert merged.keys() == saved.keys() and all(torch.equal(merged[name], saved[name]) for name in saved)
    adapter = load_file(tmp_path / "alone-adapter" / "adapter_model.safetensors")
    assert adapter and not (tmp_path / "alone-adapter" / "model.safetensors").exists()
    assert "PeftModel" in (tmp_path / "alone-adapter" / "README.md").read_text()
    resumed = train(root, tmp_path / "alone", **LORA, **{"trainer.save_merged": False})
    assert resumed.rollout_step == 2 and find_fault(tmp_path / "alone" / "global_step_2") is None


class Hub(BaseHTTPRequestHandler):
    """What an upload asks of the Hugging Face hub: a repository, how to send each file, a commit."""

    def do_POST(self):
        length = self.headers.get("Content-Length")
        self.server.asked.append((self.path, self.rfile.read(int(length)) if length else self._chunks()))
        if self.headers.get("Authorization") != "Bearer hf_right":
            return self._answer(401, {"error": "Invalid username or password."})
        address = f"http://127.0.0.1:{self.server.server_port}/someone/model"
        if self.path.endswith("/preupload/main"):
            names = [entry["path"] for entry in json.loads(self.server.asked[-1][1])["files"]]
            return self._answer(
                200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        return self._answer(200, {"url": address, "commitUrl": f"{address}/commit/1", "commitOid": "1"})

    def _chunks(self):
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        return content

    def _answer(self, code, content):
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture
def hub(monkeypatch):
    """A server that answers as the hub does; what it was asked is in `asked`."""
    server = HTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_push(done, tmp_path, hub, monkeypatch, capsys):
    _, folder = done
    command = ["export", str(folder), "--to", str(tmp_path / "out"), "--push", "someone/model"]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert main(command) == 2
    assert "hf auth login" in capsys.readouterr().err and (tmp_path / "out" / "README.md").is_file()

    monkeypatch.setenv("HF_TOKEN", "hf_right")
    shutil.rmtree(tmp_path / "out")
    hub.asked.clear()
    assert main(command) == 0
    created = json.loads(next(body for path, body in hub.asked if path == "/api/repos/create"))
    assert created["visibility"] == "private" and "someone/model" in capsys.readouterr().out
    commit = next(body for path, body in hub.asked if path.endswith("/commit/main"))
    sent = [json.loads(line)["value"] for line in commit.splitlines() if b'"file"' in line]
    content = {entry["path"]: base64.b64decode(entry["content"]) for entry in sent}
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert content == written and "model.safetensors" in content
