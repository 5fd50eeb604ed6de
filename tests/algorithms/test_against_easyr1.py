"""Values, gradients and metrics of EasyR1's own functions (tests/data/easyr1_algorithms.json, made at its commit
b44b311) are reproduced."""

import json
from pathlib import Path

import pytest
import torch

from grpo_vlm.algorithms import advantages, kl, losses

FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "easyr1_algorithms.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in FIXTURE["inputs"].items() if name != "uid"}
MASK = INPUTS["mask"]


@pytest.mark.parametrize("name", sorted(FIXTURE["advantages"]))
def test_advantages_equal_easyr1(name):
    ours = advantages.estimate(name, INPUTS["token_level_rewards"], MASK, FIXTURE["inputs"]["uid"])
    # its whitening leaves values in the padding, which nothing reads
    torch.testing.assert_close(ours, torch.tensor(FIXTURE["advantages"][name]) * MASK, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(FIXTURE["kl"]))
def test_kl_equals_easyr1(name):
    ours = kl.estimate(name, INPUTS["log_probs"], INPUTS["ref_log_probs"])
    # 1.2e-7 is one rounding of theirs: exp(x) - x - 1 of a small x
    torch.testing.assert_close(ours, torch.tensor(FIXTURE["kl"][name]), rtol=1e-6, atol=2.4e-7)


@pytest.mark.parametrize("setting", sorted(FIXTURE["policy_loss"]))
def test_loss_gradient_and_metrics_equal_easyr1(setting):
    expected = FIXTURE["policy_loss"][setting]
    loss_type, *parts = setting.split("|")
    options = dict(part.split("=") for part in parts)
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    loss, metrics = losses.policy_loss(
        loss_type,
        INPUTS["old_log_probs"],
        log_probs,
        INPUTS["advantages"],
        MASK,
        clip_ratio_low=float(options["low"]),
        clip_ratio_high=float(options["high"]),
        clip_ratio_dual=float(options["dual"]),
        tau_positive=float(options["tau+"]),
        tau_negative=float(options["tau-"]),
        loss_avg_mode=options["avg"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=1e-6, atol=1e-9)
    for name, value in expected["metrics"].items():
        assert metrics[name].item() == pytest.approx(value, rel=1e-6, abs=1e-8), name


def test_the_fixture_holds_what_these_tests_are_believed_to_check():
    assert set(FIXTURE["advantages"]) == {"grpo", "grpo_passk", "rloo", "reinforce_plus_plus"}
    assert set(FIXTURE["kl"]) == {"kl", "abs", "mse", "low_var_kl"}
    names = [setting.split("|")[0] for setting in FIXTURE["policy_loss"]]
    assert {name: names.count(name) for name in names} == {
        "default": 4,
        "gspo": 2,
        "gspo_token": 2,
        "cispo": 2,
        "sapo": 2,
    }
