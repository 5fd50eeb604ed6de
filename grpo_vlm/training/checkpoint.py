"""A checkpoint is `global_step_N/`: `model/`, which transformers and vLLM load as it is (with LoRA the merged model,
and `adapter/` for peft), `state/`, which an exact resume needs, and `manifest.json`.

Nothing in it depends on the number of processes or on how they shared the work, so that a run goes on with another
number of them. The learning rate and the rows of a step are functions of the step's number and are not stored.
"""

import copy
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import peft
import torch
import transformers
from accelerate.utils import gather_object
from peft import PeftModel
from transformers.trainer import TRAINER_STATE_NAME

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.load import ADAPTER
from grpo_vlm.report.run_folder import STEP_PREFIX, checkpoint_steps
from grpo_vlm.rollout.ranks import on_main
from grpo_vlm.training import optimizer_state, rng
from grpo_vlm.training.arguments import learning_rate_factor
from grpo_vlm.training.manifest import find_fault, read_manifest
from grpo_vlm.training.model_files import take_adapter, take_model
from grpo_vlm.training.reference import FOLDER
from grpo_vlm.training.room import fits_in_memory, lack_of_disk

if TYPE_CHECKING:
    from grpo_vlm.training.saver import Draft
    from grpo_vlm.training.trainer import GRPOVLMTrainer

LOOP_NAME = "loop.json"  # what the loop between the steps keeps: the KL coefficient, rounds of online filtering
RNG_NAME = "rng.json"


@dataclass(frozen=True)
class Between:
    """What changes while a rollout step collects its groups, as it was between two steps: a step that is given up
    leaves no trace."""

    rng: dict[str, Any]
    kl: dict[str, float]
    drawn: int
    kept: list[Any]

    @classmethod
    def now(cls, trainer: "GRPOVLMTrainer") -> "Between":
        """As it is."""
        rounds = trainer.rounds
        return cls(rng.capture(), dict(trainer.credit.kl.state_dict()), rounds.drawn, rounds.kept)


# ---- saving


def save(trainer: "GRPOVLMTrainer", step: int, *, score: float | None, between: Between | None = None) -> None:
    """Takes the checkpoint of rollout step `step`; every process calls it. It is written when `trainer.saver` has
    settled. score: the validation reward of these weights, if known. between: of a moment before, when no step has
    moved the weights since."""
    settings, saver = trainer.config.trainer, trainer.saver
    saver.settle()
    lack, background = _on_main(trainer, lambda: (lack_of_disk(trainer), fits_in_memory(trainer)))
    if lack is not None:
        saver.refuse(step, lack)
        return
    if settings.save_in_background and not background:
        trainer.console.warn("host memory has no room for a copy: this checkpoint is written while training waits")
    draft = saver.begin(step, background=settings.save_in_background and background)
    _take_weights(trainer, draft)
    if not settings.save_model_only:
        _take_state(trainer, draft, Between.now(trainer) if between is None else between)
    facts = {
        "step": step,
        "updates": trainer.state.global_step,
        "resumable": not settings.save_model_only,
        "processes": trainer.args.world_size,
        "scheme": trainer.accelerator.distributed_type.name.lower(),
        "rows": trainer.prompts.rows.mark,
        "base_model": trainer.config.worker.actor.model.model_path,
        "val_reward_score": score,
        "versions": {module.__name__: str(module.__version__) for module in (torch, transformers, accelerate, peft)},
    }
    saver.submit(draft, facts, score=score)


def save_stopped(trainer: "GRPOVLMTrainer", reason: str) -> None:
    """After `Stopped`: the state after the last finished step, unless there is a checkpoint of it."""
    trainer.saver.settle()
    step = trainer.rollout_step
    note = trainer.console.note
    if step == 0:
        note(f"stopped by {reason} in the first step: there is nothing to save. The same command begins again.")
        return
    if _on_main(trainer, lambda: trainer.folder.checkpoint_path(step).exists()):
        note(f"stopped by {reason}: global_step_{step} is there. The same command goes on from it.")
        return
    trainer.parking.fetch(trainer.model_wrapped, trainer.optimizer)  # where the step that was given up left them
    with trainer._phase("save_checkpoint"):
        save(trainer, step, score=None, between=trainer.between)
        trainer.saver.settle()
    note(f"stopped by {reason}: saved global_step_{step}. The same command goes on from it.")


def _take_weights(trainer: "GRPOVLMTrainer", draft: "Draft | None") -> None:
    accelerator, wrapped = trainer.accelerator, trainer.model_wrapped
    adapted = isinstance(accelerator.unwrap_model(wrapped), PeftModel)
    if adapted:
        take_adapter(wrapped, accelerator, draft, ADAPTER)
    folder = "model" if trainer.config.trainer.save_merged or not adapted else ADAPTER
    if folder == "model":
        take_model(wrapped, accelerator, draft, folder, trainer.model_settings)
    if draft is not None:
        draft.main_folder = folder
        draft.then(lambda place: trainer.processing_class.save_pretrained(place / folder))


def _take_state(trainer: "GRPOVLMTrainer", draft: "Draft | None", between: Between) -> None:
    found = optimizer_state.tensors(trainer)
    if draft is None:
        for _ in found:
            pass
    else:
        draft.take("state", optimizer_state.STEM, found)
        draft.text(f"state/{optimizer_state.NUMBERS_NAME}", optimizer_state.numbers(trainer))
    if trainer.reference_moved:
        take_model(trainer.ref_model, trainer.accelerator, draft, f"state/{FOLDER}", trainer.model_settings)
    rounds = trainer.rounds
    rounds.drawn, rounds.kept = between.drawn, between.kept
    loop = {"kl": between.kl, "rounds": rounds.state()}
    states = gather_object([between.rng]) if trainer.args.world_size > 1 else [between.rng]
    if draft is None:
        return
    draft.text(f"state/{LOOP_NAME}", json.dumps(loop))
    draft.text(f"state/{RNG_NAME}", json.dumps(states))
    progress = copy.copy(trainer.state)
    progress.log_history = []  # metrics.jsonl has it
    draft.text(f"state/{TRAINER_STATE_NAME}", json.dumps(dataclasses.asdict(progress), indent=1, sort_keys=True))


def _on_main(trainer: "GRPOVLMTrainer", call: Any) -> Any:
    return on_main(call, is_main=trainer.accelerator.is_main_process, world_size=trainer.args.world_size)


# ---- going on


def load_loop(trainer: "GRPOVLMTrainer", state: Path) -> None:
    """Takes up what the loop kept when the checkpoint with this `state` folder was written."""
    trainer.reference_moved = (state / FOLDER).is_dir()
    loop = json.loads((state / LOOP_NAME).read_text(encoding="utf-8"))
    trainer.credit.kl.load_state_dict(loop["kl"])
    trainer.rounds.load_state(loop["rounds"])


def load_optimizer(trainer: "GRPOVLMTrainer", state: Path) -> None:
    """Puts the optimizer and the learning rate where they were; the settings are the configuration's, which may have
    changed since."""
    optimizer_state.load(trainer, state)
    optim, schedule = trainer.config.worker.actor.optim, trainer.lr_scheduler
    updates = json.loads((state / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    step = updates // trainer.updates_per_step
    rate = optim.lr * learning_rate_factor(trainer.config, step, trainer.rollout_steps)
    schedule.last_epoch, schedule._step_count = updates, updates + 1
    schedule._last_lr = [rate] * len(schedule.base_lrs)
    for group in trainer.optimizer.param_groups:
        group["lr"] = rate


def load_rng(trainer: "GRPOVLMTrainer", state: Path) -> None:
    """This process's random numbers go on where they were; a process that was not there begins with its own."""
    states = json.loads((state / RNG_NAME).read_text(encoding="utf-8"))
    if trainer.args.process_index < len(states):
        rng.restore(states[trainer.args.process_index])


@dataclass(frozen=True)
class Resume:
    """The checkpoint to go on from, and what the user should know about it."""

    step: int
    path: Path
    warnings: tuple[str, ...] = ()

    @property
    def rows(self) -> str:
        """`PromptDataset.mark` of the rows that were trained with."""
        return read_manifest(self.path)["rows"]


def find_resume(config: Config, folder_path: Path) -> Resume | None:
    """`trainer.load_checkpoint_path`, or with `find_last_checkpoint` the newest checkpoint of the run folder whose
    files are as they were written; None starts afresh.

    Raises:
        ConfigError: the named checkpoint is absent, damaged or without an optimizer state; or all of the folder's are.
    """
    named = config.trainer.load_checkpoint_path
    own = checkpoint_steps(folder_path) if config.trainer.find_last_checkpoint else []
    if named and not (own and Path(named).resolve().parent != folder_path.resolve()):
        found = _named_checkpoint(Path(named))
    elif own:  # also when the run was begun from `load_checkpoint_path` elsewhere and has come further since
        found = _newest_whole(folder_path, own)
    else:
        return None
    _check_resumable(config, found, "trainer.load_checkpoint_path" if named else "trainer.find_last_checkpoint")
    return found


def _named_checkpoint(path: Path) -> Resume:
    key, fault = "trainer.load_checkpoint_path", find_fault(path)
    if fault is None:
        return Resume(int(path.name.removeprefix(STEP_PREFIX)), path)
    names = [f"{STEP_PREFIX}{step}" for step in checkpoint_steps(path.parent)]
    whole = [name for name in names if find_fault(path.parent / name) is None]
    beside = ", ".join(whole)
    raise ConfigError(
        f"{key}: {path} is not a whole checkpoint: {fault}. "
        + (f"Whole ones beside it: {beside}." if whole else "Name a global_step_N folder that this trainer wrote.")
    )


def _newest_whole(folder: Path, steps: list[int]) -> Resume:
    damaged: list[tuple[int, str]] = []
    for step in reversed(steps):
        fault = find_fault(folder / f"{STEP_PREFIX}{step}")
        if fault is None:
            told = (
                f"{STEP_PREFIX}{bad} IS DAMAGED ({what}). The run goes on from {STEP_PREFIX}{step} and does again what"
                f" came after; the damaged folder is kept as {STEP_PREFIX}{bad}.superseded"
                for bad, what in damaged
            )
            return Resume(step, folder / f"{STEP_PREFIX}{step}", tuple(told))
        damaged.append((step, fault))
    listed = "\n".join(f"  {STEP_PREFIX}{step}: {fault}" for step, fault in damaged)
    raise ConfigError(
        f"trainer.find_last_checkpoint: no checkpoint in {folder} is whole:\n{listed}\nThe run does not begin again by"
        " itself. Bring a whole one back, or move the folder away, or choose another trainer.experiment_name."
    )


def _check_resumable(config: Config, found: Resume, key: str) -> None:
    path, content = found.path, read_manifest(found.path)
    if not content["resumable"]:
        raise ConfigError(
            f"{key}: {path} was saved with trainer.save_model_only=true, so the optimizer's state is not there."
            f" Start a new run from the weights with worker.actor.model.model_path={path / 'model'} and another"
            " trainer.experiment_name."
        )
    if content["updates"] != found.step * updates_per_step(config):
        raise ConfigError(
            f"{key}: {path} was saved with {content['updates'] // found.step} updates per rollout step, now there are"
            f" {updates_per_step(config)}. Keep data.rollout_batch_size / worker.actor.global_batch_size *"
            " worker.actor.ppo_epochs as it was, or start a new run from its model/ folder."
        )
