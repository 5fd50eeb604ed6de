"""KL estimators: values and gradients, the sum over the vocabulary in chunks, the course of the coefficient."""

import math

import pytest
import torch

from grpo_vlm.algorithms import kl
from tests.algorithms.draws import Draw

V = 17


def k3(d):
    x = min(max(-d, -20.0), 20.0)
    return min(max(math.exp(x) - x - 1, -10.0), 10.0)


# name -> value of d = log p - log p_ref, and the derivative that the gradient must have
PLAIN = {
    "kl": (lambda d: d, lambda d: 1.0),
    "abs": (abs, lambda d: math.copysign(1.0, d)),
    "mse": (lambda d: d * d / 2, lambda d: d),
    "low_var_kl": (k3, lambda d: 1 - math.exp(-d)),
    "k1": (lambda d: d, lambda d: 1.0),
    "k2": (lambda d: d * d / 2, lambda d: d),
    "k3": (k3, lambda d: 1 - math.exp(-d)),
    "k1+": (lambda d: d, lambda d: d),
    "k3+": (k3, lambda d: d),
}


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_value_and_gradient_equal_the_formula(name):
    draw = Draw.make(1)
    new = draw.new.clone().requires_grad_()
    ours = kl.estimate(name, new, draw.ref)
    ours.sum().backward()
    value, slope = PLAIN[name]
    for place in draw.mask.nonzero().tolist():
        d = (draw.new - draw.ref)[tuple(place)].item()
        assert ours[tuple(place)].item() == pytest.approx(value(d), rel=1e-9, abs=1e-12)
        assert new.grad[tuple(place)].item() == pytest.approx(slope(d), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_equal_inputs_give_exactly_zero(name, dtype):
    log_probs = Draw.make(2).new.to(dtype)
    ours = kl.estimate(name, log_probs, log_probs.clone())
    assert ours.abs().max().item() == 0.0
    assert ours.dtype == torch.promote_types(dtype, torch.float32)


def test_small_differences_keep_their_digits_and_large_ones_are_bounded():
    d = torch.tensor([1e-3, -1e-4], dtype=torch.float32)
    expected = [k3(x) for x in d.tolist()]
    assert kl.estimate("k3", d, torch.zeros(2)).tolist() == pytest.approx(expected, rel=3e-3)
    huge = torch.tensor([100.0, -100.0], requires_grad=True)
    bounded = kl.estimate("k3", huge, torch.zeros(2))
    bounded.sum().backward()
    assert bounded.tolist() == [10.0, 10.0] and huge.grad.tolist() == [0.0, 0.0]


def logits(seed, rows=23):
    drawn = torch.randn(rows, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    drawn[:, 4] = -torch.inf  # a token that may not be drawn
    return drawn


def test_full_equals_plain_loops():
    policy, reference = logits(1), logits(2)
    log_p, log_ref = policy.log_softmax(-1), reference.log_softmax(-1)
    ours = kl.full(log_p, log_ref)
    for row in range(len(policy)):
        p, q = log_p[row].exp().tolist(), log_ref[row].exp().tolist()
        plain = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)
        assert ours[row].item() == pytest.approx(plain, rel=1e-9)
    assert kl.full(log_p, log_p).abs().max().item() == 0.0


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
def test_full_in_chunks_equals_the_whole(chunk_tokens):
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    hidden, weight, reference = draw(23, 5).requires_grad_(), draw(V, 5).requires_grad_(), logits(4)
    coefficients, widest = draw(23), []

    def policy(part):
        widest.append(len(hidden[part]))
        return hidden[part] @ weight.t()

    whole = kl.full((hidden @ weight.t()).log_softmax(-1), reference.clamp(min=-50).log_softmax(-1))
    (whole * coefficients).sum().backward()
    expected = [tensor.grad.clone() for tensor in (hidden, weight)]
    hidden.grad = weight.grad = None
    ours = kl.full_in_chunks(policy, lambda part: reference[part].clamp(min=-50), 23, chunk_tokens)
    (ours * coefficients).sum().backward()
    torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
    for tensor, gradient in zip((hidden, weight), expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-9, atol=1e-12)
    assert max(widest) <= chunk_tokens
    assert len(widest) == 2 * -(-23 // chunk_tokens)  # each chunk's logits are made once more on the way back


def test_full_is_the_mean_of_k1_over_the_policys_own_samples():
    log_p, log_ref = (logits(seed, rows=1).log_softmax(-1) for seed in (5, 6))
    exact = sum(
        log_p[0, v].exp() * kl.estimate("k1", log_p[0, v], log_ref[0, v]) for v in range(V) if log_p[0, v].isfinite()
    )
    assert kl.full(log_p, log_ref).item() == pytest.approx(exact.item(), rel=1e-12)


def test_adaptive_coefficient_follows_its_formula_and_survives_a_checkpoint():
    steered = kl.controller("adaptive", coef=0.01, target=0.1, horizon=1000.0)
    steered.update(0.11, 50)  # 10 % above the target
    assert steered.coef == pytest.approx(0.01 * (1 + 0.1 * 50 / 1000), rel=1e-12)
    steered.update(5.0, 50)
    assert steered.coef == pytest.approx(0.01 * 1.005 * (1 + 0.2 * 0.05), rel=1e-12)
    steered.update(0.0, 500)
    assert steered.coef == pytest.approx(0.01 * 1.005 * 1.01 * (1 - 0.2 * 0.5), rel=1e-12)
    resumed = kl.controller("adaptive", coef=0.01, target=0.1, horizon=1000.0)
    resumed.load_state_dict(steered.state_dict())
    assert resumed.coef == steered.coef


def test_fixed_coefficient_stays_as_configured():
    fixed = kl.controller("fixed", coef=0.01, target=0.1, horizon=1000.0)
    fixed.update(5.0, 500)
    fixed.load_state_dict({"coef": 0.5})
    assert fixed.coef == 0.01


def test_unknown_names_are_errors():
    with pytest.raises(KeyError):
        kl.estimate("full", torch.zeros(1), torch.zeros(1))
    with pytest.raises(KeyError):
        kl.controller("nonsense", coef=0.1, target=0.1, horizon=1.0)
