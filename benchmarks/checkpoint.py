"""How long training waits for a checkpoint's copy in host memory, and how long a thread then writes it.

    python -m benchmarks.checkpoint --out benchmarks/checkpoint_h200.json [--weights 3.75e9] [--write FOLDER]

Tensors of a 3B's layer shapes with the states of `adamw_bf16` beside bf16 weights (8 bytes a weight), and of AdamW
beside float32 weights (12 bytes); with --write the first are written with their sums.
"""

import argparse
import shutil
import sys
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.summary import write_json
from benchmarks.train_steps import hardware, versions
from grpo_vlm.training.manifest import find_fault, write_manifest
from grpo_vlm.training.snapshot import Shards

LAYER = ((2048, 2048), (256, 2048), (256, 2048), (2048, 2048), (11008, 2048), (11008, 2048), (2048, 11008), (2048,))
KINDS = {"adamw_bf16": [torch.bfloat16] * 4, "adamw": [torch.float32] * 3}


def tensors(weights: float, kinds: list[torch.dtype], device: str) -> list[tuple[str, Tensor]]:
    """Weights and states until there are `weights` of the former; embeddings first."""
    shapes, count = [(151936, 2048)], 151936 * 2048
    while count < weights:
        shapes += LAYER
        count += sum(torch.Size(shape).numel() for shape in LAYER)
    return [
        (f"{slot}:{number}", torch.ones(shape, dtype=dtype, device=device))
        for number, shape in enumerate(shapes)
        for slot, dtype in enumerate(kinds)
    ]


def copied(items: list[tuple[str, Tensor]], folder: Path) -> tuple[Shards, float]:
    """All of them in host memory, and the seconds that took."""
    torch.accelerator.synchronize() if torch.accelerator.is_available() else None
    began = time.perf_counter()
    shards = Shards(folder, "state", background=True)
    shards.extend(items)
    shards.copied()
    return shards, time.perf_counter() - began


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--weights", type=float, default=3.75e9)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    device = str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    found = {}
    for name, kinds in KINDS.items():
        items = tensors(given.weights, kinds, device)
        row = {"copy_s": []}
        for _ in range(2):
            shards, seconds = copied(items, given.write or Path())
            row["copy_s"].append(round(seconds, 3))
            row["gb"] = round(shards.bytes / 1e9, 3)
            row["host_gb"] = round(psutil.Process().memory_info().rss / 1e9, 2)
            if given.write and name == "adamw_bf16" and len(row["copy_s"]) == 2:
                given.write.mkdir(parents=True)
                began = time.perf_counter()
                shards.finish()
                row["write_s"] = round(time.perf_counter() - began, 2)
                write_manifest(given.write, {})
                row["write_and_sums_s"] = round(time.perf_counter() - began, 2)
                began = time.perf_counter()
                assert find_fault(given.write) is None
                row["verify_s"] = round(time.perf_counter() - began, 2)
                shutil.rmtree(given.write)
            del shards
        found[name] = row
        print(name, row, flush=True)
        del items
        if device != "cpu":
            torch.accelerator.empty_cache()
    facts = {"command": ["python", "-m", "benchmarks.checkpoint", *sys.argv[1:]], "weights": given.weights}
    write_json(given.out, facts | {"results": found, "hardware": hardware(), "versions": versions()})


if __name__ == "__main__":
    main()
