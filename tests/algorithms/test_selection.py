"""clip_cov and kl_cov choose the tokens that their paper says, by plain loops."""

import pytest
import torch

from grpo_vlm.algorithms.selection import select
from tests.algorithms.draws import B, Draw, T

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}


def covariances(draw):
    """{(sample, token): covariance} and those of the tokens that PPO's clip does not act on."""
    tokens = [tuple(place) for place in draw.mask.nonzero().tolist()]
    a = {place: draw.advantages[place].item() for place in tokens}
    p = {place: draw.new[place].item() for place in tokens}
    mean_a, mean_p = (sum(values.values()) / len(tokens) for values in (a, p))
    everything = {place: (a[place] - mean_a) * (p[place] - mean_p) for place in tokens}
    ratios = {place: (draw.new[place] - draw.old[place]).exp().item() for place in tokens}
    free = {k: v for k, v in everything.items() if not (ratios[k] > 1.3 if a[k] > 0 else ratios[k] < 0.8)}
    return everything, free


def chosen(name, draw, seed=0, **options):
    mask = select(
        name, draw.old, draw.new, draw.advantages, draw.mask, sample_keys=range(B), seed=seed, **CLIPS, **options
    )
    return {tuple(place) for place in mask.nonzero().tolist()}


@pytest.mark.parametrize("ratio, count", [(2e-4, 1), (0.1, None), (0.5, None), (1.0, None)])
def test_kl_cov_takes_the_largest_covariances(ratio, count):
    draw = Draw.make(11)
    everything, _ = covariances(draw)
    count = count or int(ratio * len(everything))
    assert chosen("kl_cov", draw, kl_cov_ratio=ratio) == set(sorted(everything, key=everything.get)[-count:])


def test_clip_cov_draws_among_the_tokens_between_its_bounds():
    draw = Draw.make(11)
    everything, free = covariances(draw)
    eligible = {place for place, value in free.items() if 0.1 < value < 1.5}
    between = {place for place, value in everything.items() if 0.1 < value < 1.5}
    assert len(between) > len(eligible) > 6  # the draw has tokens that the clip acts on
    bounds = {"clip_cov_lb": 0.1, "clip_cov_ub": 1.5}
    assert chosen("clip_cov", draw, clip_cov_ratio=1.0, **bounds) == eligible
    few = int(0.1 * len(everything))
    draws = [chosen("clip_cov", draw, seed=seed, clip_cov_ratio=0.1, **bounds) for seed in range(200)]
    assert {len(places) for places in draws} == {few} and all(places <= eligible for places in draws)
    counts = [sum(place in places for places in draws) for place in eligible]
    expected = 200 * few / len(eligible)
    assert 0.5 * expected < min(counts) and max(counts) < 1.5 * expected  # 1.5 is beyond four standard deviations
    assert chosen("clip_cov", draw, clip_cov_lb=1e3, clip_cov_ub=1e4) == set()


def test_ties_are_broken_to_the_exact_number():
    draw = Draw.make(12)
    draw.advantages = torch.zeros(B, T, dtype=torch.float64)
    tokens = int(draw.mask.sum())
    assert len(chosen("kl_cov", draw, kl_cov_ratio=0.3)) == int(0.3 * tokens)
    assert chosen("kl_cov", draw, kl_cov_ratio=0.3) != chosen("kl_cov", draw, seed=1, kl_cov_ratio=0.3)


def test_other_losses_select_nothing():
    draw = Draw.make()
    with pytest.raises(KeyError, match="selects no tokens"):
        chosen("default", draw)
