"""Each tracker gets the same record; TensorBoard's events are read back."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_vlm.errors import ConfigError
from grpo_vlm.report import RunFolder, Sample, StepRecord
from grpo_vlm.report.console import Console
from grpo_vlm.report.trackers import make_trackers
from tests.report.runs import groups_of


def run_steps(folder: RunFolder, steps: range, reward: float, resume_step: int | None = None) -> str:
    stream = io.StringIO()
    names = ["console", "file", "tensorboard"]
    trackers = make_trackers(names, folder, console=Console(stream), total_steps=9, resume_step=resume_step)
    assert len(trackers) == 4  # and the report
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


def test_tensorboard_has_a_picture_and_distributions_of_each_step(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n")
    *_, tracker = make_trackers(["tensorboard"], folder, console=Console(), total_steps=3)
    for step in (1, 2, 3):
        samples = [
            Sample(step, "train", f"r:{i}", "", "", "", {"overall": i / 4} if i else {}, 0.0, 10 * i, "stop")
            for i in range(4)
        ]
        groups = groups_of(step) + (groups_of(step, "val") if step == 3 else [])
        tracker.log(StepRecord(step, {"reward/overall": 0.5}, samples, {"gen": 1.5}, groups))
    tracker.close()
    events = EventAccumulator(str(folder.tensorboard_path), size_guidance={"images": 0, "histograms": 0})
    events.Reload()
    assert events.Tags()["images"] == ["samples/train", "samples/val"]
    for name, steps in (("samples/train", [1, 2, 3]), ("samples/val", [3])):
        assert [event.step for event in events.Images(name)] == steps
        picture = Image.open(io.BytesIO(events.Images(name)[-1].encoded_image_string))
        assert picture.size == (events.Images(name)[-1].width, events.Images(name)[-1].height)
        strip = np.asarray(picture)[:, :200].reshape(-1, 600)
        assert picture.height > 6 * 100 and (strip.std(axis=1) > 5).mean() > 0.5  # pictures down its left side
    rewards, lengths = (events.Histograms(f"distribution/{name}") for name in ("reward", "response_length"))
    assert [event.step for event in rewards] == [1, 2, 3]
    assert (rewards[0].histogram_value.num, rewards[0].histogram_value.sum) == (3, 1.5)
    assert (lengths[0].histogram_value.num, lengths[0].histogram_value.max) == (4, 30)
    folder.close()


def test_an_abandoned_run_keeps_its_events_and_leaves_nothing_without_any(tmp_path):
    for steps in (0, 1):
        folder = RunFolder.open(tmp_path / "project" / "run", resume_step=None, config_yaml="a: 1\n")
        *_, tracker = make_trackers(["tensorboard"], folder, console=Console(), total_steps=1)
        for step in range(steps):
            tracker.log(StepRecord(step, {"reward/overall": 0.5}))
        folder.abandon()
        tracker.close()
        assert len(list(tmp_path.rglob("events*"))) == steps
        assert (tmp_path / "project").exists() == (steps == 1)


def test_an_unknown_tracker_is_named(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n")
    with pytest.raises(
        ConfigError, match=r"trainer.logger: no tracker wanda, foo. Choose from console, file, tensorboard, wandb"
    ):
        make_trackers(["wanda", "file", "foo"], folder, console=Console(), total_steps=1)


def test_other_processes_track_nothing(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml="a: 1\n", write=False)
    assert make_trackers(["file", "tensorboard"], folder, console=Console(), total_steps=1) == []
    assert not folder.path.exists()
