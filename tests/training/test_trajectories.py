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
            "worker.actor.dynamic_batching": False,  # `micro` samples a row, not as many tokens as they may have
            **changes,
        },
    )
    with session(config) as parts:
        first = FirstGradients()
        parts.trainer.add_callback(first)
        if lost_row:
            rows = parts.trainer.learner.scorer.rows
            parts.trainer.learner.scorer.rows = lambda *args: rows(*args)[:-1]
        before = parameters(parts.trainer)
        parts.train()
        after = parameters(parts.trainer)
    assert largest_difference(before, after) > 1e-5
    return first.gradients, after


@pytest.mark.parametrize("average", ["token", "seq"])
def test_packed_or_padded_and_however_cut_an_update_is_the_same(tmp_path, tmp_path_factory, average):
    root = tmp_path_factory.getbasetemp()
    change = {"worker.actor.loss_avg_mode": average}
    plain_gradients, plain = train(root, tmp_path / "plain", 8, **change, **{"worker.actor.padding_free": False})
    largest = max(value.abs().max() for value in plain_gradients.values())
    for micro in (8, 3, 1):  # two groups a row, parts of groups, single samples
        gradients, packed = train(root, tmp_path / f"packed-{micro}", micro, **change)
        assert gradients.keys() == plain_gradients.keys()
        for name, value in plain_gradients.items():
            assert (gradients[name] - value).abs().max() <= 1e-5 * largest, (micro, name)
        # AdamW divides a gradient by its size, so what is rounding and nothing else moves a weight by rounding / 1e-8
        real = {name: value.abs() > 1e-6 * largest for name, value in plain_gradients.items()}
        moved = {
            name: torch.where(real[name], packed[name], plain[name]) if micro == 1 else packed[name] for name in plain
        }
        assert largest_difference(plain, moved) <= 1e-5, micro


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
