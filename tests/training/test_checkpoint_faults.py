"""Whatever happens while a checkpoint is written, the last good one stays, a run goes on from it, and says what was
wrong. The rows of docs/faults.md on checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_vlm.report import checkpoint_steps
from grpo_vlm.training.manifest import find_fault
from tests.training.saved import files

ROOT = Path(__file__).parents[2]
MAY_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
KILLED = ["killed 4 kill:3:7", "whole 4 whole"]
DISKS = {
    "full": ("size=26m", "whole", ["the checkpoint of step 2 could not be written: it takes", "are free on the disk"]),
    "inodes": ("size=90m,nr_inodes=50", "whole", ["could not be written", "No space left on device"]),
    "fixed": (
        "size=90m",
        "readonly",
        ["step 2 cannot be recorded", "Read-only file system", "goes on from global_step_1"],
    ),
}


def run(place: Path, *jobs: str) -> None:
    """In a mount namespace where that is permitted."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tests.training.saving", str(place), *jobs]
    subprocess.run(["unshare", "-rm", *command] if MAY_MOUNT else command, check=True, env=env, cwd=ROOT, timeout=1500)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The folder of all runs but the fifty killed ones."""
    place = tmp_path_factory.mktemp("saving")
    disks = [f"{name} 4 {how} {options}" for name, (options, how, _) in DISKS.items()] if MAY_MOUNT else []
    run(place, *KILLED, "limited 3 limit", *disks)
    return place


def result(place: Path, name: str) -> tuple[int, str]:
    """Exit code and output of a job."""
    return int((place / name / "code").read_text()), (place / name / "log").read_text()


def assert_survived_kills(place: Path, count: int) -> None:
    code, log = result(place, "killed")
    assert code == 0, log
    caught = int(log.split("caught ")[1].split()[0])
    assert caught >= count / 3
    assert log.count("a checkpoint whose writing broke off was removed") == caught
    last = count + 1
    assert files(place / "killed" / "run", last) == files(place / "whole" / "run", last)


def test_killed_at_any_moment_of_a_save(place):
    assert_survived_kills(place, 3)


@pytest.mark.slow
def test_killed_at_fifty_moments_of_a_save(tmp_path):
    run(tmp_path, "killed 51 kill:50:11", "whole 51 whole")
    assert_survived_kills(tmp_path, 50)


def test_no_file_may_grow(place):
    code, log = result(place, "limited")
    assert code == 2, log
    assert "the checkpoint of step 2 could not be written" in log and "File too large" in log
    assert "The last good one is global_step_1" in log and "Traceback" not in log
    folder = place / "limited" / "run"
    assert checkpoint_steps(folder) == [1] and find_fault(folder / "global_step_1") is None
    assert not list(folder.glob("*.tmp"))


@pytest.mark.skipif(not MAY_MOUNT, reason="this machine permits no mount in a namespace of one's own")
@pytest.mark.parametrize("name", DISKS)
def test_disk(place, name):
    code, log = result(place, name)
    assert code == 2 and "Traceback" not in log, log
    assert all(part in log for part in DISKS[name][2]), log
    steps, folder = checkpoint_steps(place / name / "run"), place / name / "run"
    assert steps and steps[-1] < 4 and all(find_fault(folder / f"global_step_{step}") is None for step in steps)
