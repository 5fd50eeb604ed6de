"""`grpo-vlm train --dry-run`: what a run would be, without loading a weight.

The resolved configuration, the batch arithmetic in words, the first rows checked and scored, and the memory and time
that it will take on a GPU, this machine's or a named one.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from grpo_vlm.config import Config, to_yaml, updates_per_step
from grpo_vlm.data.dataset import LISTED_FAULTS, PromptDataset
from grpo_vlm.data.lengths import scan_rows
from grpo_vlm.data.sources import RowSource
from grpo_vlm.errors import ConfigError, DataError
from grpo_vlm.model.gpus import named, present
from grpo_vlm.model.load import load_processor
from grpo_vlm.report.console import Console as RunConsole
from grpo_vlm.training.forecast import Forecast, forecast
from grpo_vlm.training.reward_start import FaultLog, start_rewards, try_reward, wanted_scores

CHECKED_ROWS = 64
BUILT_ROWS = 8  # of these the pictures are processed, for the sizes of a typical prompt
PHASES = {
    "gen": "generation",
    "old": "old log-probs",
    "ref": "reference log-probs",
    "update_actor": "update",
    "sync": "weights to the server",
    "step": "whole step",
}
GROUPS_OF_SETTINGS = ("ACCELERATE_", "FSDP_")


@contextmanager
def launched_by(file: str | None) -> Iterator[None]:
    """In the block the environment is that of a process which `accelerate launch --config_file FILE` started, so that
    a run on many GPUs can be planned on a machine without one. None: nothing is changed. Raises ConfigError."""
    if file is None:
        yield
        return
    kept = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(GROUPS_OF_SETTINGS):
            del os.environ[name]
    os.environ.update(launch_variables(file))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def launch_variables(file: str) -> dict[str, str]:
    """The variables by which the launcher tells its processes what the file says. Raises ConfigError."""
    if not Path(file).is_file():
        raise ConfigError(f"--launch: {file!r} is not a file; name one of accelerate_configs/")
    given = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    processes = int(given["num_processes"])
    found = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes // int(given.get("num_machines", 1))),
    }
    kind = str(given.get("distributed_type", "NO"))
    if kind == "DEEPSPEED":
        settings = given["deepspeed_config"]
        found |= {"ACCELERATE_USE_DEEPSPEED": "true"}
        if "deepspeed_config_file" in settings:
            return found | {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(settings["deepspeed_config_file"])}
        found |= {
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(settings["zero_stage"]),
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": str(settings.get("zero3_init_flag", False)).lower(),
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": settings.get("offload_param_device", "none"),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": settings.get("offload_optimizer_device", "none"),
        }
    elif kind == "FSDP":
        found |= {"ACCELERATE_USE_FSDP": "true"}
        found |= {name.upper(): str(value).lower() for name, value in given["fsdp_config"].items()}
    return found


def dry_run(
    config: Config,
    notices: Sequence[str] = (),
    *,
    gpu: str | None = None,
    answer_tokens: int | None = None,
    train_rows: Sequence[Mapping[str, Any]] | None = None,
    reward: Callable | Sequence[Callable] | None = None,
    console: Console | None = None,
) -> Forecast:
    """Prints the plan of a checked configuration and returns its numbers. gpu: a name such as "h200"; null: the device
    of this machine. answer_tokens: expected length of an answer. Raises ConfigError, DataError, RewardError."""
    console = console or Console(highlight=False, markup=False, soft_wrap=True)
    device = present() if gpu is None else named(gpu)
    console.rule("configuration")
    console.print(to_yaml(config, redact=True).rstrip())
    for notice in notices:
        console.print(notice)
    processor = load_processor(config)
    rows = PromptDataset(config.data.train_files if train_rows is None else train_rows, config.data, processor)
    console.rule("batches")
    for line in arithmetic(config, len(rows), int(os.environ.get("WORLD_SIZE", 1))):
        console.print(line)
    console.rule("data")
    console.print(check_rows(rows))
    console.rule("reward")
    pool = start_rewards(config, reward, FaultLog(RunConsole()))
    try:
        pool.load()
        tried = try_reward(pool, rows, processor.tokenizer, config.worker.rollout.n, wanted_scores(config))
    finally:
        pool.close()
    console.print(tried)
    prompts = rows.prompts(range(min(BUILT_ROWS, len(rows))))
    plan = forecast(config, prompts, device, answer_tokens=answer_tokens)
    show(console, plan)
    return plan


def arithmetic(config: Config, rows: int, processes: int) -> list[str]:
    """What the batch sizes mean, in words. rows: of the source, before any are left out."""
    data, trainer, n = config.data, config.trainer, config.worker.rollout.n
    prompts, updates = data.rollout_batch_size, updates_per_step(config)
    size = config.worker.actor.global_batch_size * n
    per_epoch = rows // prompts
    steps = trainer.max_steps or trainer.total_epochs * per_epoch
    why = "trainer.max_steps" if trainer.max_steps else f"{trainer.total_epochs} epochs of {per_epoch}"
    lines = [
        f"{prompts:,} prompts x {n} answers = {prompts * n:,} samples a step, {updates} update(s) of {size:,}; "
        f"{steps:,} steps ({why}; {rows:,} rows)"
    ]
    if processes > 1:
        lines.append(
            f"each of {processes} processes: {prompts // processes:,} prompts, {prompts * n // processes:,} samples"
        )
    if not steps:
        lines.append(
            f"warning: {rows:,} rows do not fill one step of {prompts:,}; lower data.rollout_batch_size or add rows"
        )
    return lines


class _First:
    """The first rows of a source."""

    def __init__(self, source: RowSource, count: int):
        self.source, self.count, self.row_id = source, min(count, len(source)), source.row_id

    def __len__(self) -> int:
        return self.count

    def batches(self) -> Iterator[list[dict[str, Any]]]:
        yield self.source.rows(0, self.count)


def check_rows(rows: PromptDataset) -> str:
    """Checks the first rows as training would, keeps the usable ones of them, and says what was found. Raises
    DataError with all that is wrong."""
    first = _First(rows.source, CHECKED_ROWS)
    scan = scan_rows(first, rows.builder, rows.workers)
    verdict = rows.judge(scan)
    if verdict.faults:
        listed = "\n".join(f"  {text}" for _, text in verdict.faults[:LISTED_FAULTS])
        raise DataError(f"{len(verdict.faults)} of the first {len(first)} rows cannot be used:\n{listed}")
    if not verdict.kept:
        raise DataError(
            f"none of the first {len(first)} rows can be used: {len(verdict.overlong)} are longer than "
            f"data.max_prompt_length={rows.settings.max_prompt_length}, {len(verdict.skipped)} have media that cannot "
            "be read; raise the length or lower data.max_pixels"
        )
    rows.select(verdict.kept)
    lengths = sorted(scan.tokens[row] for row in verdict.kept)
    return (
        f"{len(verdict.kept)} of the first {len(first)} rows are usable; prompts have {lengths[0]} to {lengths[-1]} "
        f"tokens, {lengths[len(lengths) // 2]} in the middle; too long: {len(verdict.overlong)}, "
        f"bad media: {len(verdict.skipped)}"
    )


def show(console: Console, plan: Forecast) -> None:
    """Memory, time and whether it fits."""
    typical = plan.typical
    size = "" if plan.gpu_gb is None else f" of {plan.gpu_gb:.0f} GB"
    console.rule(f"{plan.gpu}{size}, {plan.processes} process(es), {plan.scheme}")
    table = Table(title="memory of one GPU, GB", title_justify="left")
    for name in ("part", "update", "generation"):
        table.add_column(name, justify="left" if name == "part" else "right")
    for name in dict.fromkeys([*plan.update_gb, *plan.generation_gb]):
        cells = [parts.get(name) for parts in (plan.update_gb, plan.generation_gb)]
        table.add_row(name, *("" if value is None else f"{value:.1f}" for value in cells))
    table.add_section()
    table.add_row("all", f"{plan.peak_gb:.1f}", f"{sum(plan.generation_gb.values()):.1f}")
    console.print(table)
    table = Table(title="seconds of a step", title_justify="left")
    table.add_column("phase")
    table.add_column("s", justify="right")
    for name, value in plan.seconds.items():
        table.add_row(PHASES[name], "not predicted" if value is None else f"{value:.1f}")
    console.print(table)
    console.print(
        f"for prompts of {typical.prompt_tokens} and answers of {typical.answer_tokens} tokens (--answer-tokens); "
        "without the reward, and without what GPUs send each other"
    )
    if plan.cache_tokens is not None:
        console.print(f"the server's cache holds about {plan.cache_tokens:,} tokens")
    for remark in plan.remarks:
        console.print(f"warning: {remark}")
    if plan.gpu_gb is not None and not plan.remarks:
        console.print("it fits")
