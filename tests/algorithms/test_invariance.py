"""The loss does not depend on how an update is split, and the advantages not on the order of the rows."""

import pytest
import torch

from grpo_vlm.algorithms import advantages, kl, losses

B, T = 8, 12
CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_dual": 3.0}


def draw(seed=0):
    generator = torch.Generator().manual_seed(seed)
    old, new, weights = (torch.randn(B, T, generator=generator, dtype=torch.float64) for _ in range(3))
    lengths = torch.randint(1, T + 1, (B,), generator=generator)
    mask = (torch.arange(T)[None] < lengths[:, None]).double()
    return old - 2, new - 2, weights, mask


def gradient(parts, mode):
    old, new, weights, mask = draw()
    new.requires_grad_()
    whole = losses.Denominators.of(mask)
    total = 0.0
    for rows in parts:
        loss, _ = losses.policy_loss(
            "default", old[rows], new[rows], weights[rows], mask[rows], loss_avg_mode=mode, whole=whole, **CLIPS
        )
        loss.backward()
        total += loss.item()
    return total, new.grad


@pytest.mark.parametrize("mode", ["token", "seq"])
def test_one_batch_equals_any_split(mode):
    whole_loss, whole_gradient = gradient([list(range(B))], mode)
    for parts in ([[i] for i in range(B)], [[0, 3, 5], [1, 2, 4, 6, 7]], [list(range(4)), list(range(4, 8))]):
        loss, split_gradient = gradient(parts, mode)
        assert loss == pytest.approx(whole_loss, abs=1e-12)
        torch.testing.assert_close(split_gradient, whole_gradient, rtol=0, atol=1e-12)
    _, dropped = gradient([list(range(B - 1))], mode)
    assert (dropped - whole_gradient).abs().max() > 1e-6


def test_permuted_rows_give_permuted_advantages():
    rewards = torch.rand(B, T, dtype=torch.float64)
    mask = torch.ones(B, T, dtype=torch.float64)
    groups = ["a", "a", "a", "b", "b", "b", "b", "a"]
    order = torch.tensor([7, 2, 0, 5, 4, 6, 1, 3])
    plain = advantages.estimate("grpo", rewards, mask, groups)
    permuted = advantages.estimate("grpo", rewards[order], mask, [groups[i] for i in order])
    torch.testing.assert_close(permuted, plain[order], rtol=0, atol=1e-12)


def test_grpo_by_hand():
    rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0], [5.0], [5.0], [5.0], [5.0]])
    mask = torch.ones(8, 1)
    ours = advantages.estimate("grpo", rewards, mask, [0] * 4 + [1] * 4)[:, 0]
    std = (4 * 0.25 / 3) ** 0.5
    torch.testing.assert_close(ours[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]) / (std + 1e-6))
    assert ours[4:].tolist() == [0.0] * 4  # equal rewards: exactly zero, no NaN
    centred = advantages.estimate("grpo", rewards, mask, [0] * 4 + [1] * 4, normalize_std=False)[:, 0]
    torch.testing.assert_close(centred[:4], torch.tensor([0.5, -0.5, -0.5, 0.5]))
    assert advantages.estimate("grpo", torch.tensor([[2.0]]), torch.ones(1, 1), ["x"]).item() == pytest.approx(
        2.0, rel=1e-5
    )


def test_ratio_one_gives_the_plain_policy_gradient_and_kl_zero():
    old, _, weights, mask = draw(1)
    new = old.clone().requires_grad_()
    loss, metrics = losses.policy_loss("default", old, new, weights, mask, **CLIPS)
    loss.backward()
    torch.testing.assert_close(new.grad, -weights * mask / mask.sum(), rtol=1e-9, atol=1e-12)
    assert metrics["ppo_kl"].item() == 0.0 and metrics["pg_clipfrac_higher"].item() == 0.0
    for name in kl.ESTIMATORS:
        assert kl.estimate(name, old, old).abs().max().item() == 0.0


def test_unknown_names_are_errors():
    old, new, weights, mask = draw()
    with pytest.raises(KeyError):
        losses.policy_loss("nonsense", old, new, weights, mask, **CLIPS)
    with pytest.raises(KeyError):
        losses.policy_loss("default", old, new, weights, mask, loss_avg_mode="mean", **CLIPS)
    with pytest.raises(KeyError):
        advantages.estimate("nonsense", new, mask, list(range(B)))
