"""The reference model of the KL term while a run lasts: wrapped as the policy is, made equal to it now and then, saved
where it is no longer the model that the run began with."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from trl.models import prepare_deepspeed

from grpo_vlm.rollout.weights import written
from grpo_vlm.training.sharding import divided, fsdp2_frozen

if TYPE_CHECKING:
    from grpo_vlm.training.trainer import GRPOVLMTrainer

FOLDER = "reference"  # in a checkpoint's state/


def prepare_reference(trainer: "GRPOVLMTrainer", reference: PreTrainedModel) -> nn.Module:
    """The frozen model under the policy's sharding."""
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(reference, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        return fsdp2_frozen(reference, trainer.accelerator)
    return trainer.accelerator.prepare_model(reference, evaluation_mode=True)


@contextmanager
def reference_of(trainer: "GRPOVLMTrainer") -> Iterator[nn.Module]:
    """The model that reference log-probs are taken from; with LoRA the policy, whose adapters are off meanwhile."""
    if trainer.ref_model is not None:
        yield trainer.ref_model
        return
    with trainer.accelerator.unwrap_model(trainer.model_wrapped).disable_adapter():
        yield trainer.model_wrapped


@torch.no_grad()
def refresh(trainer: "GRPOVLMTrainer") -> None:
    """Copies the policy's weights into the reference. A collective where weights are sharded."""
    unwrap = trainer.accelerator.unwrap_model
    target, source = (divided(unwrap(model)) for model in (trainer.ref_model, trainer.model_wrapped))
    pairs = zip(target.parameters(), source.parameters(), strict=True)
    for target, source in pairs:
        with written(target, source, trainer.accelerator):
            target.copy_(source)


def saved_reference(checkpoint: Path | None) -> Path | None:
    """The reference of a checkpoint `global_step_N`, where it has one of its own."""
    folder = None if checkpoint is None else checkpoint / "state" / FOLDER
    return folder if folder is not None and folder.is_dir() else None
