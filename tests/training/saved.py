"""What runs of the tests have left in their folders."""

import json
from pathlib import Path

CLOCKS = ("timing", "perf/", "reward/slowest_s")


def files(run_folder: Path, step: int) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint."""
    listed = json.loads((run_folder / f"global_step_{step}" / "manifest.json").read_text())["files"]
    return {name: entry["sha256"] for name, entry in listed.items()}


def metrics(run_folder: Path) -> list[dict]:
    """The lines of metrics.jsonl without what a clock or the machine says."""
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKS)} for line in lines]


def assert_same_run(whole: Path, resumed: Path) -> None:
    """Two runs of four steps, one of them stopped after step 2, have the same bits."""
    assert files(whole, 4) == files(resumed, 4)  # weights, optimizer, random numbers, KL weight, reference
    assert files(whole, 4)["state/optimizer.safetensors"] != files(resumed, 2)["state/optimizer.safetensors"]
    assert (whole / "samples.jsonl").read_text() == (resumed / "samples.jsonl").read_text()
    assert metrics(whole) == metrics(resumed) and [line["step"] for line in metrics(whole)] == [1, 2, 3, 4]
