"""Run by test_checkpoint_faults.py: runs whose checkpoints are disturbed, forked, so that imports are paid for once.

`python -m tests.training.saving ROOT JOB ...`, a job is "NAME STEPS HOW [MOUNT]": a run in ROOT/NAME/run to STEPS with
a checkpoint after every step, on a file system of its own with these mount options where they are given. Its output is
ROOT/NAME/log, its exit code ROOT/NAME/code. HOW:
    whole       nothing happens
    kill:N:S    N runs one after the other, each killed (SIGKILL) at a random moment of a save, then one to the end; S
                is the seed
    limit       after the first checkpoint no file may be larger than 1 MiB
    readonly    after the first checkpoint the file system is read-only
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback

from grpo_vlm.cli import guarded
from grpo_vlm.training.checkpoint import find_resume
from tests.tiny import tiny_model
from tests.training.rigs import session, settings


class Disturb(TrainerCallback):
    """Once, at the beginning of the second step."""

    def __init__(self, how: str, folder: Path):
        self.how, self.folder = how, folder

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step != 1 or self.how == "whole":
            return
        wait_for(self.folder / "global_step_1")
        if self.how == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        if self.how == "readonly":
            over = str(self.folder)  # a second mount, since the first has files that are open for writing
            subprocess.run(["mount", "--bind", over, over], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", over], check=True)


def wait_for(path: Path) -> None:
    deadline = time.time() + 60
    while not path.exists():
        assert time.time() < deadline, path
        time.sleep(0.01)


def train(root: Path, folder: Path, steps: int, how: str) -> int:
    """A run in this process; the exit code of the command line."""
    config = settings(root, folder, **{"trainer.max_steps": steps, "trainer.save_freq": 1})

    def go(_):
        with session(config) as parts:
            parts.trainer.add_callback(Disturb(how, folder))
            parts.train()

    return guarded(go, ())


def kill(root: Path, folder: Path, steps: int, count: int, seed: int) -> int:
    """Kills `count` runs during a save and says how many were caught with an unfinished folder."""
    draw, config, caught, last = random.Random(seed), settings(root, folder), 0, 0
    for number in range(count):
        child = os.fork()
        if child == 0:
            os._exit(train(root, folder, steps, "whole"))
        for writing in (False, True):  # first it removes what the last one left
            deadline = time.time() + 120
            while any(folder.glob("global_step_*.tmp")) != writing:
                assert time.time() < deadline and os.waitpid(child, os.WNOHANG) == (0, 0), number
                time.sleep(0.0005)
        time.sleep(draw.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        caught += any(folder.glob("global_step_*.tmp"))
        found = find_resume(config, folder)
        assert found is None or (found.warnings == () and found.step >= last), (number, found, last)
        last = last if found is None else found.step
    print(f"caught {caught} of {count}", flush=True)
    return train(root, folder, steps, "whole")


def work(root: Path, name: str, steps: int, how: str, mount: str | None) -> int:
    """One job, in this process, which ends with it. What a mounted file system held is copied to ROOT/NAME/run."""
    log = os.open(root / name / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    place = root / name / ("run" if mount is None else "disk/run")
    if mount is not None:
        place.parent.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", mount, "none", str(place.parent)], check=True)
    if how.startswith("kill"):
        _, runs, seed = how.split(":")
        return kill(root, place, steps, int(runs), int(seed))
    code = train(root, place, steps, how)
    if mount is not None:
        shutil.copytree(place, root / name / "run")
    return code


if __name__ == "__main__":
    top = Path(sys.argv[1])
    torch.set_num_threads(1)
    tiny_model("qwen2_5_vl", top)
    for job in sys.argv[2:]:
        title, count, manner, options = [*job.split(), None][:4]
        (top / title).mkdir(exist_ok=True)
        process = os.fork()
        if process == 0:
            try:
                code = work(top, title, int(count), manner, options)
            finally:
                sys.stdout.flush()
            os._exit(code)
        _, status = os.waitpid(process, 0)
        (top / title / "code").write_text(str(os.waitstatus_to_exitcode(status)))
