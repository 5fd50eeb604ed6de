"""Every estimator against its formula in plain Python; samples without a score; ranks, order and numbers of groups."""

import math

import pytest
import torch

from grpo_vlm.algorithms import advantages
from grpo_vlm.algorithms.advantages import ESTIMATORS
from tests.algorithms.draws import GROUPS, B, T, on_two_ranks

LENGTHS = [12, 5, 1, 7, 3, 12, 8, 2]
MASK = torch.tensor([[float(t < length) for t in range(T)] for length in LENGTHS], dtype=torch.float64)
LEFT_OUT = {
    "all scored": [],
    "one of a group and a whole group not": [1, 3],
    "all but one of a group not": [0, 2],
}


KINDS = ("penalised", "sparse", "negative")


def draw(kind="penalised"):
    """Token-level rewards: a score at the last token, less a penalty at each token or alone, and garbage behind the
    end."""
    generator = torch.Generator().manual_seed(5)
    rewards = torch.randn(B, T, generator=generator, dtype=torch.float64) * (0.01 if kind == "penalised" else 0)
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] += [1, 0, 0, 1, 0.5, 1, 0, 1][row] - 2 * (kind == "negative")
    return rewards + (1 - MASK) * 9.0


COMPONENTS = torch.rand(B, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
BASELINES = torch.rand(B, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def mean(values):
    return sum(values) / len(values)


def std(values):
    middle = mean(values)
    return math.sqrt(sum((v - middle) ** 2 for v in values) / (len(values) - 1))


class Plain:
    """The scored samples as lists; each method returns {(sample, token): advantage}."""

    def __init__(self, rewards, rows):
        self.rewards = {i: [rewards[i, t].item() for t in range(LENGTHS[i])] for i in rows}
        self.scores = {i: sum(values) for i, values in self.rewards.items()}

    def group(self, i):
        return [j for j in self.rewards if GROUPS[j] == GROUPS[i]]

    def spread(self, of_sample):
        return {(i, t): of_sample(i) for i in self.rewards for t in range(LENGTHS[i])}

    def whiten(self, values):
        middle = mean(list(values.values()))
        scale = math.sqrt(std(list(values.values())) ** 2 + 1e-8)
        return {key: (value - middle) / scale for key, value in values.items()}

    def standard(self, i, scores, normalize_std=True):
        scores_of_group = [scores[j] for j in self.group(i)]
        if self.lone_survivor(i):
            return 0.0
        if len(scores_of_group) == 1:
            return scores[i] / (1 + 1e-6) if normalize_std else scores[i]
        centred = scores[i] - mean(scores_of_group)
        return centred / (std(scores_of_group) + 1e-6) if normalize_std else centred

    def lone_survivor(self, i):
        """The only scored one of several."""
        return len(self.group(i)) == 1 < sum(group == GROUPS[i] for group in GROUPS)

    def baseline(self, i, value):
        if self.lone_survivor(i):
            return 0.0
        return self.scores[i] - (value() if len(self.group(i)) > 1 else 0.0)

    def grpo(self, normalize_std=True):
        return self.spread(lambda i: self.standard(i, self.scores, normalize_std))

    def grpo_passk(self, normalize_std=True):
        def of_sample(i):
            group = [self.scores[j] for j in self.group(i)]
            if len(group) == 1 or self.scores[i] < max(group):
                return 0.0
            best, second = sorted(group)[-1:-3:-1]
            return (best - second) / (std(group) + 1e-6 if normalize_std else 1.0)

        return self.spread(of_sample)

    def rloo(self):
        return self.spread(lambda i: self.baseline(i, lambda: mean([self.scores[j] for j in self.group(i) if j != i])))

    def reinforce_plus_plus(self, gamma=1.0):
        returns = {}
        for i, rewards in self.rewards.items():
            for t in range(len(rewards)):
                returns[i, t] = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards)))
        return self.whiten(returns)

    def reinforce_plus_plus_baseline(self):
        return self.whiten(self.grpo(normalize_std=False))

    def remax(self, baselines):
        return {(i, t): sum(r[t:]) - baselines[i].item() for i, r in self.rewards.items() for t in range(len(r))}

    def opo(self):
        def of_group(i):
            group = self.group(i)
            return sum(LENGTHS[j] * self.scores[j] for j in group) / sum(LENGTHS[j] for j in group)

        return self.spread(lambda i: self.baseline(i, lambda: of_group(i)))

    def gpg(self, f_norm=1.0):
        rewarded = sum(1 for score in self.scores.values() if score != 0)
        centred = self.grpo(normalize_std=False)
        return {key: len(self.scores) / rewarded * value / f_norm for key, value in centred.items()}

    def gdpo(self, components, weights=(1.0, 1.0), normalize_std=True):
        def of_sample(i):
            columns = components.T.tolist()
            return sum(w * self.standard(i, c, normalize_std) for w, c in zip(weights, columns, strict=True))

        return self.whiten(self.spread(of_sample))


OPTIONS = {
    "grpo": [{}, {"normalize_std": False}],
    "grpo_passk": [{}, {"normalize_std": False}],
    "rloo": [{}],
    "reinforce_plus_plus": [{}, {"gamma": 0.9}],
    "reinforce_plus_plus_baseline": [{}],
    "remax": [{"baselines": BASELINES}],
    "opo": [{}],
    "gpg": [{}, {"f_norm": 2.0}],
    "gdpo": [
        {"components": COMPONENTS},
        {"components": COMPONENTS, "weights": (0.9, 0.1), "normalize_std": False},
    ],
}
CASES = [(name, options) for name in ESTIMATORS for options in OPTIONS[name]]
of_case = pytest.mark.parametrize("name, options", CASES, ids=[f"{n}-{'-'.join(o)}" for n, o in CASES])


def rows_of(options, rows):
    return {k: v[rows] if isinstance(v, torch.Tensor) else v for k, v in options.items()}


@of_case
@pytest.mark.parametrize("left_out", LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("kind", KINDS)
def test_estimator_equals_plain_loops(name, options, left_out, kind):
    rewards = draw(kind)
    scored = torch.tensor([row not in left_out for row in range(B)])
    expected = torch.zeros(B, T, dtype=torch.float64)
    for (row, t), value in getattr(Plain(rewards, scored.nonzero()[:, 0].tolist()), name)(**options).items():
        expected[row, t] = value
    rewards[~scored] = torch.nan  # nobody may read the rewards of a sample without one
    options = {k: torch.where(scored.view(-1, *[1] * (v.dim() - 1)), v, torch.nan) if torch.is_tensor(v) else v
               for k, v in options.items()}  # fmt: skip
    ours = advantages.estimate(name, rewards, MASK, GROUPS, scored=scored, **options)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    in_float32 = advantages.estimate(name, rewards.float(), MASK.float(), GROUPS, scored=scored, **options)
    assert in_float32.dtype == torch.float32
    torch.testing.assert_close(in_float32, expected.float(), rtol=1e-4, atol=1e-4)


@of_case
@pytest.mark.parametrize("kind", KINDS)
def test_estimator_does_not_depend_on_order_or_ranks(name, options, kind):
    rewards = draw(kind)
    plain = advantages.estimate(name, rewards, MASK, GROUPS, **options)
    order = [7, 2, 0, 5, 4, 6, 1, 3]
    permuted = advantages.estimate(
        name, rewards[order], MASK[order], [GROUPS[i] for i in order], **rows_of(options, order)
    )
    torch.testing.assert_close(permuted, plain[order], rtol=0, atol=1e-9)
    parts = [[i for i in range(B) if GROUPS[i] in "ac"], [i for i in range(B) if GROUPS[i] == "b"]]

    def of_rank(rank, ranks):
        rows = parts[rank]
        groups = [GROUPS[i] for i in rows]
        return advantages.estimate(name, rewards[rows], MASK[rows], groups, ranks=ranks, **rows_of(options, rows))

    for rows, ours in zip(parts, on_two_ranks(of_rank), strict=True):
        torch.testing.assert_close(ours, plain[rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "rloo", "opo", "gpg"])
def test_equal_rewards_give_exactly_zero(name):
    rewards = torch.zeros(8, 3)
    rewards[:, 2] = torch.tensor([0.1] * 5 + [0.9 * 0.7 + 0.1] * 3)
    ours = advantages.estimate(name, rewards, torch.ones(8, 3), [0] * 5 + [1] * 3)
    assert ours.tolist() == [[0.0] * 3] * 8


def test_whitened_estimators_have_mean_zero_and_variance_one_over_tokens():
    for name, options in CASES:
        if name.startswith("reinforce") or name == "gdpo":
            ours = advantages.estimate(name, draw(), MASK, GROUPS, **options)[MASK > 0]
            assert ours.mean().item() == pytest.approx(0.0, abs=1e-12)
            assert ours.std().item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_returns_are_sums_of_what_follows_or_the_advantages(name):
    rewards, gamma = draw(), 0.9
    scored = torch.tensor([row != 4 for row in range(B)])
    rewards[4] = torch.nan
    ours = advantages.returns(name, rewards, MASK, gamma=gamma, scored=scored)
    if name not in ("reinforce_plus_plus", "remax"):
        assert ours is None
        return
    discount = gamma if name == "reinforce_plus_plus" else 1.0
    for row, length in enumerate(LENGTHS):
        for t in range(T):
            following = [discount ** (k - t) * rewards[row, k].item() for k in range(t, length)]
            expected = sum(following) if row != 4 else 0.0
            assert ours[row, t].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_refusals():
    with pytest.raises(NotImplementedError, match="value model"):
        advantages.estimate("gae", draw(), MASK, GROUPS)
    with pytest.raises(KeyError):
        advantages.estimate("nonsense", draw(), MASK, GROUPS)
    with pytest.raises(TypeError, match="baselines"):
        advantages.estimate("remax", draw(), MASK, GROUPS)
    with pytest.raises(ValueError):
        advantages.estimate("gdpo", draw(), MASK, GROUPS, components=COMPONENTS, weights=[1.0])
