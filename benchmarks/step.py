"""Whole rollout steps with the real engine: rollout, reward, update, weight sync; seconds and share of each phase.

    python benchmarks/step.py --out FILE.json                           64 x 8 answers of 300 tokens, all on one GPU
    python benchmarks/step.py --prompts 8 --steps 50 --out FILE.json    many small steps: what grows, what is compiled
    python benchmarks/step.py --device cpu --model demo --out FILE.json

The weights are random, so answers end at their longest (ignore_eos); the demo's answers end where they end. FILE.json
is rewritten after each step. key=value settings are the trainer's.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

from benchmarks import summary
from benchmarks.measure import DeviceStopwatch, RecordKeeper, Result, StepClock, gpu_name
from benchmarks.models import write_model
from benchmarks.ours_update import checked, settings
from benchmarks.workload import MODELS, Workload, model_folder, questions, reward
from grpo_vlm.training.session import Session

STEADY = 5  # nothing is compiled and no memory is gained after this step


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=MODELS, default="3b", help="shape; random weights but for demo")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="answers per prompt")
    parser.add_argument("--image-tokens", type=int, default=400)
    parser.add_argument("--answer-tokens", type=int, default=300, help="(the demo: at most 16)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--row-tokens", type=int, default=12288, help="worker.actor.max_token_len_per_gpu; 0: unset")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--server-share", type=float, default=0.3, help="worker.rollout.gpu_memory_utilization")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()), help="folder of random models")
    parser.add_argument("--limit-s", type=float, default=570.0, help="begin no step that would end after this")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    return parser.parse_args()


def workload_of(options: argparse.Namespace) -> Workload:
    """Prompts as asked for; answers are the engine's own, `longest` is where they end."""
    if options.model == "demo":
        return Workload("demo", options.prompts, options.group, 9, 1, min(options.answer_tokens, 16))
    tokens = options.answer_tokens
    return Workload(options.model, options.prompts, options.group, options.image_tokens, tokens, tokens)


def engine_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Of worker.rollout."""
    values: dict[str, Any] = {"worker.rollout.name": options.engine}
    if options.model != "demo":
        values["worker.rollout.ignore_eos"] = True
    if options.engine == "vllm" and options.device == "cpu":
        values["worker.rollout.cpu_kv_cache_gb"] = 0.5
    if options.engine == "vllm" and options.device != "cpu":
        values["worker.rollout.gpu_memory_utilization"] = options.server_share
    return values


def numbers(result: Result, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the timed steps, and how much grew after the fifth."""
    done = result.values["steps"]
    rows = [row for row in done[options.warmup :] if "phases_s" in row]
    if not rows:
        return {}
    step_s = summary.median(rows, "wall_s")
    phases = summary.by_name(rows, "device_s")  # when it ran; the trainer's own clock tells when it was queued
    phases["other"] = step_s - sum(phases.values())
    return {
        "seconds_step": step_s,
        "rollouts_per_s_per_gpu": options.prompts * options.group / step_s,
        "phases_s": phases,
        "phases_queued_s": summary.by_name(rows, "phases_s"),
        "phases_share": {name: seconds / step_s for name, seconds in phases.items()},
        "timed_steps": len(rows),
        "peak_gb": summary.largest(done, "peak_gb"),
        "device_used_gb": summary.largest(done, "device_used_gb"),
        "recompilations_after_step_5": summary.growth(done, "graphs", STEADY),
        "memory_growth_gb_after_step_5": summary.growth(done, "allocated_gb", STEADY),
        "reserved_growth_gb_after_step_5": summary.growth(done, "reserved_gb", STEADY),
        "host_growth_gb_after_step_5": summary.growth(done, "host_gb", STEADY),
        "response_length": summary.median([row["metrics"] for row in rows], "response_length/mean"),
    }


class Numbers(RecordKeeper):
    """Keeps the numbers at the top of the file up to date."""

    def __init__(self, result: Result, options: argparse.Namespace) -> None:
        super().__init__(result)
        self.options = options

    def log(self, record: Any) -> None:
        super().log(record)
        self.result.values["numbers"] = numbers(self.result, self.options)
        self.result.write()


def measure(options: argparse.Namespace, result: Result) -> None:
    """Trains with the real engine."""
    until = time.monotonic() + options.limit_s
    workload, last = workload_of(options), options.warmup + options.steps
    options.folder = model_folder(options.model, options.models)
    if not (options.folder / "config.json").is_file():
        write_model(options.model, options.folder, options.device)
    rows = [question.row() for question in questions(workload, workload.prompts * min(last, 4))]  # then again
    with tempfile.TemporaryDirectory() as scratch:
        run_folder = Path(scratch) / "run"
        values = settings(options, workload, run_folder, last + 1) | engine_settings(options)
        config = checked(values, options.overrides)
        try:
            with Session(config, train_rows=rows, reward=reward) as session:
                trainer, clock = session.trainer, StepClock(result, last=last, until=until)
                trainer.clock = DeviceStopwatch()
                clock.on_border = lambda row: row.update(device_s=trainer.clock.take_device())
                trainer.add_callback(clock)
                trainer.trackers.append(Numbers(result, options))
                session.train()
        finally:
            if (run_folder / "vllm.log").is_file():
                shutil.copy(run_folder / "vllm.log", options.out.with_suffix(".vllm.log"))


def show(values: dict[str, Any]) -> None:
    """The numbers, a line each."""
    for name, value in values.items():
        if name == "phases_s":
            for phase, seconds in value.items():
                print(f"  {phase:30s} {seconds:9.3f} s {100 * values['phases_share'][phase]:6.1f} %", flush=True)
        elif isinstance(value, (int, float)):
            print(f"  {name:30s} {value:9.3f}", flush=True)


def main() -> None:
    """Measures and prints."""
    options = parse()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/step.py", *sys.argv[1:]])
    result = Result(options.out, command=command, gpu=gpu_name(), workload=vars(workload_of(options)), numbers={})
    with result.guarded():
        measure(options, result)
    show(result.values["numbers"])
    print(f"{options.out}: {len(result.values['steps'])} steps", flush=True)


if __name__ == "__main__":
    main()
