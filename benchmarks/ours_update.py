"""One measuring process of update.py: our trainer on made-up rollouts.

It is the product's own run (Session, GRPOVLMTrainer) with an engine whose answers are ready, so that a step is what
the trainer does around the rollouts: data, rewards, log-probs, forward, backward, optimizer, records.
"""

import argparse
import gc
import json
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import (
    UPDATE_PHASE,
    DeviceStopwatch,
    RecordKeeper,
    Result,
    StepClock,
    gpu_name,
    part_parser,
    profiled,
    watching_synchronisations,
)
from benchmarks.workload import MadeUpEngine, Workload, questions, reward
from grpo_vlm.config import Config, load_and_check
from grpo_vlm.model.cost import PEAK_TFLOPS, Mode, ModelShape, executed_flops, train_flops, utilization
from grpo_vlm.model.packing import PackedRow
from grpo_vlm.training.session import Session
from grpo_vlm.training.trainer import GRPOVLMTrainer

DISTINCT_STEPS = 16  # a longer run begins again with the first step's rows: pictures take memory and time to make
CPU_SETTINGS = {"worker.actor.fsdp.torch_dtype": "float32", "worker.actor.fsdp.mp_param_dtype": "float32"}
GPU_SETTINGS = {"worker.actor.fsdp.torch_dtype": "bf16", "worker.actor.fsdp.mp_param_dtype": "bf16"}


def settings(options: argparse.Namespace, workload: Workload, run_folder: Path, steps: int) -> dict[str, Any]:
    """One update a step on all of the step's rollouts; no KL, no validation, nothing saved before step `steps`.

    options: folder (of the model), device, checkpointing, row_tokens.
    """
    values: dict[str, Any] = {
        "data.prompt_key": "problem",
        "data.min_pixels": 7056 if workload.model == "demo" else 3136,
        "data.max_pixels": 12845056,
        "data.max_prompt_length": workload.prompt_limit,
        "data.max_response_length": workload.longest,
        "data.rollout_batch_size": workload.prompts,
        "data.shuffle": False,
        "worker.actor.global_batch_size": workload.prompts,
        "worker.actor.micro_batch_size_per_device_for_update": workload.group,
        "worker.actor.model.model_path": str(options.folder),
        "worker.actor.model.trust_remote_code": False,
        "worker.actor.model.enable_gradient_checkpointing": options.checkpointing,
        "worker.actor.optim.lr": 1e-6,
        "worker.rollout.n": workload.group,
        "algorithm.disable_kl": True,
        "trainer.max_steps": steps,
        "trainer.val_before_train": False,
        "trainer.logger": ["file"],
        "trainer.save_checkpoint_path": str(run_folder),
        **(CPU_SETTINGS if options.device == "cpu" else GPU_SETTINGS),
    }
    if options.row_tokens:
        values["worker.actor.max_token_len_per_gpu"] = options.row_tokens
    return values


def checked(values: dict[str, Any], overrides: list[str]) -> Config:
    """The configuration of these values and key=value items; prints what it has to say."""
    config, notices = load_and_check(
        None, overrides, values, needs_train_files=False, needs_reward=False, has_val_rows=False
    )
    for notice in notices:
        print(f"  {notice}", flush=True)
    return config


def use_made_up_rollouts(trainer: GRPOVLMTrainer, workload: Workload) -> None:
    """Answers that are ready, in place of the engine that the configuration names."""
    trainer.engine = trainer.collector.engine = MadeUpEngine(workload)


def inspections(options: argparse.Namespace, result: Result) -> dict[int, Any]:
    """The steps after the timed ones that are looked into, which costs time."""
    wanted = [watching_synchronisations] * options.sync_debug + [profiled] * options.profile
    return {options.warmup + options.steps + 1 + n: partial(look, result) for n, look in enumerate(wanted)}


def measure(options: argparse.Namespace, workload: Workload, file: Path) -> None:
    """Trains and writes the result file."""
    result = Result(file, part="ours", workload=vars(workload), checkpointing=options.checkpointing)
    looks = inspections(options, result)
    last = options.warmup + options.steps + len(looks)
    with result.guarded(), tempfile.TemporaryDirectory() as folder:
        distinct = min(last, DISTINCT_STEPS)
        rows = [question.row() for question in questions(workload, workload.prompts * distinct)]
        # one step more than is run: the run's last step would save a checkpoint
        values = settings(options, workload, Path(folder) / "run", last + 1)
        # the engine that is named here is replaced below and starts nothing
        config = checked(values | {"worker.rollout.name": "transformers"}, options.overrides)
        result.values["row_tokens"] = config.worker.actor.max_token_len_per_gpu
        with Session(config, train_rows=rows, reward=reward) as session:
            trainer, clock = session.trainer, StepClock(result, last=last, inspections=looks)
            use_made_up_rollouts(trainer, workload)
            trainer.clock = DeviceStopwatch()
            clock.on_border = partial(describe, trainer)
            trainer.add_callback(clock)
            trainer.trackers.append(RecordKeeper(result))
            session.train()


def describe(trainer: GRPOVLMTrainer, row: dict[str, Any]) -> None:
    """Adds what the device did in the step, and how much work that was: the MFU counts the packed rows' own operations
    without their padding, three times the forward pass; the HFU also what is computed again."""
    row["device_s"] = trainer.clock.take_device()
    packed = [part for update in trainer._updates for part in update.rows if isinstance(part, PackedRow)]
    shape = ModelShape.of(trainer.accelerator.unwrap_model(trainer.model).config)
    if not packed or shape is None:
        return
    mode = Mode(checkpointing=trainer.args.gradient_checkpointing)
    real = [replace(part.load, tokens=part.real_tokens) for part in packed]
    row |= {
        "rows": len(packed),
        "prompt_tokens": sum(load.tokens - load.scored for load in real),
        "processed_tokens": sum(part.load.tokens for part in packed),
        "scored_tokens": sum(load.scored for load in real),
        "pictures": sum(len(load.grids) for load in real),
        "train_flops": sum(train_flops(shape, load).total for load in real),
        "executed_flops": sum(executed_flops(shape, part.load, mode).total for part in packed),
    }
    gpu = gpu_name()
    if gpu in PEAK_TFLOPS:
        seconds = row["device_s"][UPDATE_PHASE]
        floor_s = row["train_flops"] / (PEAK_TFLOPS[gpu] * 1e12)
        row |= {"forward_backward_s": seconds, "floor_s": floor_s, "ratio_to_floor": row["wall_s"] / floor_s}
        row |= {
            "mfu": utilization(row["train_flops"], seconds, gpu),
            "hfu": utilization(row["executed_flops"], seconds, gpu),
        }


def arguments() -> argparse.Namespace:
    """What update.py passes on."""
    parser = part_parser(__doc__.splitlines()[0], warmup=3, steps=10)
    parser.add_argument("--row-tokens", type=int, help="worker.actor.max_token_len_per_gpu")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--sync-debug", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def main() -> None:
    """Measures one workload after the other; what is compiled for one serves the next."""
    options = arguments()
    for fields, file in zip(json.loads(options.workloads), options.results, strict=True):
        measure(options, Workload(**fields), file)
        gc.collect()  # a trainer is full of cycles
        torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
