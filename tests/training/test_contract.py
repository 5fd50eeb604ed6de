"""The inherited symbols that GRPOVLMTrainer overrides or calls have the signatures it was written against (TRL 1.16,
transformers 5.17)."""

import inspect

import pytest
from transformers import Trainer
from trl import GRPOTrainer

from grpo_vlm.training.trainer import GRPOVLMTrainer

PARAMETERS = {
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "get_train_dataloader": "self",
    "create_optimizer": "self model",
    "create_scheduler": "self num_training_steps optimizer",
    "training_step": "self model inputs num_items_in_batch",
    "log": "self logs start_time",
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_run_epoch": "self model epoch train_dataloader steps_in_epoch num_update_steps_per_epoch trial"
    " ignore_keys_for_eval start_time resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "_maybe_log_save_evaluate": "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time"
    " learning_rate",
    "get_decay_parameter_names": "self model",
    "_prepare_for_training": "self max_steps train_dataloader resume_from_checkpoint",
    "_load_rng_state": "self checkpoint",
    "_clip_grad_norm": "self model",
    "_build_accelerator_args": "self kwargs",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_signature(name):
    found = " ".join(inspect.signature(getattr(GRPOTrainer, name)).parameters)
    assert found == PARAMETERS[name]


def test_every_override_is_listed():
    inherited = {name for name in dir(Trainer) + dir(GRPOTrainer) if not name.startswith("__")}
    overridden = {name for name in vars(GRPOVLMTrainer) if name in inherited}
    assert overridden and overridden <= set(PARAMETERS), overridden - set(PARAMETERS)
