"""Experiment services: Weights & Biases, SwanLab, MLflow and trackio get the numbers of each step under the same
names, and one picture of samples.

Each uses its own environment variables, WANDB_MODE=offline, SWANLAB_MODE=local, MLFLOW_TRACKING_URI, TRACKIO_DIR among
them. The run's id at each service is kept in services.json of the run folder, so that a resumed run goes on there;
steps done twice are then on file there twice, or the first time only, as the service has it.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from grpo_vlm.errors import ConfigError
from grpo_vlm.report.board import sample_grids
from grpo_vlm.report.files import SERVICES_NAME, read_settings, replace_text
from grpo_vlm.report.record import StepRecord
from grpo_vlm.report.run_folder import RunFolder

MLFLOW_BATCH = 100  # parameters that its server takes at once
MLFLOW_CHARACTERS = 500  # of a parameter


class Service(Protocol):
    """A started run of a service; `id` names it there."""

    id: str

    def log(self, scalars: Mapping[str, float], pictures: Mapping[str, Image.Image], step: int) -> None: ...

    def finish(self) -> None: ...


class Wandb:
    """Weights & Biases. Raises ConfigError where it refuses to start a run, e.g. without a login."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], id: str | None) -> None:
        self._wandb = wandb = import_module("wandb")
        self.id = id or secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=self.id,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                allow_val_change=True,
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger: wandb does not start a run ({error}). Run `wandb login`, set WANDB_MODE=offline, or"
                " take wandb out of the list."
            ) from error

    def log(self, scalars: Mapping[str, float], pictures: Mapping[str, Image.Image], step: int) -> None:
        images = {name: self._wandb.Image(picture, file_type="jpg") for name, picture in pictures.items()}
        self._run.log({**scalars, **images}, step=step)

    def finish(self) -> None:
        self._run.finish()


class SwanLab:
    """SwanLab; SWANLAB_MODE and SWANLAB_LOG_DIR as it knows them, its files in the run folder by default."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], id: str | None) -> None:
        self._swanlab = import_module("swanlab")
        self.id = id or secrets.token_hex(8)
        self._run = self._swanlab.init(
            project=project,
            name=name,
            id=self.id,
            resume="allow",
            log_dir=os.environ.get("SWANLAB_LOG_DIR", str(folder / "swanlog")),
            mode=os.environ.get("SWANLAB_MODE"),
            config=dict(settings),
        )

    def log(self, scalars: Mapping[str, float], pictures: Mapping[str, Image.Image], step: int) -> None:
        images = {name: self._swanlab.Image(picture, file_type="jpg") for name, picture in pictures.items()}
        self._run.log({**scalars, **images}, step=step)

    def finish(self) -> None:
        self._run.finish()


class MLflow:
    """MLflow. It allows no "@" in a name: val/mean@4 is val/mean_at_4 there."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], id: str | None) -> None:
        self._entities = import_module("mlflow.entities")
        self._client = import_module("mlflow").MlflowClient()
        if id is not None:
            self.id = id
            self._client.update_run(id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self.id = self._client.create_run(experiment, run_name=name).info.run_id
        params = [self._entities.Param(key, str(value)[:MLFLOW_CHARACTERS]) for key, value in settings.items()]
        for first in range(0, len(params), MLFLOW_BATCH):
            self._client.log_batch(self.id, params=params[first : first + MLFLOW_BATCH])

    def log(self, scalars: Mapping[str, float], pictures: Mapping[str, Image.Image], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name.replace("@", "_at_"), value, now, step) for name, value in scalars.items()
        ]
        self._client.log_batch(self.id, metrics=metrics)
        for name, picture in pictures.items():
            self._client.log_image(self.id, picture, artifact_file=f"{name}/{step:06d}.jpg")

    def finish(self) -> None:
        self._client.set_terminated(self.id)


class Trackio:
    """trackio, which knows a run by its name."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], id: str | None) -> None:
        self._trackio = import_module("trackio")
        self.id = id or name
        self._run = self._trackio.init(
            project=project,
            name=self.id,
            config=dict(settings),
            resume="never" if id is None else "allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, scalars: Mapping[str, float], pictures: Mapping[str, Image.Image], step: int) -> None:
        images = {name: self._trackio.Image(picture) for name, picture in pictures.items()}
        self._run.log({**scalars, **images}, step=step)

    def finish(self) -> None:
        self._run.finish()


SERVICES: dict[str, type[Service]] = {"wandb": Wandb, "swanlab": SwanLab, "mlflow": MLflow, "trackio": Trackio}


class ServiceTracker:
    """Gives each record to one service. The names of project and run, and the settings shown there, are those of the
    run folder's config.yaml, from which secrets are left out."""

    def __init__(self, name: str, run_folder: RunFolder, *, resumed: bool) -> None:
        path = run_folder.path / SERVICES_NAME
        ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() and resumed else {}
        settings = read_settings(run_folder.config_path)
        project, run_name = settings["trainer.project_name"], settings["trainer.experiment_name"]
        self._service = SERVICES[name](run_folder.path, project, run_name, settings, ids.get(name))
        self._open = True
        replace_text(path, json.dumps(ids | {name: self._service.id}, indent=2) + "\n")

    def log(self, record: StepRecord) -> None:
        self._service.log(record.scalars(), sample_grids(record.groups), record.step)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._service.finish()
