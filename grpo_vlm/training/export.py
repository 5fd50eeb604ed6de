"""A checkpoint's model as a folder of its own, with a model card; on request on the Hugging Face hub.

    grpo-vlm export RUN --to DIR [--step N] [--merge] [--push ID]

RUN is a run folder (its best checkpoint by the validation reward, else its last, or --step) or a folder global_step_N.
Of a run with LoRA the adapter is written; with --merge the whole model.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from grpo_vlm.config import load_config
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.load import ADAPTER, load_policy
from grpo_vlm.report.card import write_card
from grpo_vlm.report.checkpoint_tracker import CheckpointTracker
from grpo_vlm.report.files import read_lines, read_settings, remove
from grpo_vlm.report.run_folder import CHECKPOINT_NAME, STEP_PREFIX, checkpoint_steps
from grpo_vlm.training.manifest import find_fault, read_manifest
from grpo_vlm.training.model_files import ModelSettings, take_model
from grpo_vlm.training.saver import Draft

WEIGHTS = "*.safetensors"


def main(arguments: Sequence[str]) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="grpo-vlm export", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder, or one of its global_step_N")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write, new or empty")
    parser.add_argument("--step", type=int, help="which checkpoint; without it the best, else the last")
    parser.add_argument("--merge", action="store_true", help="with LoRA: the whole model instead of the adapter")
    parser.add_argument("--push", metavar="ID", help="upload the folder to this repository of the Hugging Face hub")
    given = parser.parse_args(arguments)
    checkpoint, why = choose(given.run.expanduser(), given.step)
    export(checkpoint, given.to.expanduser(), merge=given.merge)
    print(f"{checkpoint.name} of {checkpoint.parent} ({why}) -> {given.to}")
    if given.push:
        print(f"uploaded to {push(given.to.expanduser(), given.push)}")


def choose(run: Path, step: int | None = None) -> tuple[Path, str]:
    """The folder of the checkpoint, and why it was chosen. Raises ConfigError when there is none or it is damaged."""
    if CHECKPOINT_NAME.fullmatch(run.name) and step is None:
        path, why = run, "named"
    else:
        path, why = _of_run(run, step)
    fault = find_fault(path)
    if fault is not None:
        raise ConfigError(f"{path} is not a whole checkpoint: {fault}. Name another with --step.")
    return path.resolve(), why


def _of_run(run: Path, step: int | None) -> tuple[Path, str]:
    steps = checkpoint_steps(run)
    if not steps:
        raise ConfigError(f"{run} holds no checkpoint global_step_N; name the run folder of a run that saved one")
    if step is not None:
        if step not in steps:
            raise ConfigError(f"--step {step}: {run} has no such checkpoint; it has {', '.join(map(str, steps))}")
        return run / f"{STEP_PREFIX}{step}", "named"
    tracker = CheckpointTracker.read(run / "checkpoint_tracker.json")
    if tracker.best_global_step in steps:
        best = f"the best: val/reward_score {tracker.best_val_reward_score:.4g}"
        return run / f"{STEP_PREFIX}{tracker.best_global_step}", best
    return run / f"{STEP_PREFIX}{steps[-1]}", "the last; no validation tells the best"


def export(checkpoint: Path, target: Path, *, merge: bool) -> None:
    """Writes `target`, which appears when it is whole. Raises ConfigError when it exists and is not empty, or cannot
    be written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to: {target} exists and is not empty. Name a new folder.")
    temporary = target.with_name(target.name + ".tmp")
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
        adapter = (checkpoint / ADAPTER).is_dir() and not merge
        _fill(checkpoint, temporary, adapter)
        run = checkpoint.parent
        rows = [row for _, row in read_lines(run / "metrics.jsonl") if row is not None]
        settings, facts = read_settings(run / "config.yaml"), read_manifest(checkpoint)
        write_card(temporary, title=target.name, settings=settings, facts=facts, rows=rows, adapter=adapter)
        if target.exists():
            target.rmdir()
        os.replace(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ConfigError(f"--to: {target} cannot be written ({error}). Name another folder.") from error


def _fill(checkpoint: Path, folder: Path, adapter: bool) -> None:
    model = checkpoint / "model"
    if adapter:
        shutil.copytree(checkpoint / ADAPTER, folder, dirs_exist_ok=True)
        if model.is_dir():  # the processor lies beside the merged weights
            unneeded = shutil.ignore_patterns(WEIGHTS, "*.index.json", "config.json", "generation_config.json")
            shutil.copytree(model, folder, dirs_exist_ok=True, ignore=unneeded)
    elif any(model.glob(WEIGHTS)):
        shutil.copytree(model, folder, dirs_exist_ok=True)
    else:
        shutil.copytree(checkpoint / ADAPTER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("adapter_*"))
        _merge(checkpoint, folder)


def _merge(checkpoint: Path, folder: Path) -> None:
    """The base model with the adapter merged in, as training itself would have written it."""
    policy = load_policy(load_config(checkpoint.parent / "config.yaml"), checkpoint)
    draft = Draft(0, background=False)
    draft.place = folder
    take_model(policy, Accelerator(cpu=True), draft, ".", ModelSettings(policy))
    draft.finish()


def push(folder: Path, repository: str) -> str:
    """Uploads all files; a new repository is private. Returns its address. Raises ConfigError."""
    api = HfApi()
    try:
        made = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=made.repo_id, commit_message="Upload of grpo-vlm export")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"--push {repository}: the hub did not take it: {type(error).__name__}: {reason}. {folder} is written;"
            " log in with `hf auth login` or set HF_TOKEN to a token that may write, and check the name (USER/NAME)."
        ) from error
    return str(made)
