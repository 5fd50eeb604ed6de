"""The algorithms of configs/recipes/ on the demo's task, from the same start: does each of them learn?

    python benchmarks/recipes.py --out benchmarks/recipes_cpu.json      2 seeds x 40 steps each, about 2 minutes a run
    python benchmarks/recipes.py --recipes grpo gspo --out FILE.json    some of them

A recipe's own algorithm and worker.actor keys are laid over configs/demo.yaml; its bounds for online filtering look at
the demo's only score. FILE.json is rewritten after each run; with --resume what it holds is not run again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.summary import write_json
from benchmarks.train_steps import hardware, versions

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "configs" / "recipes"
# What of a recipe is about geo3k: its reward has a score "accuracy", the demo's has "overall" alone; and the demo ends
# with 19 of 20 answers right, where few groups pass the filter.
OVER = {"algorithm.filter_key": "overall", "data.mini_rollout_batch_size": 128, "trainer.max_try_make_batch": 0}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--recipes", nargs="+", default=sorted(path.stem for path in RECIPES.glob("*.yaml")))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--resume", action="store_true", help="keep the runs that FILE.json holds")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    return parser.parse_args()


def settings(recipe: str) -> dict[str, Any]:
    """The recipe's own keys under `algorithm` and `worker.actor`, dotted."""
    tree = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{recipe}.yaml"))
    found = flat(
        {"algorithm": tree.get("algorithm", {}), "worker": {"actor": tree.get("worker", {}).get("actor", {})}}
    )
    return found | (OVER if found.get("algorithm.online_filtering") else {})


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    found = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def run(recipe: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One training run: its curve and the held-out scores before and after."""
    seeded = {
        "data.seed": seed,
        "worker.rollout.seed": seed,
        "trainer.max_steps": options.steps,
        "trainer.save_freq": -1,
        "trainer.save_model_only": True,
        "trainer.val_generations_to_log": 0,
        "trainer.save_checkpoint_path": folder,
    }
    items = [
        f"{key}={json.dumps(value) if isinstance(value, bool) else value}"
        for key, value in (settings(recipe) | seeded).items()
    ]
    began = time.perf_counter()
    command = [sys.executable, "train.py", "--config", "configs/demo.yaml", *items, *options.overrides]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held_out = [record["val/reward_score"] for record in records if "val/reward_score" in record]
    return {
        "recipe": recipe,
        "seed": seed,
        "before": held_out[0],
        "after": held_out[-1],
        "standard_error": records[-1].get("val/reward_score_se"),
        "curve": [round(record["reward/overall"], 4) for record in records if "reward/overall" in record],
        "seconds": round(time.perf_counter() - began, 1),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """One line for each recipe: means over its seeds."""
    table = Table(title="held-out score of the demo", title_justify="left")
    for name in ("recipe", "before", "after", "seeds", "seconds"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for recipe in dict.fromkeys(row["recipe"] for row in rows):
        mine = [row for row in rows if row["recipe"] == recipe]
        means = [sum(row[name] for row in mine) / len(mine) for name in ("before", "after", "seconds")]
        table.add_row(recipe, f"{means[0]:.3f}", f"{means[1]:.3f}", str(len(mine)), f"{means[2]:.0f}")
    Console().print(table)


def main() -> None:
    """Runs what is asked for, one after the other."""
    options = parse()
    rows = json.loads(options.out.read_text())["runs"] if options.resume and options.out.exists() else []
    done = {(row["recipe"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="grpo_vlm-recipes-") as scratch:
        for seed in options.seeds:
            for recipe in options.recipes:
                if (recipe, seed) in done:
                    continue
                rows.append(run(recipe, seed, options, Path(scratch, f"{recipe}-{seed}")))
                print(json.dumps(rows[-1]), flush=True)
                result = {
                    "command": " ".join([Path(sys.executable).name, *sys.argv]),
                    "hardware": hardware(),
                    "versions": versions(),
                    "settings": {row["recipe"]: settings(row["recipe"]) for row in rows},
                    "steps": options.steps,
                    "runs": rows,
                }
                write_json(options.out, result)
    show(rows)


if __name__ == "__main__":
    main()
