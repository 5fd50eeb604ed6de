"""Check a whole configuration before anything heavy is imported, and report every fault at once.

Here: the state, choices and range of each key, and rules between a few keys. Batch arithmetic is in check_batch.py,
the server's place and its sampling in check_rollout.py; files, the reward function and the port are in
check_files.py.
"""

import difflib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_vlm.config.check_algorithm import algorithm_faults, algorithm_notices
from grpo_vlm.config.check_batch import batch_faults, length_faults, working_sizes
from grpo_vlm.config.check_files import expand_paths, file_faults, port_faults, required_faults
from grpo_vlm.config.check_rollout import rollout_faults, rollout_notices
from grpo_vlm.config.check_sharding import launched, sharding_faults, sharding_notices
from grpo_vlm.config.faults import Fault, raise_faults
from grpo_vlm.config.keys import schema_options
from grpo_vlm.config.load import fill, read_config, walk
from grpo_vlm.config.options import NEUTRAL, PLANNED, Option
from grpo_vlm.config.schema import Config
from grpo_vlm.config.trackers import not_installed


@dataclass(frozen=True)
class Launch:
    """How the launcher started the processes, and what the caller supplies as Python objects."""

    world_size: int = 1
    num_nodes: int = 1
    gpus_per_node: int | None = None
    """Processes per machine; None: world_size / num_nodes."""
    needs_reward: bool = True
    """False: the caller passes a reward function as a Python object."""
    needs_train_files: bool = True
    """False: the caller passes training rows as Python objects."""
    has_val_rows: bool = False
    """True: the caller passes validation rows as Python objects."""
    check_port: bool = True
    """Only one process may try the port."""

    @property
    def per_node(self) -> int:
        """Training processes on each machine."""
        return self.gpus_per_node or self.world_size // self.num_nodes


def check_config(config: Config, **launch: Any) -> list[str]:
    """Check a configuration.

    Args:
        config: what load_config gave, perhaps changed since. Text, tuples and paths become their keys' types in place.
        launch: fields of Launch: world_size, num_nodes, gpus_per_node, needs_reward, needs_train_files, has_val_rows,
            check_port.

    Returns: notices, one line each, about settings that change nothing or that surprise. `~` at the start of a path
        has become the home directory, in place.

    Raises:
        ConfigError: numbers all faults and proposes batch sizes that satisfy every rule.
    """
    return _check(config, Launch(**launch), [])


def load_and_check(
    path: str | os.PathLike | None = None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    **launch: Any,
) -> tuple[Config, list[str]]:
    """Read and check in one go, so that unknown keys, wrong types and broken rules are all in the same message.

    Args: as load_config and check_config. Returns: the configuration and the notices. Raises: ConfigError.
    """
    config, faults, notices = read_config(path, overrides, base)
    return config, notices + _check(config, Launch(**launch), faults)


def _check(config: Config, launch: Launch, found: list[Fault]) -> list[str]:
    """Run every rule; a rule about a key that is already faulty says nothing, since its value is not the user's."""
    typed, problems = walk(asdict(config), "", interpolated=True)
    faults = found + problems
    if problems:  # wrong types in an edited Config would break the arithmetic below
        raise_faults(faults)
    fill(config, typed)
    value_faults, notices = check_values(config)
    faults += _unless_seen(value_faults, faults)
    batch = _unless_seen(batch_faults(config, launch.world_size), faults)
    later = [
        *batch,
        *length_faults(config),
        *pair_faults(config),
        *algorithm_faults(config, launch.world_size, launched(os.environ)),
        *rollout_faults(config, launch.per_node, launch.num_nodes),
        *launch_faults(config, launch),
        *sharding_faults(config, os.environ),
        *required_faults(config, launch.needs_reward, launch.needs_train_files, launch.has_val_rows),
        *file_faults(config, launch.needs_reward, launch.needs_train_files, launch.has_val_rows),
        *(port_faults(config) if launch.check_port else ()),
    ]
    faults += _unless_seen(later, faults)
    raise_faults(faults, working_sizes(config, launch.world_size) if batch else "")
    expand_paths(config)
    return notices + _notices(config, launch)


def _unless_seen(new: Sequence[Fault], old: Sequence[Fault]) -> list[Fault]:
    taken = {key for fault in old for key in fault.keys}
    return [fault for fault in new if not taken.intersection(fault.keys)]


def get(config: Config, key: str) -> Any:
    """The value at a full dotted path."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def check_values(config: Config) -> tuple[list[Fault], list[str]]:
    """Faults of single keys (planned, choice, range), and a notice for each neutral key that was set."""
    faults, notices = [], []
    for key, option in schema_options().items():
        value = get(config, key)
        if value == option.default:
            continue
        if option.status == NEUTRAL:
            notices.append(f"{key} = {_yaml(value)} has no effect in this version: {option.reason}")
        elif message := _value_problem(option, value):
            faults.append(Fault((key,), f"{key}: {message}"))
    return faults, notices


def _value_problem(option: Option, value: Any) -> str:
    """What is wrong with the value of one key, or an empty string."""
    if option.status == PLANNED:
        default = _yaml(option.default)
        return f"{_yaml(value)} is not available in this version: {option.reason}. Remove the key or write {default}"
    if value is None or option.kind == "dict":
        return ""
    items = value if isinstance(value, list) else [value]
    for item in items:
        if isinstance(item, float) and not math.isfinite(item):
            return f"{item} is not a finite number"
        if item in option.refused:
            return f"{item} is not available in this version: {option.refused[item]}. {_choices(option)}"
        if option.choices and item not in option.choices:
            close = difflib.get_close_matches(str(item), [str(choice) for choice in option.choices], 1)
            nearest = f" (did you mean {close[0]}?)" if close else ""
            reason = f": {option.reason}" if option.reason else ""
            return f"{_yaml(item)} is not a valid value{nearest}{reason}. {_choices(option)}"
        if option.rule and not option.rule.holds(item):
            return f"{_yaml(item)} is out of range; it must be {option.rule.text} (default {_yaml(option.default)})"
    return ""


def _choices(option: Option) -> str:
    listed = ", ".join(_yaml(choice) for choice in (*option.choices, *([None] if option.optional else [])))
    return f"Valid: {listed}"


def _yaml(value: Any) -> str:
    """A value as one would write it in the file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ", ".join(_yaml(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else str(value)


def pair_faults(config: Config) -> list[Fault]:
    """Rules between a few keys of one section."""
    actor, trainer, data = config.worker.actor, config.trainer, config.data
    faults = []

    def need(holds: bool, keys: str, message: Callable[[], str]) -> None:
        if not holds:
            faults.append(Fault(tuple(keys.split()), message()))

    betas = actor.optim.betas
    need(
        len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "worker.actor.optim.betas",
        lambda: f"worker.actor.optim.betas: {_yaml(betas)} must be two numbers of at least 0 and below 1, "
        "e.g. [0.9, 0.999]",
    )
    need(
        data.min_pixels <= data.max_pixels,
        "data.min_pixels data.max_pixels",
        lambda: f"data.min_pixels: {data.min_pixels} is more than data.max_pixels = {data.max_pixels}; "
        "lower the first or raise the second",
    )
    fewest, most = data.video_min_pixels or data.min_pixels, data.video_max_pixels or data.max_pixels
    need(
        fewest <= most or data.min_pixels > data.max_pixels,
        "data.video_min_pixels data.video_max_pixels",
        lambda: f"data.video_min_pixels: {fewest} (null: data.min_pixels) is more than data.video_max_pixels = {most} "
        "(null: data.max_pixels); lower the first or raise the second",
    )
    need(
        data.video_min_frames <= data.video_max_frames,
        "data.video_min_frames data.video_max_frames",
        lambda: f"data.video_min_frames: {data.video_min_frames} is more than data.video_max_frames = "
        f"{data.video_max_frames}; lower the first or raise the second",
    )
    steps, warmup = trainer.max_steps, actor.optim.lr_warmup_steps
    need(
        steps is None or warmup is None or warmup < steps,
        "worker.actor.optim.lr_warmup_steps trainer.max_steps",
        lambda: f"worker.actor.optim.lr_warmup_steps: {warmup} warm-up steps leave none of trainer.max_steps = "
        f"{steps}; set it to at most {steps - 1}",
    )
    reward = config.worker.reward
    need(
        not (reward.reward_function and reward.reward_functions),
        "worker.reward.reward_function worker.reward.reward_functions",
        lambda: f"worker.reward.reward_function: {reward.reward_function} is set, and reward_functions too; keep one "
        "(reward_function=null takes out a file's)",
    )
    count, weights = len(reward.reward_functions), len(reward.reward_weights)
    need(
        not count or weights in (0, count),
        "worker.reward.reward_weights",
        lambda: f"worker.reward.reward_weights: has {weights} numbers for {count} reward_functions; give one each, or "
        "none for 1 each",
    )
    need(bool(trainer.logger), "trainer.logger", lambda: "trainer.logger: is empty; write e.g. [console, file]")
    gone = not_installed(trainer.logger)
    need(
        not gone,
        "trainer.logger",
        lambda: f"trainer.logger: not installed here: {', '.join(gone)}; pip install {' '.join(gone)}, or take it out",
    )
    for key in ("project_name", "experiment_name"):
        name = getattr(trainer, key)
        need(
            bool(name.strip()) and os.sep not in name and name not in (".", ".."),
            f"trainer.{key}",
            lambda name=name, key=key: f"trainer.{key}: {name!r} cannot name a folder; use letters, digits, _ - .",
        )
    return faults


def launch_faults(config: Config, launch: Launch) -> list[Fault]:
    """nnodes and n_gpus_per_node that differ from what the launcher started."""
    per_node = launch.per_node
    faults = []
    for key, asked, started, flag, what in (
        ("trainer.nnodes", config.trainer.nnodes, launch.num_nodes, "--num_machines", "machine(s)"),
        (
            "trainer.n_gpus_per_node",
            config.trainer.n_gpus_per_node,
            per_node,
            "--num_processes",
            "process(es) per machine",
        ),
    ):
        if asked is not None and asked != started:
            text = (
                f"{key}: the configuration says {asked}, but the launcher started {started} {what}; "
                f"set it to null, or start with `accelerate launch {flag}` to match"
            )
            faults.append(Fault((key,), text))
    return faults


def _notices(config: Config, launch: Launch) -> list[str]:
    """Lines about valid settings that change nothing or that surprise."""
    optim, trainer = config.worker.actor.optim, config.trainer
    has_val = bool(config.data.val_files) or launch.has_val_rows
    lines = {
        "worker.actor.optim.lr_warmup_ratio has no effect: lr_warmup_steps is set": (
            optim.lr_warmup_steps is not None and optim.lr_warmup_ratio > 0
        ),
        "worker.actor.optim.min_lr_ratio has no effect: lr_scheduler_type is constant": (
            optim.min_lr_ratio is not None and optim.lr_scheduler_type == "constant"
        ),
        "trainer.val_before_train has no effect: data.val_files is empty": trainer.val_before_train and not has_val,
        "trainer.save_model_only is true: these checkpoints cannot be resumed": trainer.save_model_only,
    }
    return [line for line, holds in lines.items() if holds] + [
        *algorithm_notices(config),
        *rollout_notices(config),
        *sharding_notices(config, os.environ),
    ]
