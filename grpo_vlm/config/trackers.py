"""The places that trainer.logger can name, and the packages that some of them need."""

from collections.abc import Sequence
from importlib.util import find_spec

BUILT_IN = ("console", "file", "tensorboard")
SERVICES = ("wandb", "swanlab", "mlflow", "trackio")  # each the name of its package
TRACKERS = (*BUILT_IN, *SERVICES)


def not_installed(names: Sequence[str]) -> list[str]:
    """Those of the services in `names` whose package is not here."""
    return [name for name in names if name in SERVICES and not _is_here(name)]


def _is_here(name: str) -> bool:
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # else a folder of that name: W&B leaves ./wandb behind
