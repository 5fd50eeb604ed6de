"""How an update is cut into micro-batches does not change where it leads; a lost row does."""

import pytest
import torch
from transformers import TrainerCallback

from tests.training.rigs import largest_difference, parameters, session, settings


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the first update, before clipping has an effect on them that differs."""

    def __init__(self):
        self.gradients = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.gradients is None:
            self.gradients = {
                name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
            }


def train(root, folder, micro, lost_row=False, **changes):
    """Three AdamW updates on the same eight rollouts (ppo_epochs=3: the rollouts are those of the start)."""
    config = settings(
        root,
        folder,
        **{
            "data.rollout_batch_size": 2,
            "worker.actor.global_batch_size": 2,
            "worker.actor.ppo_epochs": 3,
            "worker.actor.micro_batch_size_per_device_for_update": micro,
            "worker.actor.micro_batch_size_per_device_for_experience": 8,
            **changes,
        },
    )
    with session(config) as parts:
        first = FirstGradients()
        parts.trainer.add_callback(first)
        if lost_row:
            loss = parts.trainer._loss
            parts.trainer._loss = lambda *args: loss(*args) * (args[2].stop < 8)  # args[2]: the micro-batch's rows
        before = parameters(parts.trainer)
        parts.train()
        after = parameters(parts.trainer)
    assert largest_difference(before, after) > 1e-5
    return first.gradients, after


@pytest.mark.parametrize("average", ["token", "seq"])
def test_eight_micro_batches_equal_one(tmp_path, tmp_path_factory, average):
    root = tmp_path_factory.getbasetemp()
    change = {"worker.actor.loss_avg_mode": average}
    one_gradients, one = train(root, tmp_path / "8x1", 8, **change)
    eight_gradients, eight = train(root, tmp_path / "1x8", 1, **change)
    largest = max(value.abs().max() for value in one_gradients.values())
    assert one_gradients.keys() == eight_gradients.keys()
    for name, value in one_gradients.items():
        assert (eight_gradients[name] - value).abs().max() <= 1e-5 * largest, name
    assert largest_difference(one, eight) <= 1e-5


def test_a_lost_row_is_seen(tmp_path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    _, whole = train(root, tmp_path / "whole", 1)
    _, lost = train(root, tmp_path / "lost", 1, lost_row=True)
    assert largest_difference(whole, lost) > 1e-5


def test_kl_is_zero_and_the_ratio_one_before_the_first_update(tmp_path, tmp_path_factory):
    changes = {
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": True,
        "algorithm.kl_penalty": "low_var_kl",
        "worker.actor.ppo_epochs": 1,
    }
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    with session(config) as parts:
        parts.train()
        record = parts.trainer.state.log_history[0]
    assert record["actor/kl_loss"] == 0.0
    assert record["actor/ppo_kl"] == 0.0 and record["actor/pg_clipfrac_higher"] == 0.0
    assert record["rollout/logprob_diff/mean"] <= 2e-5
    assert torch.isfinite(torch.tensor(record["actor/grad_norm"])) and record["actor/grad_norm"] > 0
