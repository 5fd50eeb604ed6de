"""Importance weights of the sampler by plain loops, on one rank and two."""

import math
from itertools import chain

import pytest
import torch

from grpo_vlm.algorithms.mismatch import LEVELS, MODES, correction
from tests.algorithms.draws import B, Draw, on_two_ranks

BOUNDS = {"low": 0.6, "high": 1.4}


def log_ratios(draw):
    return [(draw.old - draw.ref)[i, : int(draw.mask[i].sum())].tolist() for i in range(B)]


def plain(draw, level, mode, low, high):
    """Rows of raw and used weights."""
    raw, used = [], []
    for row in log_ratios(draw):
        logs = [sum(row) / len(row)] * len(row) if level == "sequence" else row
        raw.append([math.exp(x) for x in logs])
        inside = lambda w: low <= w <= high  # noqa: E731
        clamped = [min(max(w, low), high) for w in raw[-1]]
        used.append(clamped if mode == "truncate" else [w if inside(w) else 0.0 for w in raw[-1]])
    return raw, used


@pytest.mark.parametrize("bounds", [BOUNDS, {"low": 0.0, "high": 1.4}], ids=["both", "above"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_metrics_equal_plain_loops(level, mode, bounds):
    draw = Draw.make(3)
    # a sampler whose tokens and sequences lie on both sides of the bounds
    draw.ref = draw.old - 0.3 * (draw.ref + 0.8) - torch.linspace(-0.8, 0.8, B)[:, None]
    sampler = torch.where(draw.mask > 0, draw.ref, torch.nan)
    ours = correction(draw.old, sampler, draw.mask, level=level, mode=mode, **bounds)
    raw, used = plain(draw, level, mode, **bounds)
    for i, row in enumerate(used):
        assert ours.weights[i, : len(row)].tolist() == pytest.approx(row, rel=1e-9)
        assert ours.weights[i, len(row) :].abs().sum() == 0
    flat, before, tokens = (list(chain.from_iterable(rows)) for rows in (used, raw, log_ratios(draw)))
    expected = {
        "weight/mean": sum(flat) / len(flat),
        "weight/max": max(flat),
        "weight/high": sum(w > bounds["high"] for w in before) / len(flat),
        "weight/low": sum(w < bounds["low"] for w in before) / len(flat),
        "weight/ess": sum(flat) ** 2 / (len(flat) * sum(w * w for w in flat)),
        "weight/kl": sum(math.exp(x) - 1 - x for x in tokens) / len(tokens),
    }
    metrics = {name: value.item() for name, value in ours.metrics.items()}
    assert metrics == pytest.approx(expected, rel=1e-9)
    assert metrics["weight/high"] > 0 and (metrics["weight/low"] > 0 or bounds["low"] == 0)
    parts = [[0, 3, 5], [1, 2, 4, 6, 7]]
    options = {"level": level, "mode": mode, **bounds}
    of_ranks = on_two_ranks(
        lambda rank, ranks: correction(
            draw.old[parts[rank]], sampler[parts[rank]], draw.mask[parts[rank]], ranks=ranks, **options
        )
    )
    for rows, of_rank in zip(parts, of_ranks, strict=True):
        assert torch.equal(of_rank.weights, ours.weights[rows])
        assert {k: v.item() for k, v in of_rank.metrics.items()} == pytest.approx(metrics, rel=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_an_exact_sampler_gives_weights_of_one(level):
    draw = Draw.make(4)
    ours = correction(draw.old.float(), draw.old.float(), draw.mask.float(), level=level)
    assert torch.equal(ours.weights, draw.mask.float()) and not ours.weights.requires_grad
    names = ("mean", "max", "high", "low", "ess", "kl")
    assert [ours.metrics[f"weight/{name}"].item() for name in names] == [1.0, 1.0, 0.0, 0.0, 1.0, 0.0]


def test_a_long_sequence_keeps_a_weight_within_the_bounds():
    old = torch.full((1, 1000), -1.0)
    ours = correction(old, old - 0.01, torch.ones(1, 1000), level="sequence")
    assert ours.weights[0, 0].item() == pytest.approx(math.exp(0.01), rel=1e-6)  # the product would be e^10
    assert ours.metrics["weight/high"] == 0


def test_unknown_names_are_errors():
    draw = Draw.make()
    for wrong in ({"level": "batch"}, {"mode": "drop"}):
        with pytest.raises(KeyError, match="known: token, sequence; truncate, mask"):
            correction(draw.old, draw.ref, draw.mask, **wrong)
