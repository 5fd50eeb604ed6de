"""What is measured at the borders of training steps, for our trainer and for TRL's alike: both are transformers'
Trainer, so one callback serves both. Nothing inside a step waits for the device.
"""

import argparse
import math
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._dynamo.utils import counters
from transformers import TrainerCallback

from benchmarks.summary import write_json
from benchmarks.train_steps import hardware, versions
from grpo_vlm.report.record import StepRecord
from grpo_vlm.training.observe import Stopwatch

ROOT = Path(__file__).resolve().parents[1]
GB = 1e9
UPDATE_PHASE = "update_actor"  # forward and backward in our trainer's record
KERNELS = {  # class of a GPU kernel -> what its name contains; the first match counts
    "shared-prefix attention": r"flex|triton_tem",
    "attention": r"flash|fmha|sdpa|attention",
    "matrix product": r"nvjet|gemm|cutlass|cublas|splitk|wgmma",
    "convolution": r"conv|im2col|vol2col",
    "copy": r"memcpy|memset|copy|catarray",
    "index": r"index|gather|scatter|embedding",
    "compiled pointwise": r"triton",
    "optimizer": r"multi_tensor|fused_adam|foreach",
    "pointwise and reduction": r"elementwise|reduce|softmax|norm",
}


def part_parser(what: str, *, warmup: int, steps: int) -> argparse.ArgumentParser:
    """The arguments that update.py passes to either trainer's process."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--workloads", required=True, help="a list in JSON, each with the fields of a Workload")
    parser.add_argument("--folder", type=Path, required=True, help="the model")
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="JSON file to write for each")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--warmup", type=int, default=warmup)
    parser.add_argument("--steps", type=int, default=steps)
    return parser


class Result:
    """What one measuring process has found so far, in a JSON file that is rewritten after each step: whatever ends the
    process later, this stays."""

    def __init__(self, path: Path, **facts: Any) -> None:
        self.path = path
        self.values: dict[str, Any] = {"complete": False, "steps": [], "error": None, **facts}
        self.values |= {"versions": versions(), "hardware": hardware()}
        self.write()

    def write(self) -> None:
        write_json(self.path, self.values)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Notes an error of the block before it goes on, and completion when there is none."""
        try:
            yield
        except BaseException:
            self.values["error"] = traceback.format_exc(limit=-6)
            self.write()
            raise
        self.values["complete"] = True
        self.write()


class StepClock(TrainerCallback):
    """Times each optimizer step and stops the training after `last` of them.

    step_s: from the step's begin to its end; wall_s: from the end of the step before, so data loading, logging and
    everything else in between is in it. Memory in GB (1e9 bytes): peak since the step before, and what is held at the
    end. graphs: how many torch.compile has compiled since the start.

    inspections: for some steps a context manager around the whole step. until: on time.monotonic's clock; no step is
    begun that would end after it.
    """

    def __init__(
        self,
        result: Result,
        *,
        last: int,
        inspections: Mapping[int, Callable[[], AbstractContextManager]] | None = None,
        until: float = math.inf,
    ) -> None:
        self.result, self.last, self.inspections, self.until = result, last, inspections or {}, until
        self.on_border: Callable[[dict[str, Any]], None] = lambda row: None  # adds to a step's row, device idle
        self._inspection: AbstractContextManager | None = None
        self._process = psutil.Process()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        reset_peak()
        self._ended = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        synchronize()
        self._begun = time.perf_counter()
        inspection = self.inspections.get(state.global_step + 1)
        if inspection is not None:
            self._inspection = inspection()
            self._inspection.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._inspection is not None:
            self._inspection.__exit__(None, None, None)
            self._inspection = None
        synchronize()
        now = time.perf_counter()
        row = {"step": state.global_step, "step_s": now - self._begun, "wall_s": now - self._ended}
        self._ended = now
        row |= memory_gb() | {
            "host_gb": self._process.memory_info().rss / GB,
            "graphs": counters["stats"]["unique_graphs"],
        }
        self.on_border(row)
        reset_peak()
        self.result.values["steps"].append(row)
        self.result.write()
        shown = {name: round(row[name], 2) for name in ("step_s", "wall_s", "peak_gb", "graphs") if name in row}
        print(f"  step {row['step']}/{self.last}: {shown}", flush=True)
        too_late = time.monotonic() + row["wall_s"] > self.until
        if too_late:
            self.result.values["stopped_early"] = f"after step {state.global_step} of {self.last}: no time for another"
        control.should_training_stop = too_late or state.global_step >= self.last


class RecordKeeper:
    """A tracker that puts the trainer's own record of each step beside what the clock measured."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def log(self, record: StepRecord) -> None:
        """Seconds by phase, and the numbers that tell whether the step was a real one."""
        for row in self.result.values["steps"]:
            if row["step"] == record.step:
                row["phases_s"] = {name: value for name, value in record.seconds.items() if name != "step"}
                row["record_step_s"] = record.seconds["step"]
                row["metrics"] = record.metrics
        self.result.write()

    def close(self) -> None:
        """Nothing is open."""


class DeviceStopwatch(Stopwatch):
    """The trainer's stopwatch, with a mark on the device's own timeline at each end of a phase.

    The host's seconds of a phase tell when it was queued; the device's tell when it ran. Nothing waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        with super().__call__(phase):
            begin = _mark()
            try:
                yield
            finally:
                self._marks.append((phase, begin, _mark()))

    def take_device(self) -> dict[str, float]:
        """Device seconds of the phases so far, cleared; only after `synchronize`."""
        seconds: Counter[str] = Counter()
        for phase, begin, end in self._marks:
            seconds[phase] += begin.elapsed_time(end) / 1000 if torch.accelerator.is_available() else end - begin
        self._marks = []
        return dict(seconds)


def _mark() -> Any:
    if not torch.accelerator.is_available():
        return time.perf_counter()
    event = torch.get_device_module(torch.accelerator.current_accelerator()).Event(enable_timing=True)
    event.record()
    return event


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def gpu_name() -> str | None:
    """The accelerator's whole name; None without one."""
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator()).get_device_name()


def reset_peak() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.reset_peak_memory_stats()


def memory_gb() -> dict[str, float]:
    """Peak since `reset_peak`, held now, reserved by the allocator, and in use on the whole device (a server's too);
    nothing without an accelerator."""
    if not torch.accelerator.is_available():
        return {}
    device = torch.accelerator
    free, total = device.get_memory_info()
    found = {
        "peak_gb": device.max_memory_allocated(),
        "allocated_gb": device.memory_allocated(),
        "reserved_gb": device.max_memory_reserved(),
        "device_used_gb": total - free,
    }
    return {name: value / GB for name, value in found.items()}


# ---------------------------------------------------------------- looking inside one step


@contextmanager
def profiled(result: Result) -> Iterator[None]:
    """The step's GPU kernels (CPU operators without a GPU), by class and the longest by name."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        yield
        synchronize()
        wall_s = time.perf_counter() - begin
    on_gpu = torch.cuda.is_available()
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    seconds: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == wanted and not event.is_user_annotation:
            seconds[event.name] += (event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6
            launches[event.name] += 1
    by_class: dict[str, list[float]] = {}
    for name, value in seconds.items():
        entry = by_class.setdefault(kernel_class(name), [0.0, 0])
        entry[0] += value
        entry[1] += launches[name]
    result.values["profile"] = {
        "wall_s_profiled": wall_s,
        "kernel_s": sum(seconds.values()),
        "classes": dict(sorted(by_class.items(), key=lambda item: -item[1][0])),
        "longest": [[name[:160], value, launches[name]] for name, value in seconds.most_common(40)],
    }


def kernel_class(name: str) -> str:
    """The class in KERNELS that a kernel's name belongs to."""
    return next((label for label, pattern in KERNELS.items() if re.search(pattern, name.lower())), "other")


@contextmanager
def watching_synchronisations(result: Result) -> Iterator[None]:
    """Where the host waited for the GPU within the step: place in our code and in the library, and how often."""
    found: Counter[tuple[str, str]] = Counter()

    def note(message: Any, category: type, filename: str, line: int, *rest: Any, **options: Any) -> None:
        if "synchroniz" not in str(message):
            return
        stack = [frame for frame in traceback.extract_stack()[:-1] if frame.filename != warnings.__file__]
        ours = [frame for frame in stack if str(ROOT / "grpo_vlm") in frame.filename]
        found[_place(ours[-1]) if ours else "", _place(stack[-1])] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    result.values["synchronisations"] = [[*place, count] for place, count in found.most_common()]


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    short = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-3:])
    return f"{short}:{frame.lineno} {frame.name}"
