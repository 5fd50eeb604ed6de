"""Each tracker gets the same record; TensorBoard's events are read back."""

import io
import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_vlm.errors import ConfigError
from grpo_vlm.report import RunFolder, StepRecord
from grpo_vlm.report.console import Console
from grpo_vlm.report.trackers import make_trackers


def run_steps(folder: RunFolder, steps: range, reward: float, resume_step: int | None = None) -> str:
    stream = io.StringIO()
    names = ["console", "file", "tensorboard"]
    trackers = make_trackers(names, folder, console=Console(stream), total_steps=9, resume_step=resume_step)
    assert len(trackers) == 3
    for step in steps:
        for tracker in trackers:
            tracker.log(StepRecord(step, {"reward/overall": reward}, [], {"gen": 1.5}))
    for tracker in trackers:
        tracker.close()
        tracker.close()
    folder.close()
    return stream.getvalue()


def read_scalars(folder: RunFolder, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder.tensorboard_path))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_one_record_goes_everywhere_and_resume_replaces_the_rest(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n")
    folder.begin_checkpoint(2)
    folder.finish_checkpoint(2, score=None)
    printed = run_steps(folder, range(1, 5), 0.25)
    assert [line.split("  ")[0] for line in printed.splitlines()] == ["step 1/9", "step 2/9", "step 3/9", "step 4/9"]
    assert read_scalars(folder, "reward/overall") == [(step, 0.25) for step in range(1, 5)]
    assert read_scalars(folder, "timing_s/gen") == [(step, 1.5) for step in range(1, 5)]

    folder = RunFolder.open(tmp_path / "run", resume_step=2, config_yaml="a: 1\n")
    run_steps(folder, range(3, 6), 0.75, resume_step=2)
    expected = [(1, 0.25), (2, 0.25), (3, 0.75), (4, 0.75), (5, 0.75)]
    assert read_scalars(folder, "reward/overall") == expected
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert [(row["step"], row["reward/overall"]) for row in rows] == expected


def test_an_abandoned_run_keeps_its_events_and_leaves_nothing_without_any(tmp_path):
    for steps in (0, 1):
        folder = RunFolder.open(tmp_path / "project" / "run", resume_step=None, config_yaml="a: 1\n")
        _, tracker = make_trackers(["tensorboard"], folder, console=Console(), total_steps=1)
        for step in range(steps):
            tracker.log(StepRecord(step, {"reward/overall": 0.5}))
        folder.abandon()
        tracker.close()
        assert len(list(tmp_path.rglob("events*"))) == steps
        assert (tmp_path / "project").exists() == (steps == 1)


def test_an_unknown_tracker_is_named(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n")
    with pytest.raises(
        ConfigError, match=r"trainer.logger: no tracker wandb, foo. Choose from console, file, tensorboard"
    ):
        make_trackers(["wandb", "file", "foo"], folder, console=Console(), total_steps=1)


def test_other_processes_track_nothing(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n", write=False)
    assert make_trackers(["file", "tensorboard"], folder, console=Console(), total_steps=1) == []
    assert not folder.path.exists()
