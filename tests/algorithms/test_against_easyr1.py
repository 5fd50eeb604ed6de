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
DEFAULT_LOSSES = [name for name in FIXTURE["policy_loss"] if name.startswith("default|")]


def test_grpo_advantages_equal_easyr1():
    ours = advantages.estimate("grpo", INPUTS["token_level_rewards"], MASK, FIXTURE["inputs"]["uid"])
    torch.testing.assert_close(ours, torch.tensor(FIXTURE["advantages"]["grpo"]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(FIXTURE["kl"]))
def test_kl_equals_easyr1(name):
    ours = kl.estimate(name, INPUTS["log_probs"], INPUTS["ref_log_probs"])
    torch.testing.assert_close(ours, torch.tensor(FIXTURE["kl"][name]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("setting", DEFAULT_LOSSES)
def test_default_loss_gradient_and_metrics_equal_easyr1(setting):
    expected = FIXTURE["policy_loss"][setting]
    options = dict(part.split("=") for part in setting.split("|")[1:])
    log_probs = INPUTS["log_probs"].clone().requires_grad_()
    loss, metrics = losses.policy_loss(
        "default",
        INPUTS["old_log_probs"],
        log_probs,
        INPUTS["advantages"],
        MASK,
        clip_ratio_low=float(options["low"]),
        clip_ratio_high=float(options["high"]),
        clip_ratio_dual=float(options["dual"]),
        loss_avg_mode=options["avg"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=1e-6, atol=1e-9)
    if options["avg"] == "token":
        assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
            expected["metrics"], rel=1e-5, abs=1e-8
        )


def test_every_kl_and_default_setting_of_the_fixture_was_run():
    assert set(FIXTURE["kl"]) == set(kl.ESTIMATORS)
    assert len(DEFAULT_LOSSES) == 4
