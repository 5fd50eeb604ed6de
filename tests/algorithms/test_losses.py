"""Every policy loss against its formula in plain Python: value, gradient by central differences of that formula with
what has no gradient frozen, and metrics. TRL's names."""

import math
from types import SimpleNamespace

import pytest
import torch

from grpo_vlm.algorithms import losses
from grpo_vlm.algorithms.losses import AVERAGES, FIXED_AVERAGES, LOSSES, TRL_LOSSES, Denominators, resolve_loss
from tests.algorithms.draws import B, Draw, T

SETTINGS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_dual": 1.5,
    "tau_positive": 1.0,
    "tau_negative": 1.05,
    "kl_cov_coef": 0.7,
}
S = SimpleNamespace(**SETTINGS)


def sequence(values):
    return sum(values) / len(values)


def clipped(ratio):
    return min(max(ratio, 1 - S.clip_ratio_low), 1 + S.clip_ratio_high)


def ppo(ratio, advantage):
    loss = max(-advantage * ratio, -advantage * clipped(ratio))
    return min(loss, -advantage * S.clip_ratio_dual) if advantage < 0 else loss


# One completion: lists of n old, current and frozen current log-probs, advantages, weights and selection flags. Each
# returns n losses; `frozen` stands wherever the gradient stops.


def default(c):
    return [ppo(math.exp(new - old), a) for old, new, a in zip(c.old, c.new, c.a, strict=True)]


def gspo(c):
    ratio = math.exp(sequence([new - old for old, new in zip(c.old, c.new, strict=True)]))
    return [ppo(ratio, a) for a in c.a]


def gspo_token(c):
    of_sequence = sequence([frozen - old for old, frozen in zip(c.old, c.frozen, strict=True)])
    return [ppo(math.exp(of_sequence + n - f), a) for n, f, a in zip(c.new, c.frozen, c.a, strict=True)]


def cispo(c):
    rows = zip(c.old, c.new, c.frozen, c.a, strict=True)
    return [-a * new * clipped(math.exp(frozen - old)) for old, new, frozen, a in rows]


def sapo(c):
    def gate(x, tau):
        return 4 / tau / (1 + math.exp(-tau * (x - 1)))

    taus = [S.tau_positive if a >= 0 else S.tau_negative for a in c.a]
    rows = zip(c.old, c.new, c.a, taus, strict=True)
    return [-a * gate(math.exp(new - old), tau) for old, new, a, tau in rows]


def gpg(c):
    return [-a * new for new, a in zip(c.new, c.a, strict=True)]


def geo_mean(c):
    def pessimistic(x, a):
        inside = min(max(x, -S.clip_ratio_low), S.clip_ratio_high)
        return x if a == 0 else min(x, inside) if a > 0 else max(x, inside)

    ratio = math.exp(sequence([pessimistic(n - o, a) for o, n, a in zip(c.old, c.new, c.a, strict=True)]))
    weight = math.exp(sequence([math.log(w + 1e-10) for w in c.w]))
    return [-sequence(c.a) * ratio * weight] * len(c.a)


def clip_cov(c):
    ratios = [math.exp(new - old) for old, new in zip(c.old, c.new, strict=True)]
    rows = zip(ratios, c.a, c.selected, strict=True)
    return [0.0 if chosen else max(-a * r, -a * clipped(r)) for r, a, chosen in rows]


def kl_cov(c):
    rows = zip(c.old, c.new, c.a, c.selected, strict=True)
    return [-a * math.exp(n - o) + (S.kl_cov_coef * abs(n - o) if chosen else 0.0) for o, n, a, chosen in rows]


def trust_region(c, inside):
    def loss(old, new, frozen, a):
        ratio = min(math.exp(frozen - old), S.clip_ratio_dual)
        return -a * ratio * new * inside(math.exp(frozen), math.exp(old), a)

    return [loss(*row) for row in zip(c.old, c.new, c.frozen, c.a, strict=True)]


def dppo_tv(c):
    return trust_region(c, lambda p, old, a: p - old <= S.clip_ratio_high if a > 0 else p - old >= -S.clip_ratio_low)


def dppo_kl(c):
    def inside(p, old, a):
        distance = old * math.log(old / p) + (1 - old) * math.log((1 - old + 1e-8) / (1 - p + 1e-8))
        if a > 0:
            return distance <= S.clip_ratio_high or p <= old
        return distance <= S.clip_ratio_low or p >= old

    return trust_region(c, inside)


def vespo(c):
    log_w = sum(f - o + max(math.log(w), math.log(1e-8)) for o, f, w in zip(c.old, c.frozen, c.w, strict=True))
    log_w = min(max(log_w, math.log(1e-8)), 20)

    def phi(a):
        k, decay = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
        return math.exp(decay + k * log_w - decay * math.exp(log_w))

    return [-phi(a) * a * new for new, a in zip(c.new, c.a, strict=True)]


PLAIN = {
    "default": default,
    "dr_grpo": default,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "luspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gpg": gpg,
    "geo_mean": geo_mean,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "vespo": vespo,
}


def plain_average(rows, mode):
    if mode == "token":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode in ("seq", "seq-mean-token-mean"):
        return sequence([sequence(row) for row in rows])
    share = sequence([sum(row) for row in rows])
    return share / T if mode == "seq-mean-token-sum-norm" else share


def completions(draw, selected, new, weights):
    """The draw as lists, without padding; current log-probs from `new`."""
    for i in range(B):
        n = int(draw.mask[i].sum())
        of_row = lambda values: values[i, :n].tolist()  # noqa: B023, E731
        yield SimpleNamespace(
            old=of_row(draw.old),
            new=of_row(new),
            frozen=of_row(draw.new),
            a=of_row(draw.advantages),
            w=of_row(draw.weights) if weights else [1.0] * n,
            selected=of_row(selected),
        )


def plain_loss(name, mode, draw, selected, new, weights):
    rows = []
    for c in completions(draw, selected, new, weights):
        values = PLAIN[name](c)
        inside = name in ("geo_mean", "vespo")
        rows.append(values if inside else [v * w for v, w in zip(values, c.w, strict=True)])
    return plain_average(rows, mode)


SELECTED = torch.rand(B, T, generator=torch.Generator().manual_seed(9)) < 0.3


@pytest.mark.parametrize("mode", AVERAGES)
@pytest.mark.parametrize("name", LOSSES)
def test_value_equals_plain_loops(name, mode):
    for weights in (False, True):
        draw = Draw.make(1)
        ours, _ = losses.policy_loss(
            name,
            draw.old,
            draw.new,
            draw.advantages,
            draw.mask,
            loss_avg_mode=mode,
            weights=draw.weights if weights else None,
            selected=SELECTED,
            **SETTINGS,
        )
        assert ours.item() == pytest.approx(plain_loss(name, mode, draw, SELECTED, draw.new, weights), rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_equals_central_differences_of_plain_loops(name):
    draw = Draw.make(2)
    new = draw.new.clone().requires_grad_()
    loss, _ = losses.policy_loss(
        name,
        draw.old,
        new,
        draw.advantages,
        draw.mask,
        weights=draw.weights,
        selected=SELECTED,
        **SETTINGS,
    )
    loss.backward()
    assert new.grad[draw.mask == 0].abs().max() == 0
    step, seen = 1e-5, 0
    for i, t in draw.mask.nonzero().tolist():
        sides = []
        for sign in (1, -1):
            moved = draw.new.clone()
            moved[i, t] += sign * step
            sides.append(plain_loss(name, "token", draw, SELECTED, moved, True))
        expected = (sides[0] - sides[1]) / (2 * step)
        assert new.grad[i, t].item() == pytest.approx(expected, rel=1e-6, abs=1e-9)
        seen += expected != 0
    assert seen > 20


def test_the_draw_meets_every_branch_of_the_clipped_losses():
    draw = Draw.make(1)
    # whole samples have become likelier or less likely, for the losses that look at their mean
    draw.new = draw.new * torch.tensor([0.3, 0.3, 1.0, 1.0, 2.0, 2.0, 0.6, 0.3])[:, None]
    arguments = (draw.old, draw.new, draw.advantages, draw.mask)
    shares = {}
    for name in LOSSES:
        _, metrics = losses.policy_loss(name, *arguments, selected=SELECTED, **SETTINGS)
        shares |= {(name, key): value.item() for key, value in metrics.items() if key.startswith(("pg_", "cov_"))}
    assert {name for name, _ in shares} == set(LOSSES) - {"sapo", "gpg", "vespo"}
    untouched = {key for key, share in shares.items() if not 0.02 < share < 0.98}
    assert not untouched


def test_metrics_are_means_over_tokens_and_entropy_follows_the_average():
    draw = Draw.make(3)
    for mode in AVERAGES:
        _, metrics = losses.policy_loss(
            "default", draw.old, draw.new, draw.advantages, draw.mask, loss_avg_mode=mode, **SETTINGS
        )
        rows = list(completions(draw, SELECTED, draw.new, False))
        kl = plain_average([[o - n for o, n in zip(c.old, c.new, strict=True)] for c in rows], "token")
        assert metrics["ppo_kl"].item() == pytest.approx(kl, rel=1e-9)
        of_mode = mode if mode in ("seq", "seq-mean-token-mean") else "token"
        entropy = plain_average([[-n for n in c.new] for c in rows], of_mode)
        assert metrics["entropy_loss"].item() == pytest.approx(entropy, rel=1e-9)
        assert set(metrics) == {"ppo_kl", "entropy_loss", "pg_clipfrac_higher", "pg_clipfrac_lower"}


@pytest.mark.parametrize("name", LOSSES)
def test_equal_log_probs_give_ratio_one_and_the_plain_policy_gradient(name):
    draw = Draw.make(4)
    draw.advantages = draw.advantages[:, :1].expand(B, T).contiguous()  # GMPO and GSPO: one advantage per sequence
    new = draw.old.clone().requires_grad_()
    nothing = torch.zeros(B, T, dtype=torch.bool)
    # clip_ratio_low 0 as in CISPO's example: even the tightest clip leaves a ratio of exactly 1 alone
    settings = {**SETTINGS, "clip_ratio_low": 0.0}
    loss, metrics = losses.policy_loss(
        name, draw.old, new, draw.advantages, draw.mask, loss_avg_mode="seq", selected=nothing, **settings
    )
    loss.backward()
    lengths = draw.mask.sum(-1, keepdim=True)
    torch.testing.assert_close(new.grad, -draw.advantages * draw.mask / lengths / B, rtol=1e-9, atol=1e-12)
    assert metrics.pop("ppo_kl").item() == 0.0
    assert {value.item() for key, value in metrics.items() if key.startswith(("pg_", "cov_"))} <= {0.0}
    if name in ("default", "dr_grpo", "gspo", "gspo_token", "luspo", "kl_cov", "clip_cov"):
        # a ratio of exactly 1, not of about 1
        plain = losses.average(-draw.advantages, draw.mask, "seq", Denominators.of(draw.mask))
        assert loss.item() == plain.item()


def test_open_sides():
    draw = Draw.make(5)
    draw.old = torch.where(torch.arange(T) % 3 == 0, draw.new - 2.0, draw.old)  # every third ratio is e^2
    arguments = (draw.old, draw.new, draw.advantages, draw.mask)
    ratio = (draw.new - draw.old).exp()
    open_below = {"clip_ratio_low": 1.0, "clip_ratio_high": 4.0, "clip_ratio_dual": None}  # TRL's CISPO, bound 5
    ours, metrics = losses.policy_loss("cispo", *arguments, **open_below)
    plain = -(draw.advantages * draw.new * ratio.clamp(max=5.0) * draw.mask).sum() / draw.mask.sum()
    assert ours.item() == pytest.approx(plain.item(), rel=1e-12)
    assert metrics["pg_clipfrac_lower"] == 0 and metrics["pg_clipfrac_higher"] > 0
    for name in ("default", "dppo_tv", "dppo_kl"):
        _, without = losses.policy_loss(name, *arguments, **{**SETTINGS, "clip_ratio_dual": None})
        assert without["pg_clipfrac_lower"] == 0
        _, with_bound = losses.policy_loss(name, *arguments, **SETTINGS)
        assert with_bound["pg_clipfrac_lower"] > 0


def test_extreme_log_ratios_stay_finite():
    draw = Draw.make(6)
    draw.old = draw.old.clone()
    draw.old[:, 0], draw.new[:, 0] = -500.0, -0.1
    draw.old[:, 1], draw.new[:, 1] = -0.1, -500.0
    for name in LOSSES:
        new = draw.new.float().requires_grad_()
        loss, _ = losses.policy_loss(
            name,
            draw.old.float(),
            new,
            draw.advantages.float(),
            draw.mask.float(),
            weights=draw.weights.float(),
            selected=SELECTED,
            **SETTINGS,
        )
        loss.backward()
        assert loss.isfinite() and new.grad.isfinite().all(), name


TRL_MEANS = {  # loss type of TRL 1.16 -> surrogate of one token's ratio, what the sum is divided by
    "grpo": (default, "seq"),
    "bnpo": (default, "token"),
    "dapo": (default, "token"),
    "dr_grpo": (default, "seq-mean-token-sum-norm"),
    "cispo": (cispo, "token"),
    "sapo": (sapo, "seq"),
    "luspo": (gspo, "seq-mean-token-sum"),
    "vespo": (vespo, "token"),
}


def test_names_of_trl():
    assert {name: (PLAIN[ours], mode) for name, (ours, mode) in TRL_LOSSES.items()} == TRL_MEANS
    for name, pair in FIXED_AVERAGES.items():
        assert resolve_loss(name) == resolve_loss(name, pair[1]) == pair
        with pytest.raises(ValueError, match="loss_avg_mode"):
            resolve_loss(name, "seq" if pair[1] == "token" else "token")
    for name in set(LOSSES) - set(FIXED_AVERAGES):
        assert resolve_loss(name) == (name, "token")
        assert resolve_loss(name, "seq") == (name, "seq")


def test_refusals():
    draw = Draw.make()
    arguments = (draw.old, draw.new, draw.advantages, draw.mask)
    with pytest.raises(KeyError):
        resolve_loss("nonsense")
    with pytest.raises(KeyError):
        losses.policy_loss("nonsense", *arguments, **SETTINGS)
    with pytest.raises(KeyError, match="loss_avg_mode"):
        losses.policy_loss("default", *arguments, loss_avg_mode="mean", **SETTINGS)
    for name in ("clip_cov", "kl_cov"):
        with pytest.raises(ValueError, match=r"selection\.select"):
            losses.policy_loss(name, *arguments, **SETTINGS)
    with pytest.raises(ValueError, match="longest"):
        losses.average(draw.new, draw.mask, "seq-mean-token-sum-norm", Denominators(10, 8))
