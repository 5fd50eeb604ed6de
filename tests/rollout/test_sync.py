"""What a killed sync leaves behind is removed by the next start. (Weights in the server: test_vllm.py.)"""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import torch
from torch import nn

from grpo_vlm.rollout import sync
from grpo_vlm.rollout.sync import FileSync, folder_prefix, remove_left_folders

# A sync of real weights by a process that is killed while the server loads them.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.rollout.test_sync import file_sync
transfer, model = file_sync(lambda *_: os.kill(os.getpid(), signal.SIGKILL), Path(sys.argv[1]))
transfer._transfer(model, iter(model.named_parameters()))
"""


def file_sync(post, folder):
    sync.SHARED_MEMORY = folder
    model = nn.Linear(4, 4)
    accelerator = SimpleNamespace(
        unwrap_model=lambda wrapped: wrapped, state=SimpleNamespace(deepspeed_plugin=None), num_processes=1
    )
    return FileSync(SimpleNamespace(post=post), accelerator, torch.float32, folder), model


def test_folders_of_killed_processes_are_removed_and_no_others(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=os.getcwd())
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert (left / "weights.safetensors").stat().st_size > 64
    dead = left.name.removeprefix(folder_prefix()).partition("-")[0]
    kept = [f"{folder_prefix()}{os.getpid()}-abc", f"grpo_vlm-elsewhere.{dead}-{dead}-abc", f"other-{dead}-abc"]
    for name in kept:
        (tmp_path / name).mkdir()
    assert remove_left_folders(tmp_path, tmp_path / "absent") == [left]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_sync_that_ends_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sync, "SHARED_MEMORY", sync.SHARED_MEMORY)  # file_sync sets it
    seen = []
    transfer, model = file_sync(lambda route, body: seen.append(os.listdir(tmp_path)), tmp_path)
    assert transfer._transfer(model, iter(model.named_parameters())) == 80
    (during,) = seen
    assert during[0].startswith(f"{folder_prefix()}{os.getpid()}-") and not os.listdir(tmp_path)
