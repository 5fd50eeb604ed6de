"""Values of verl's own functions (tests/data/verl_algorithms.json, made at its commit 1dda039) are reproduced."""

import json
from pathlib import Path

import pytest
import torch

from grpo_vlm.algorithms import advantages, kl
from grpo_vlm.algorithms.losses import Denominators, average

FIXTURE = json.loads((Path(__file__).parents[1] / "data" / "verl_algorithms.json").read_text())
INPUTS = {name: torch.tensor(value) for name, value in FIXTURE["inputs"].items() if name != "uid"}
MASK = INPUTS["mask"]

ADVANTAGES = {
    "grpo_no_std": ("grpo", {"normalize_std": False}),
    "opo": ("opo", {}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {}),
    "rloo": ("rloo", {}),
}
AVERAGES = {
    "token-mean": "token",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("name", sorted(FIXTURE["advantages"]))
def test_advantages_equal_verl(name):
    ours, options = ADVANTAGES[name]
    values = advantages.estimate(ours, INPUTS["token_level_rewards"], MASK, FIXTURE["inputs"]["uid"], **options)
    torch.testing.assert_close(values, torch.tensor(FIXTURE["advantages"][name]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(FIXTURE["kl"]))
def test_kl_equals_verl(name):
    ours = kl.estimate(name, INPUTS["log_probs"], INPUTS["ref_log_probs"])
    # 1.2e-7 is one rounding of theirs: exp(x) - x - 1 of a small x
    torch.testing.assert_close(ours, torch.tensor(FIXTURE["kl"][name]), rtol=1e-6, atol=2.4e-7)


@pytest.mark.parametrize("name", sorted(FIXTURE["loss_aggregation"]))
def test_averages_equal_verl(name):
    ours = average(INPUTS["loss_matrix"], MASK, AVERAGES[name], Denominators.of(MASK))
    assert ours.item() == pytest.approx(FIXTURE["loss_aggregation"][name], rel=1e-6)


def test_the_fixture_holds_what_these_tests_are_believed_to_check():
    assert set(FIXTURE["advantages"]) == set(ADVANTAGES)
    assert set(FIXTURE["loss_aggregation"]) == set(AVERAGES)
    assert set(FIXTURE["kl"]) == {"kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3"}
