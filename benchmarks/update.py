"""The update, ours beside stock TRL's: seconds, memory and MFU of training on rollouts that are ready. One command:

    python benchmarks/update.py --out FILE.json                        Qwen2.5-VL-3B shape on a GPU, under 10 minutes
    python benchmarks/update.py --groups 16 --out FILE.json            another group size, picture or model
    python benchmarks/update.py --table --skip-trl --out FILE.json     ours over group sizes and pictures
    python benchmarks/update.py --device cpu --model demo --out FILE.json

Each measurement is a process of its own, so that memory is fresh: ours (ours_update.py), TRL (trl_update.py), ours
with gradient checkpointing; a table of ours is one process, which compiles once. FILE.json is rewritten after each,
and a process that is cut short leaves the steps that it has done. Ours is the whole phase, from the end of one step to
the end of the next. key=value settings go to ours.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import summary
from benchmarks.workload import MODELS, ROOT, Workload, model_folder

STEADY = 5  # nothing is compiled and no memory is gained after this step
TRL_WARMUP, TRL_STEPS = 1, 3
# How long the parts may take together: one command on the GPU machine has ten minutes.
LIMIT_S = 585.0
TABLE_GROUPS, TABLE_IMAGE_TOKENS = (4, 8, 16), (64, 400, 1024)


@dataclass(frozen=True)
class Part:
    """One process: its name in the result, its script, what it measures and its own arguments."""

    name: str
    script: str
    workloads: Sequence[Workload]
    arguments: tuple[str, ...] = ()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", "--size", choices=MODELS, default="3b", help="shape; random weights but for demo")
    parser.add_argument("--prompts", type=int, help="prompts per step (default 16; demo 64)")
    parser.add_argument("--groups", type=int, nargs="+", default=[8], help="answers per prompt; more with --table")
    parser.add_argument("--image-tokens", type=int, nargs="+", default=[400], help="per picture; more with --table")
    parser.add_argument("--steps", type=int, help="timed steps of ours (default 10; --table 3)")
    parser.add_argument("--warmup", type=int, help="steps of ours before them (default 3; --table 2)")
    parser.add_argument("--trl-steps", type=int, default=TRL_STEPS, help="timed steps of TRL after one")
    parser.add_argument("--trl-micro-batch", type=int, help="TRL's samples per pass (default 8; demo 64)")
    parser.add_argument("--row-tokens", type=int, default=12288, help="worker.actor.max_token_len_per_gpu; 0: unset")
    parser.add_argument("--row-tokens-checkpointing", type=int, help="the same with checkpointing")
    parser.add_argument("--checkpointing", choices=("off", "on", "both"), help="(default: both; cpu and --table: off)")
    parser.add_argument("--skip-trl", action="store_true")
    parser.add_argument("--table", action="store_true", help="ours over 4 8 16 answers x 64 400 1024 image tokens")
    parser.add_argument("--profile", action="store_true", help="one more step, its kernels by class")
    parser.add_argument("--sync-debug", action="store_true", help="one more step, where the host waited in it")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()), help="folder of random models")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for everything")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of our run")
    options = parser.parse_args()
    if options.table and options.groups == [8] and options.image_tokens == [400]:
        options.groups, options.image_tokens = list(TABLE_GROUPS), list(TABLE_IMAGE_TOKENS)
    if not options.table and len(options.groups) * len(options.image_tokens) > 1:
        parser.error("several --groups or --image-tokens need --table")
    if options.steps is None:
        options.steps = 3 if options.table else 10
    if options.warmup is None:
        options.warmup = 2 if options.table else 3
    if options.checkpointing is None:
        options.checkpointing = "off" if options.table or options.device == "cpu" else "both"
    return options


def workloads(options: argparse.Namespace) -> list[Workload]:
    """What is measured: one workload, or the table's."""
    if options.model == "demo":  # what the demo trains on: nine image tokens, answers of about seven tokens
        demo = Workload("demo", options.prompts or 64, options.groups[0], image_tokens=9, shortest=3, longest=12)
        return [demo]
    sizes = [(group, tokens) for group in options.groups for tokens in options.image_tokens]
    return [Workload(options.model, options.prompts or 16, group, tokens) for group, tokens in sizes]


def parts(options: argparse.Namespace, measured: Sequence[Workload]) -> list[Part]:
    """The processes, the most important first."""
    looks = ["--profile"] * options.profile + ["--sync-debug"] * options.sync_debug
    common = ["--warmup", options.warmup, "--steps", options.steps, *looks]
    found = []
    for checkpointing in {"off": [False], "on": [True], "both": [False, True]}[options.checkpointing]:
        row_tokens = (checkpointing and options.row_tokens_checkpointing) or options.row_tokens
        arguments = [*common, *["--checkpointing"] * checkpointing, *["--row-tokens", row_tokens] * bool(row_tokens)]
        arguments = tuple(map(str, [*arguments, *options.overrides]))
        found.append(Part("ours_checkpointing" if checkpointing else "ours", "ours_update.py", measured, arguments))
    for place, workload in enumerate([] if options.skip_trl else measured, start=1):
        micro = options.trl_micro_batch or min(workload.rollouts, 64 if workload.model == "demo" else 8)
        arguments = ("--warmup", TRL_WARMUP, "--steps", options.trl_steps, "--micro-batch", micro)
        found.insert(place, Part("trl", "trl_update.py", [workload], tuple(map(str, arguments))))
    return found


# ---------------------------------------------------------------- processes


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Of every process: offline, and on the CPU without a sight of a GPU."""
    settings = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if options.device == "cpu":
        settings |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return os.environ | settings


def execute(command: Sequence[str], options: argparse.Namespace, until: float) -> str | None:
    """Runs to its end, or to `until` on time.monotonic's clock. Returns what went wrong."""
    process = subprocess.Popen(command, env=environment(options), cwd=ROOT)
    try:
        code = process.wait(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return "stopped: --limit-s was reached"
    return None if code == 0 else f"exit code {code}"


def prepare_model(options: argparse.Namespace, until: float) -> Path:
    """The model's folder, written now unless an earlier run has left it."""
    folder = model_folder(options.model, options.models)
    if not (folder / "config.json").is_file():
        command = [sys.executable, str(ROOT / "benchmarks/models.py"), options.model, str(folder)]
        failure = execute([*command, "--device", options.device], options, until)
        if failure:
            raise SystemExit(f"the random model could not be written to {folder}: {failure}")
    return folder


def run_part(
    part: Part, options: argparse.Namespace, folder: Path, scratch: Path, until: float
) -> list[dict[str, Any]]:
    """What the process wrote of each workload, with what went wrong under "error"."""
    fields = [asdict(workload) for workload in part.workloads]
    files = [scratch / f"{part.name}-{number}.json" for number in range(len(fields))]
    command = [sys.executable, str(ROOT / "benchmarks" / part.script), "--workloads", json.dumps(fields)]
    command += ["--folder", str(folder), "--results", *map(str, files), "--device", options.device, *part.arguments]
    print(f"{part.name}: {fields}", flush=True)
    began = time.monotonic()
    failure = execute(command, options, until)
    found = []
    for file in files:
        values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"steps": [], "complete": False}
        values["process_s"] = round(time.monotonic() - began, 1)
        values["error"] = None if values["complete"] else values.get("error") or failure
        file.unlink(missing_ok=True)
        if values["error"]:
            print(f"{part.name} did not finish: {values['error'].splitlines()[-1]}", file=sys.stderr, flush=True)
        found.append(values)
    return found


# ---------------------------------------------------------------- numbers


def ours_numbers(result: Mapping[str, Any], options: argparse.Namespace, suffix: str = "") -> dict[str, Any]:
    """Medians of our timed steps; None where the device has no such number. `suffix` tells checkpointing's apart."""
    done = result["steps"][: options.warmup + options.steps]  # those after them were looked into
    rows = done[options.warmup :]
    if not rows:
        return {}
    numbers = {
        "seconds_ours": summary.median(rows, "wall_s"),
        "seconds_ours_step": summary.median(rows, "step_s"),
        "seconds_forward_backward": summary.median(rows, "forward_backward_s"),
        "seconds_floor": summary.median(rows, "floor_s"),
        "ratio_to_floor": summary.median(rows, "ratio_to_floor"),
        "mfu": summary.median(rows, "mfu"),
        "hfu": summary.median(rows, "hfu"),
        "peak_gb_ours": summary.largest(done, "peak_gb"),
        "reserved_gb_ours": summary.largest(done, "reserved_gb"),
        "phases_s": summary.by_name(rows, "phases_s"),
        "device_s": summary.by_name(rows, "device_s"),
        "timed_steps": len(rows),
        "recompilations_after_step_5": summary.growth(done, "graphs", STEADY),
        "memory_growth_gb_after_step_5": summary.growth(done, "allocated_gb", STEADY),
        "reserved_growth_gb_after_step_5": summary.growth(done, "reserved_gb", STEADY),
        "host_growth_gb_after_step_5": summary.growth(done, "host_gb", STEADY),
    }
    return {f"{name}{suffix}": value for name, value in numbers.items()}


def numbers_of(results: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Everything that stands at the top of the JSON for one workload."""
    numbers: dict[str, Any] = {}
    if "ours" in results:
        numbers |= ours_numbers(results["ours"], options)
    if "ours_checkpointing" in results:
        numbers |= ours_numbers(results["ours_checkpointing"], options, "_checkpointing")
    rows = results["trl"]["steps"][TRL_WARMUP:] if "trl" in results else []
    if rows:
        step_s, wall_s = summary.median(rows, "step_s"), summary.median(rows, "wall_s")
        numbers |= {"seconds_trl_step": step_s, "seconds_trl_wall": wall_s}
        numbers |= {"peak_gb_trl": summary.largest(results["trl"]["steps"], "peak_gb"), "timed_steps_trl": len(rows)}
        for suffix in ("", "_checkpointing"):
            ours = numbers.get(f"seconds_ours{suffix}")
            if ours:
                numbers |= {f"ratio_to_trl_step{suffix}": step_s / ours, f"ratio_to_trl_wall{suffix}": wall_s / ours}
    return numbers


def report(measured: Sequence[tuple[Workload, dict[str, dict]]], options: argparse.Namespace) -> dict[str, Any]:
    """The whole JSON so far. Raw results keep the numbers of each step."""
    every = [result for _, results in measured for result in results.values()]
    known = next((result for result in every if "hardware" in result), {})
    values: dict[str, Any] = {}
    cells = [
        {"workload": asdict(workload), **numbers_of(results, options), "raw": results}
        for workload, results in measured
    ]
    if options.table:
        values["table"] = cells
    elif cells:
        values |= cells[0]
    hardware = known.get("hardware", {})
    return {
        **{name: value for name, value in values.items() if name != "raw"},
        "complete": bool(every) and all(result.get("complete", False) for result in every),
        "gpu": next(iter(hardware.get("devices", [])), None),
        "hardware": hardware,
        "versions": known.get("versions", {}),
        "command": " ".join(["python", "benchmarks/update.py", *sys.argv[1:]]),
        "raw": values.get("raw", {}),
    }


def show(workload: Workload, numbers: Mapping[str, Any]) -> None:
    """The numbers of a workload, one a line."""
    size = f"{workload.prompts} x {workload.group}, {workload.image_tokens} image tokens"
    print(f"\n{workload.model}, {size}", flush=True)
    for name, value in numbers.items():
        if isinstance(value, (int, float)):
            print(f"  {name:42s} {value:10.3f}", flush=True)


def main() -> int:
    """Measures; 1 when a process did not finish."""
    options = parse()
    until = time.monotonic() + options.limit_s
    options.out.parent.mkdir(parents=True, exist_ok=True)
    folder = prepare_model(options, until)
    wanted = workloads(options)
    measured: list[tuple[Workload, dict[str, dict]]] = [(workload, {}) for workload in wanted]
    with tempfile.TemporaryDirectory() as scratch:
        for part in parts(options, wanted):
            found = run_part(part, options, folder, Path(scratch), until)
            for workload, values in zip(part.workloads, found, strict=True):
                measured[wanted.index(workload)][1][part.name] = values
            summary.write_json(options.out, report(measured, options))
        for workload, results in measured:
            show(workload, numbers_of(results, options))
    written = report(measured, options)
    print(f"{options.out}: {'complete' if written['complete'] else 'INCOMPLETE'}", flush=True)
    return 0 if written["complete"] else 1


if __name__ == "__main__":
    sys.exit(main())
