"""`make demo-seeds`: the demo with seeds 0, 1, 2, and what each did on the held-out questions.

    python -m grpo_vlm.demo.seeds [--seeds 0 1 2] [--out checkpoints/demo-seeds] [key=value ...]

Prints a table and writes it to OUT/seeds.json. Before and after: the sampled score (temperature 1, mean of 4, right
answer in the asked form) and the share of greedy answers that name the right thing; after: the sampled score when
every question gets the picture of one with another answer.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from grpo_vlm.config import load_config
from grpo_vlm.demo.evaluate import evaluate

CONFIG = "configs/demo.yaml"
TABLE_WIDTH = 140


def run_seed(seed: int, folder: Path, overrides: list[str]) -> dict[str, float]:
    """Trains the demo with this seed into `folder` and evaluates the start and the end. Returns the row of the
    table."""
    config = load_config(CONFIG, overrides)
    began = time.perf_counter()
    seeded = [f"data.seed={seed}", f"worker.rollout.seed={seed}", f"trainer.save_checkpoint_path={folder}"]
    subprocess.run([sys.executable, "train.py", "--config", CONFIG, *overrides, *seeded], check=True)
    seconds = time.perf_counter() - began
    last = max(folder.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    data = Path(config.data.val_files)
    before = evaluate(Path(config.worker.actor.model.model_path), data, seed)
    after = evaluate(last / "model", data, seed)
    return {
        "seed": seed,
        "sampled_before": before["sampled"],
        "sampled_after": after["sampled"],
        "greedy_named_before": before["greedy_named"],
        "greedy_named_after": after["greedy_named"],
        "shuffled_after": after["sampled_shuffled_pictures"],
        "training_seconds": round(seconds, 1),
    }


def show(rows: list[dict[str, float]]) -> None:
    """Prints the table with the mean of the seeds."""
    table = Table(title="demo, held-out questions", title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="right")
    mean = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]} | {"seed": "mean"}
    for row in [*rows, mean]:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=TABLE_WIDTH).print(table)


def main() -> None:
    """Parses the command line and runs the seeds one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/demo-seeds"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    rows = [run_seed(seed, options.out / f"seed-{seed}", options.overrides) for seed in options.seeds]
    show(rows)
    (options.out / "seeds.json").write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
