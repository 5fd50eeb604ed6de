"""AdamW with bf16 states beside torch's."""

import pytest
import torch

from grpo_vlm.errors import ConfigError
from grpo_vlm.training.optimizer import AdamWBF16
from tests.training.rigs import largest_difference, parameters, session, settings


def descend(cls, dtype, lr, steps=300):
    """How far the weights of a quadratic have moved after some steps, mean."""
    generator = torch.Generator().manual_seed(0)
    start, goal = torch.randn(2, 500, generator=generator)
    weight, start = torch.nn.Parameter(start.to(dtype).clone()), start.to(dtype).float()
    optimizer = cls([weight], lr=lr, weight_decay=0.0)
    for _ in range(steps):
        weight.grad = weight.detach() - goal.to(dtype)
        optimizer.step()
    return (weight.detach().float() - start).abs().mean().item()


def test_float32_weights_go_where_adamw_goes():
    ours, theirs = (descend(cls, torch.float32, 1e-2) for cls in (AdamWBF16, torch.optim.AdamW))
    assert ours == pytest.approx(theirs, rel=0.02) and theirs > 0.5


def test_bf16_weights_move_by_steps_below_their_resolution():
    """1e-4 a step: plain bf16 weights stay where they are, compensated ones go as far as float32 ones."""
    ours = descend(AdamWBF16, torch.bfloat16, 1e-4)
    lost = descend(torch.optim.AdamW, torch.bfloat16, 1e-4)
    right = descend(torch.optim.AdamW, torch.float32, 1e-4)
    assert ours == pytest.approx(right, rel=0.2) and abs(lost - right) > 0.3 * right


def test_the_second_moment_forgets():
    """0.999 times a bf16 number is that number again when it is rounded to the nearest."""
    weight = torch.nn.Parameter(torch.zeros(2000))
    optimizer = AdamWBF16([weight], lr=1e-3, weight_decay=0.0)
    for step in range(1500):
        weight.grad = torch.full((2000,), float(step < 300))
        optimizer.step()
    right = (1 - 0.999**300) * 0.999**1200
    assert optimizer.state[weight]["exp_avg_sq"].float().mean().item() == pytest.approx(right, rel=0.02)


def test_a_run_uses_it_and_resumes_exactly(tmp_path, tmp_path_factory):
    changes = {
        "worker.actor.optim.strategy": "adamw_bf16",
        "worker.actor.fsdp.torch_dtype": "bf16",
        "worker.actor.optim.lr": 1e-3,
        "trainer.save_freq": 1,
        "trainer.val_before_train": False,
    }

    def train(folder, steps):
        config = settings(tmp_path_factory.getbasetemp(), tmp_path / folder, **changes, **{"trainer.max_steps": steps})
        with session(config) as parts:
            parts.train()
            states = parts.trainer.optimizer.optimizer.state.values()
            assert all(state["exp_avg"].dtype == state["compensation"].dtype == torch.bfloat16 for state in states)
            return parameters(parts.trainer)

    whole = train("whole", 2)
    train("broken", 1)
    assert largest_difference(whole, train("broken", 2)) == 0.0


def test_8_bit_states_ask_for_an_accelerator(tmp_path, tmp_path_factory):
    config = settings(tmp_path_factory.getbasetemp(), tmp_path, **{"worker.actor.optim.strategy": "adamw_8bit"})
    with pytest.raises(ConfigError, match="adamw_8bit needs an accelerator"):
        session(config)
