"""The run folder: what survives kill -9, what is refused, what a resume moves aside, which checkpoints are kept."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_vlm.errors import ConfigError
from grpo_vlm.report import RunFolder, Sample, StepRecord, last_checkpoint
from grpo_vlm.report.run_folder import CheckpointTracker

CONFIG = "trainer:\n  max_steps: 50\n"


def make_record(step: int, **metrics: float) -> StepRecord:
    samples = [
        Sample(step, "train", f"rows:{i}", "p", "é\n" * 50, "x", {"overall": 1.0}, 0.5, 3, "stop") for i in (0, 1)
    ]
    return StepRecord(step, {"reward/overall": step / 100, **metrics}, samples, {"gen": 1.5})


def read_steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def save(folder: RunFolder, step: int, score: float | None = None) -> Path:
    (folder.begin_checkpoint(step) / "weights").write_text(str(step))
    return folder.finish_checkpoint(step, score=score)


def list_tree(path: Path) -> dict[str, str]:
    return {str(item.relative_to(path)): item.read_text() for item in path.rglob("*") if item.is_file()}


def start_run(path: Path, steps: int) -> RunFolder:
    folder = RunFolder.open(path, resume_step=None, config_yaml=CONFIG)
    for step in range(1, steps + 1):
        folder.append(make_record(step))
    return folder


def test_a_new_folder_holds_config_and_lines(tmp_path):
    folder = start_run(tmp_path / "project" / "experiment", 2)
    folder.close()
    assert folder.config_path.read_text() == CONFIG
    rows = [json.loads(line) for line in folder.metrics_path.read_text().splitlines()]
    assert rows == [{"step": s, "timing_s/gen": 1.5, "reward/overall": s / 100} for s in (1, 2)]
    samples = [json.loads(line) for line in folder.samples_path.read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["row_id"]) for row in samples] == [(s, f"rows:{i}") for s in (1, 2) for i in (0, 1)]
    assert samples[0]["response"] == "é\n" * 50
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.yaml", "metrics.jsonl", "samples.jsonl"]


def test_only_the_writing_process_writes(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml=CONFIG, write=False)
    folder.append(make_record(1))
    assert folder.prune(1) == []
    folder.close()
    folder.abandon()
    assert not (tmp_path / "run").exists()


def test_a_step_is_recorded_once(tmp_path):
    folder = start_run(tmp_path / "run", 2)
    with pytest.raises(AssertionError, match="step 2 after step 2"):
        folder.append(make_record(2))
    assert read_steps(folder.metrics_path) == [1, 2]


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from grpo_vlm.report import RunFolder, StepRecord, Sample
folder = RunFolder.open(sys.argv[1], resume_step=None, config_yaml="a: 1\\n")
for step in range(1, 10**6):
    samples = [Sample(step, "train", "r:0", "p", "long " * 20000, "x", {"overall": 1.0}, 0.5, 3, "stop")]
    folder.append(StepRecord(step, {"reward/overall": 0.5}, samples))
    if step in (2, 4):
        (folder.begin_checkpoint(step) / "weights").write_text(str(step))
        folder.finish_checkpoint(step, score=None)
    if step == 6:
        folder.begin_checkpoint(step)
        print("saving", flush=True)
"""


def test_kill_9_then_resume_has_each_step_once(tmp_path):
    path = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", KILLED_RUN, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.05)  # it goes on appending meanwhile
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    # wherever the kill fell, also cut the last lines short in the middle of a character
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(path / name, "ab") as file:
            file.write('{"step": 999, "response": "é'.encode()[:-1])
    assert last_checkpoint(path) == 4 and (path / "global_step_6.tmp").is_dir()
    before = read_steps_raw(path / "metrics.jsonl")
    assert max(before) >= 6

    folder = RunFolder.open(path, resume_step=4, config_yaml="a: 1\n")
    for step in (5, 6):
        folder.append(make_record(step))
    assert read_steps(folder.metrics_path) == [1, 2, 3, 4, 5, 6]
    assert sorted(set(read_steps(folder.samples_path))) == [1, 2, 3, 4, 5, 6]
    aside = [json.loads(line) for line in (path / "metrics.superseded.jsonl").read_text("utf-8").splitlines()]
    assert [row["step"] for row in aside[:-1]] == [step for step in before if step > 4]
    assert aside[-1]["unreadable"].startswith('{"step": 999')
    assert folder.superseded["metrics.jsonl"] == len(aside)
    assert not list(path.glob("*.tmp"))
    assert folder.checkpoints() == [2, 4]


def read_steps_raw(path: Path) -> list[int]:
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line)["step"] for line in lines]


def test_a_second_resume_keeps_the_lines_of_the_first(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    save(folder, 1)
    folder.append(make_record(2, first=1.0))
    for attempt in (2.0, 3.0):
        folder.close()
        folder = RunFolder.open(folder.path, resume_step=1, config_yaml=CONFIG)
        folder.append(make_record(2, first=attempt))
    rows = [json.loads(line) for line in (folder.path / "metrics.superseded.jsonl").read_text().splitlines()]
    assert [row["first"] for row in rows] == [1.0, 2.0]
    assert read_steps(folder.metrics_path) == [1, 2]


def test_a_kill_between_the_two_replacements_moves_nothing_twice(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    save(folder, 1)
    folder.append(make_record(2))
    folder.close()
    line = folder.metrics_path.read_text().splitlines(keepends=True)[1]
    (folder.path / "metrics.superseded.jsonl").write_text(line)
    RunFolder.open(folder.path, resume_step=1, config_yaml=CONFIG)
    assert (folder.path / "metrics.superseded.jsonl").read_text() == line
    assert read_steps(folder.metrics_path) == [1]


def test_an_occupied_folder_is_refused_and_unchanged(tmp_path):
    folder = start_run(tmp_path / "run", 3)
    folder.close()
    before = list_tree(folder.path)
    with pytest.raises(ConfigError, match="no complete checkpoint") as caught:
        RunFolder.open(folder.path, resume_step=None, config_yaml="other: 1\n")
    for part in (str(folder.path), "metrics.jsonl", "trainer.experiment_name", "trainer.save_checkpoint_path"):
        assert part in str(caught.value)
    (folder.path / "global_step_3").mkdir()
    with pytest.raises(ConfigError, match="find_last_checkpoint=true to resume from step 3"):
        RunFolder.open(folder.path, resume_step=None, config_yaml="other: 1\n")
    assert list_tree(folder.path) == before


def test_a_resume_refuses_what_is_not_this_run(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"not one of a run \(no config.yaml; it holds thesis.tex\)"):
        RunFolder.open(tmp_path, resume_step=3, config_yaml=CONFIG)
    assert list_tree(tmp_path) == {"thesis.tex": "precious"}
    folder = start_run(tmp_path / "run", 3)
    folder.close()
    with pytest.raises(ConfigError, match="without the checkpoint global_step_3"):
        RunFolder.open(folder.path, resume_step=3, config_yaml=CONFIG)
    assert read_steps(folder.metrics_path) == [1, 2, 3]


def test_a_path_that_cannot_be_a_folder_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.open(tmp_path / "file" / "run", resume_step=None, config_yaml=CONFIG)
    with pytest.raises(ConfigError, match="cannot write to"):
        RunFolder.open(tmp_path / "a" / "b" / ("n" * 300), resume_step=None, config_yaml=CONFIG)
    assert list_tree(tmp_path) == {"file": "x"} and not (tmp_path / "a").exists()


def test_two_processes_cannot_write_one_run(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    save(folder, 1)
    code = (
        "import sys; from grpo_vlm.report import RunFolder\n"
        "RunFolder.open(sys.argv[1], resume_step=1, config_yaml='a: 1')"
    )
    command = [sys.executable, "-c", code, str(folder.path)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 1 and f"is in use by process {os.getpid()} on" in second.stderr
    assert folder.config_path.read_text() == CONFIG
    folder.append(make_record(2))
    folder.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_abandon_leaves_nothing_of_a_run_without_a_step(tmp_path):
    folder = RunFolder.open(tmp_path / "project" / "run", resume_step=None, config_yaml=CONFIG)
    (folder.path / "vllm.log").write_text("log")
    folder.tensorboard_path.mkdir()
    folder.begin_checkpoint(1)
    folder.abandon()
    assert list(tmp_path.iterdir()) == []

    folder = start_run(tmp_path / "run", 1)
    folder.abandon()
    assert read_steps(folder.metrics_path) == [1]
    save(RunFolder.open(tmp_path / "saved", resume_step=None, config_yaml=CONFIG), 1)
    RunFolder.open(tmp_path / "saved", resume_step=1, config_yaml=CONFIG).abandon()
    assert last_checkpoint(tmp_path / "saved") == 1


def test_a_changed_config_is_kept_and_told(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    save(folder, 1)
    for steps in (60, 60, 70):
        folder.close()
        folder = RunFolder.open(folder.path, resume_step=1, config_yaml=f"trainer:\n  max_steps: {steps}\n")
    assert folder.config_changes == ["trainer.max_steps: 60 -> 70"]
    names = sorted(path.name for path in folder.path.glob("config*"))
    assert names == ["config.previous.2.yaml", "config.previous.yaml", "config.yaml"]
    assert (folder.path / "config.previous.yaml").read_text() == CONFIG


def test_tracker_follows_best_and_last(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    assert folder.read_tracker() == CheckpointTracker()
    for step, score in ((1, 0.3), (2, 0.5), (3, 0.4), (4, None)):
        save(folder, step, score)
    assert json.loads(folder.tracker_path.read_text()) == {
        "best_global_step": 2,
        "best_val_reward_score": 0.5,
        "last_global_step": 4,
        "last_actor_path": "global_step_4/model",
    }
    folder.tracker_path.write_text("{}")
    with pytest.raises(ConfigError, match="not a checkpoint tracker"):
        folder.read_tracker()


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    folder = start_run(tmp_path / "run", 1)
    for step, score in ((1, 0.3), (2, 0.5), (3, 0.4), (4, 0.4), (5, 0.1)):
        save(folder, step, score)
    assert folder.prune(-1) == []
    assert folder.prune(2) == [1, 3]
    assert folder.checkpoints() == [2, 4, 5]
    assert folder.prune(1) == [4]
    assert {path.name for path in folder.path.glob("global_step*")} == {"global_step_2", "global_step_5"}
    assert (folder.checkpoint_path(2) / "weights").read_text() == "2"


def test_resuming_an_earlier_checkpoint_moves_the_later_ones_aside(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml=CONFIG)
    for step, score in ((1, 0.3), (2, 0.4), (3, 0.9)):
        folder.append(make_record(step, **{"val/reward_score": score}))
        save(folder, step, score)
    folder.close()
    folder = RunFolder.open(folder.path, resume_step=2, config_yaml=CONFIG)
    assert folder.checkpoints() == [1, 2]
    assert (folder.path / "global_step_3.superseded" / "weights").read_text() == "3"
    assert folder.read_tracker() == CheckpointTracker(2, 0.4, 2, "global_step_2/model")


def test_a_kill_before_the_tracker_was_written_is_repaired(tmp_path):
    folder = RunFolder.open(tmp_path / "run", resume_step=None, config_yaml=CONFIG)
    for step, score in ((1, 0.3), (2, 0.4)):
        folder.append(make_record(step, **{"val/reward_score": score}))
    save(folder, 1, 0.3)
    folder.begin_checkpoint(2).rename(folder.checkpoint_path(2))
    folder.close()
    folder = RunFolder.open(folder.path, resume_step=2, config_yaml=CONFIG)
    assert folder.read_tracker() == CheckpointTracker(2, 0.4, 2, "global_step_2/model")
