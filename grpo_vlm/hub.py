"""Where names of models and data sets are looked up: the Hugging Face hub, or ModelScope with USE_MODELSCOPE_HUB=1.

transformers and datasets know the former themselves. From ModelScope a name becomes a folder on this machine.
"""

import os
from pathlib import Path

from grpo_vlm.errors import ConfigError, DataError

SWITCH = "USE_MODELSCOPE_HUB"
_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def uses_modelscope() -> bool:
    """Whether USE_MODELSCOPE_HUB is on. Raises ConfigError when it is neither on nor off."""
    value = os.environ.get(SWITCH, "").strip().lower()
    if value not in _ON + _OFF:
        raise ConfigError(f"{SWITCH}={value}: write 1 for ModelScope or 0 for the Hugging Face hub")
    return value in _ON


def model_folder(name: str) -> str:
    """The name or folder that transformers and vLLM load: `name` as it is, or from ModelScope the folder it was
    downloaded to. Raises ConfigError."""
    if not uses_modelscope() or Path(name).expanduser().exists():
        return name
    try:
        from modelscope.hub.snapshot_download import snapshot_download
    except ModuleNotFoundError as error:
        raise ConfigError(_absent("the model", name, error)) from None
    try:
        return str(snapshot_download(name))
    except Exception as error:  # whatever the client raises, with its reason
        raise ConfigError(_refused("the model", name, error)) from error


def data_folder(name: str) -> Path:
    """The folder to which ModelScope's data set was downloaded. Raises DataError."""
    try:
        from modelscope.hub.snapshot_download import dataset_snapshot_download
    except ModuleNotFoundError as error:
        raise DataError(_absent("the data set", name, error)) from None
    try:
        return Path(dataset_snapshot_download(name))
    except Exception as error:
        raise DataError(_refused("the data set", name, error)) from error


def _absent(what: str, name: str, error: ModuleNotFoundError) -> str:
    return (
        f"{what} {name!r} is to come from ModelScope ({SWITCH} is set), but the package {error.name} is not "
        f"installed; run `pip install modelscope`, or unset {SWITCH} to use the Hugging Face hub"
    )


def _refused(what: str, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split())[:300]
    return (
        f"{what} {name!r} cannot be had from ModelScope: {type(error).__name__}: {reason}; check the name and the "
        f"connection, or unset {SWITCH} to use the Hugging Face hub"
    )
