"""Planned against measured: peak memory and seconds of a step, full training and LoRA.

    python benchmarks/memory.py --out benchmarks/memory_h200.json             3B full, 3B LoRA, 7B LoRA on one GPU
    python benchmarks/memory.py --device cpu --models demo --out FILE.json    the demo model, full and LoRA

Random weights and made-up answers; each case is a process of its own, so that no memory of one is counted in another.
FILE.json is rewritten after each case.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import Result
from benchmarks.models import write_model
from benchmarks.ours_update import checked, settings
from benchmarks.workload import DEMO_MODEL, Workload, questions
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.model.gpus import present
from grpo_vlm.model.load import load_processor
from grpo_vlm.training.forecast import Forecast, forecast

CASES = {"3b": (False, True), "7b": (True,), "tiny": (False, True), "demo": (False, True)}  # with LoRA?
LORA = ["worker.actor.model.lora.rank=64"]
ROOT = Path(__file__).resolve().parents[1]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", choices=CASES, default=["3b", "7b"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--row-tokens", type=int, default=11264)
    parser.add_argument("--warmup", type=int, default=2, help="steps that compile")
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of random models")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace, model: str, lora: bool) -> dict[str, Any]:
    """One case: what was planned, what was measured, and their ratio."""
    work = Workload(model, options.prompts, options.group, *((9, 1, 16) if model == "demo" else ()))
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = DEMO_MODEL if model == "demo" else options.folder / f"random-{model}"
    if not folder.exists():
        write_model(model, folder, options.device)
    plan = planned(options, work, folder, lora)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "part.json"
        command = [sys.executable, "benchmarks/ours_update.py", "--workloads", json.dumps([vars(work)])]
        command += ["--folder", str(folder), "--results", str(file), "--device", options.device]
        command += ["--warmup", str(options.warmup), "--steps", str(options.steps)]
        command += ["--row-tokens", str(options.row_tokens)] + ["--checkpointing"] * options.checkpointing
        subprocess.run([*command, *(LORA if lora else [])], cwd=ROOT, check=True)
        part = json.loads(file.read_text(encoding="utf-8"))
    timed = part["steps"][options.warmup :]
    peaks = [step["peak_gb"] for step in part["steps"] if "peak_gb" in step]
    seconds = sorted(step["phases_s"]["update_actor"] for step in timed)[len(timed) // 2]
    found = {
        "model": model,
        "lora": lora,
        "checkpointing": options.checkpointing,
        "workload": vars(work),
        "planned_gb": plan.update_gb,
        "planned_peak_gb": plan.peak_gb,
        "measured_peak_gb": max(peaks, default=None),
        "planned_update_s": plan.seconds["update_actor"],
        "measured_update_s": seconds,
        "update_ratio": plan.seconds["update_actor"] / seconds,
        "peak_ratio": plan.peak_gb / max(peaks) if peaks else None,
    }
    print(f"  {model} {'LoRA' if lora else 'full'}: {found['peak_ratio']=} {found['update_ratio']=}", flush=True)
    return found


def planned(options: argparse.Namespace, work: Workload, folder: Path, lora: bool) -> Forecast:
    """The plan of the run that is measured."""
    run = argparse.Namespace(
        folder=folder, device=options.device, checkpointing=options.checkpointing, row_tokens=options.row_tokens
    )
    values = settings(run, work, options.folder / "run", 1) | {"worker.rollout.name": "transformers"}
    config = checked(values, LORA if lora else [])
    rows = PromptDataset([question.row() for question in questions(work, 4)], config.data, load_processor(config))
    answer = (work.shortest + work.longest) // 2
    return forecast(config, rows.prompts(range(4)), present(), answer_tokens=answer)


def main(arguments: list[str] | None = None) -> None:
    """Measures all cases."""
    options = parse(arguments)
    result = Result(options.out, cases=[], gpu=present().name)
    with result.guarded():
        for model in options.models:
            for lora in CASES[model]:
                result.values["cases"].append(measure(options, model, lora))
                result.write()


if __name__ == "__main__":
    main()
