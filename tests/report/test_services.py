"""wandb, SwanLab, MLflow and trackio without a network: what they kept is read back. Each is tried where it is
installed."""

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_vlm.config import check_config, load_config, to_yaml
from grpo_vlm.config.load import read_config
from grpo_vlm.config.trackers import SERVICES as NAMES
from grpo_vlm.config.trackers import not_installed
from grpo_vlm.errors import ConfigError
from grpo_vlm.report import RunFolder
from grpo_vlm.report.console import Console
from grpo_vlm.report.services import SERVICES
from grpo_vlm.report.trackers import make_trackers
from tests.report.runs import record

BLOCK = 32768
Found = dict[str, list[tuple[int, float]]]  # name -> (step, value)


def payloads(path: Path) -> Iterator[bytes]:
    """The records of a log in LevelDB's format, which wandb and SwanLab write."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = BLOCK - at % BLOCK
        if room < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def read_wandb(folder: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    found: Found = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in payloads(path):
            history = wandb_internal_pb2.Record.FromString(data).history
            for item in history.item:
                name = item.key or "/".join(item.nested_key)
                if name.partition("/")[0] != "samples":
                    found.setdefault(name, []).append((history.step.num, float(item.value_json)))
    assert list(folder.glob("wandb/offline-run-*/files/media/images/samples/train_*.jpg"))
    return found


def read_swanlab(folder: Path) -> Found:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    found: Found = {}
    for path in sorted(folder.glob("swanlog/run-*/*.swanlab")):
        for data in payloads(path):
            scalar = record_pb2.Record.FromString(data).scalar
            if scalar.key:
                found.setdefault(scalar.key, []).append((scalar.step, scalar.value.number))
    assert list(folder.glob("swanlog/run-*/media/image/*"))
    return found


def read_mlflow(folder: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("vision").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["worker.rollout.n"] == "4"
    assert [file.path for file in client.list_artifacts(run.info.run_id, "samples/train")]
    return {
        name.replace("_at_", "@"): [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


def read_trackio(folder: Path) -> Found:
    from trackio.sqlite_storage import SQLiteStorage

    found: Found = {}
    for row in SQLiteStorage.get_logs("vision", "first"):
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                found.setdefault(name, []).append((row["step"], value))
    return found


READERS = {"wandb": read_wandb, "swanlab": read_swanlab, "mlflow": read_mlflow, "trackio": read_trackio}


def go_on(path: Path, name: str, steps: range, resume_step: int | None) -> None:
    overrides = ["data.train_files=a.parquet", "trainer.project_name=vision", "trainer.experiment_name=first"]
    config = to_yaml(load_config(None, [*overrides, "worker.rollout.n=4"]))
    folder = RunFolder.open(path, resume_step=resume_step, config_yaml=config)
    trackers = make_trackers([name], folder, console=Console(), total_steps=9, resume_step=resume_step)
    for step in steps:
        for tracker in trackers:
            tracker.log(record(step))
    for tracker in trackers:
        tracker.close()
        tracker.close()
    folder.begin_checkpoint(steps[-1])
    folder.finish_checkpoint(steps[-1], score=None)
    folder.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_service_gets_the_same_scalars_and_goes_on_after_a_resume(name, tmp_path, monkeypatch):
    if not_installed([name]):
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its database needs packages that the test does without
    go_on(tmp_path / "run", name, range(4, 6), None)
    go_on(tmp_path / "run", name, range(6, 8), 5)
    found = READERS[name](tmp_path / "run")
    for metric in record(5, groups=False).scalars():
        steps = [5] if metric.startswith("val/") else [4, 5, 6, 7]
        wanted = [(step, pytest.approx(record(step, groups=False).scalars()[metric])) for step in steps]
        assert found[metric] == wanted, metric


def test_every_service_that_can_be_named_is_there():
    assert set(SERVICES) == set(NAMES) == set(READERS)


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    for name in NAMES:
        (tmp_path / name).mkdir()  # a folder of that name, as W&B leaves one, is no package
    gone = not_installed(["console", *NAMES])
    if not gone:
        pytest.skip("all of them are installed")
    config, _, notices = read_config(None, [f"trainer.logger=[console,{','.join(gone)}]"])
    told = "\n".join(notices)
    assert config.trainer.logger == ["console"]
    assert all(
        f"trainer.logger: {name} is left out: it is not installed (pip install {name})" in told for name in gone
    )
    config.trainer.logger += gone  # said in Python and not in a file or a command of EasyR1's
    with pytest.raises(ConfigError, match=f"trainer.logger: not installed here: .*; pip install {' '.join(gone)}"):
        check_config(config, check_port=False)
