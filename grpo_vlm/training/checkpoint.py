"""A checkpoint is `global_step_N/model/`, which transformers loads as it is, and `global_step_N/state/`, which an
exact resume needs. Written beside and renamed when complete."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from peft import PeftModel
from transformers.trainer import TRAINER_STATE_NAME

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.load import ADAPTER
from grpo_vlm.report.run_folder import RunFolder
from grpo_vlm.training.export import export
from grpo_vlm.training.reference import FOLDER, save_reference

if TYPE_CHECKING:
    from grpo_vlm.training.trainer import GRPOVLMTrainer


STEP_PREFIX = "global_step_"
LOOP_NAME = "loop.json"  # what the loop between the steps keeps: the KL coefficient, rounds of online filtering


def save(trainer: "GRPOVLMTrainer", folder: RunFolder, step: int, *, score: float | None) -> Path:
    """Writes the checkpoint of rollout step `step`; every process calls it. `score` is the validation reward of
    these weights, if known."""
    config = trainer.config.trainer
    temporary = folder.begin_checkpoint(step)
    trainer.accelerator.wait_for_everyone()
    _save_model(trainer, temporary)
    if not config.save_model_only:
        state = temporary / "state"
        state.mkdir(exist_ok=True)
        trainer._save_optimizer_and_scheduler(str(state))
        trainer._save_rng_state(str(state))
        loop = {"kl": trainer.credit.kl.state_dict(), "rounds": trainer.rounds.state()}
        if trainer.reference_moved:
            save_reference(trainer, state)
        if trainer.accelerator.is_main_process:
            trainer.state.save_to_json(str(state / TRAINER_STATE_NAME))
            (state / LOOP_NAME).write_text(json.dumps(loop), encoding="utf-8")
    trainer.accelerator.wait_for_everyone()
    path = folder.finish_checkpoint(step, score=score)
    folder.prune(config.save_limit)
    trainer.accelerator.wait_for_everyone()
    return path


def _save_model(trainer: "GRPOVLMTrainer", folder: Path) -> None:
    """`model/` as transformers loads it; with LoRA that is the merged model, and `adapter/` as peft loads it."""
    accelerator = trainer.accelerator
    weights = accelerator.get_state_dict(trainer.model_wrapped)  # a collective under ZeRO-3 and FSDP
    model = accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False)
    adapted = isinstance(model, PeftModel)
    if accelerator.is_main_process:
        model.save_pretrained(folder / (ADAPTER if adapted else "model"), state_dict=weights)
    del weights
    if adapted:
        export(trainer.model_wrapped, accelerator, folder / "model")
    if accelerator.is_main_process:
        trainer.processing_class.save_pretrained(folder / "model")


def load_loop(trainer: "GRPOVLMTrainer", state: Path) -> None:
    """Takes up what the loop kept when the checkpoint with this `state` folder was written."""
    loop = json.loads((state / LOOP_NAME).read_text(encoding="utf-8"))
    trainer.credit.kl.load_state_dict(loop["kl"])
    trainer.rounds.load_state(loop["rounds"])
    trainer.reference_moved = (state / FOLDER).is_dir()


def find_resume(config: Config, folder_path: Path, last_step: int | None) -> tuple[int, Path] | None:
    """Step and path of the checkpoint to go on from: `trainer.load_checkpoint_path`, or the run folder's last one
    when `find_last_checkpoint`; None starts afresh.

    Raises:
        ConfigError: the checkpoint is absent or has no optimizer state.
    """
    named = config.trainer.load_checkpoint_path
    own = config.trainer.find_last_checkpoint and last_step is not None
    if named and not (own and Path(named).resolve().parent != folder_path.resolve()):
        path = Path(named)
        step = int(path.name.removeprefix(STEP_PREFIX))
    elif own:  # also when the run was begun from `load_checkpoint_path` elsewhere and has come further since
        path, step = folder_path / f"{STEP_PREFIX}{last_step}", last_step
    else:
        return None
    key = "trainer.load_checkpoint_path" if named else "trainer.find_last_checkpoint"
    if not (path / "model").is_dir():
        raise ConfigError(f"{key}: {path} has no folder model/. Name a global_step_N folder that this trainer wrote.")
    if not (path / "state" / TRAINER_STATE_NAME).is_file():
        raise ConfigError(
            f"{key}: {path} was saved with trainer.save_model_only=true, so the optimizer's state is not there."
            f" Start a new run from the weights with worker.actor.model.model_path={path / 'model'} and another"
            " trainer.experiment_name."
        )
    saved = json.loads((path / "state" / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"]
    if saved != step * updates_per_step(config):
        raise ConfigError(
            f"{key}: {path} was saved with {saved // step} updates per rollout step, now there are"
            f" {updates_per_step(config)}. Keep data.rollout_batch_size / worker.actor.global_batch_size *"
            " worker.actor.ppo_epochs as it was, or start a new run from its model/ folder."
        )
    return step, path
