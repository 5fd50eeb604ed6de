"""Advantage estimators: token-level rewards [B, T] in, advantages [B, T] out.

`estimate` is the only entry. It is called on the whole rollout batch of a rank: groups are never split over ranks, and
what is taken over the whole batch (whitening, GPG's share of rewarded samples) is summed over the ranks through
`Ranks`. The result therefore depends neither on the number of ranks nor on how the batch is later cut into updates.
Sums are taken in float64, in which the mean of equal rewards is exact: a group of equal rewards has advantages of
exactly zero wherever its formula says so.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_vlm.algorithms.ranks import ALONE, Ranks

EPSILON = 1e-6  # keeps the division finite for a group without variance, as EasyR1 and verl do
WHITENING_EPSILON = 1e-8  # the same for the variance of a whole batch

REFUSED = {
    "gae": "it needs a value model (critic), which this trainer does not have; every other estimator takes its "
    "baseline from the group or the batch: reinforce_plus_plus_baseline, grpo and rloo are the nearest"
}


@dataclass(frozen=True)
class Rewards:
    """The rewards of a rollout batch, float64; samples without a score are masked out of everything.

    per_token: [B, T], zero outside `mask`. mask: [B, T]. scored: [B], 1 or 0. groups: LongTensor[B], from 0.
    """

    per_token: Tensor
    mask: Tensor
    scored: Tensor
    groups: Tensor
    ranks: Ranks

    @property
    def scores(self) -> Tensor:
        """[B], a sample's rewards summed over its tokens."""
        return self.per_token.sum(-1)

    def group_sum(self, values: Tensor) -> Tensor:
        """[B] -> [B]: to each sample the sum over the scored samples of its group."""
        sums = torch.zeros(len(values), dtype=values.dtype, device=values.device)  # no more groups than samples
        return sums.index_add(0, self.groups, values * self.scored)[self.groups]

    @property
    def group_size(self) -> Tensor:
        """[B], scored samples in a sample's group, at least 1."""
        return self.group_sum(torch.ones_like(self.scored)).clamp(min=1)

    @property
    def alone(self) -> Tensor:
        """[B], whether a sample is the only one of its group; one whose others were not scored is not."""
        sizes = torch.bincount(self.groups, minlength=len(self.groups))
        return sizes[self.groups] == 1

    def less_baseline(self, values: Tensor, baseline: Tensor) -> Tensor:
        """[B] less the group's baseline; a group of one keeps its value, as in verl. The only scored sample of a
        larger group has nothing to be compared with: 0."""
        return torch.where(self.alone, values, values - baseline)

    def centred(self, values: Tensor) -> Tensor:
        """[B] less the mean of the group (see `less_baseline`)."""
        return self.less_baseline(values, self.group_sum(values) / self.group_size)

    def normalised(self, values: Tensor, normalize_std: bool) -> Tensor:
        """`centred`, divided by the group's unbiased standard deviation (1 for a group of one)."""
        centred, count = self.centred(values), self.group_size
        if not normalize_std:
            return centred
        variance = self.group_sum(centred.square()) / (count - 1).clamp(min=1)
        std = torch.where(count > 1, variance.sqrt(), torch.ones_like(variance))
        return centred / (std + EPSILON)

    def whitened(self, values: Tensor) -> Tensor:
        """[B, T] less the mean over all completion tokens of all ranks, divided by their standard deviation
        (unbiased variance + 1e-8)."""
        total, count = self.ranks.sum(torch.stack([(values * self.mask).sum(), self.mask.sum()]))
        centred = values - total / count.clamp(min=1)
        squares = self.ranks.sum((centred.square() * self.mask).sum())
        return centred * (squares / (count - 1).clamp(min=1) + WHITENING_EPSILON).rsqrt()

    def of_tokens(self, values: Tensor) -> Tensor:
        """[B] -> [B, T], the sample's value at each of its tokens."""
        return values[:, None] * self.mask

    def returns(self, gamma: float) -> Tensor:
        """[B, T]: G_t = r_t + gamma G_{t+1}."""
        if gamma == 1.0:
            return self.per_token.flip(-1).cumsum(-1).flip(-1)
        columns, following = [], torch.zeros_like(self.scored)
        for column in reversed(self.per_token.unbind(-1)):
            following = column + gamma * following
            columns.append(following)
        return torch.stack(columns[::-1], -1)


def group_index(group_ids: Sequence[Hashable]) -> Tensor:
    """Numbers the groups in order of first appearance: LongTensor[B]."""
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in group_ids], dtype=torch.long)


def grpo(rewards: Rewards, *, normalize_std: bool = True) -> Tensor:
    """(r - group mean) / (group std + 1e-6), std unbiased: GRPO, arXiv 2402.03300, eq. 3.

    `normalize_std=False` leaves the division out (Dr.GRPO, arXiv 2503.20783)."""
    return rewards.of_tokens(rewards.normalised(rewards.scores, normalize_std))


def grpo_passk(rewards: Rewards, *, normalize_std: bool = True) -> Tensor:
    """(best - second best) / (group std + 1e-6) for the best sample of a group, 0 for all others: Pass@k training,
    arXiv 2503.19595. A group with one scored sample has no second best: 0."""
    scores, groups = rewards.scores, rewards.groups
    ranked = scores.masked_fill(rewards.scored == 0, -torch.inf)
    order = ranked.argsort(descending=True, stable=True)
    order = order[groups[order].argsort(stable=True)]  # by group, the best first
    sizes = torch.bincount(groups)
    starts = (sizes.cumsum(0) - sizes)[sizes > 1]
    first, second = order[starts], order[starts + 1]
    lead = torch.where(rewards.scored[second] > 0, scores[first] - scores[second], 0.0)
    if normalize_std:
        centred = rewards.centred(scores)
        variance = rewards.group_sum(centred.square()) / (rewards.group_size - 1).clamp(min=1)
        lead = lead / (variance.sqrt()[first] + EPSILON)
    return rewards.of_tokens(torch.zeros_like(scores).index_copy(0, first, lead))


def rloo(rewards: Rewards) -> Tensor:
    """r - mean of the group's others: REINFORCE leave-one-out, arXiv 2402.14740. A group of one keeps its reward."""
    count = rewards.group_size
    return rewards.of_tokens(rewards.centred(rewards.scores) * count / (count - 1).clamp(min=1))


def reinforce_plus_plus(rewards: Rewards, *, gamma: float = 1.0) -> Tensor:
    """The return G_t = r_t + gamma G_{t+1}, whitened over all tokens of the batch: arXiv 2501.03262."""
    return rewards.whitened(rewards.returns(gamma)) * rewards.mask


def reinforce_plus_plus_baseline(rewards: Rewards) -> Tensor:
    """r - group mean, whitened over all tokens of the batch: the variant with baseline of arXiv 2501.03262."""
    return rewards.whitened(rewards.of_tokens(rewards.centred(rewards.scores))) * rewards.mask


def remax(rewards: Rewards, *, baselines: Tensor) -> Tensor:
    """The return (without discount) less the reward of a greedy completion: ReMax, arXiv 2310.10505.

    `baselines` [B]: to each sample the reward of its prompt's greedy completion; a sample whose greedy completion has
    no score must be marked as not scored."""
    baselines = baselines.to(rewards.scored).where(rewards.scored > 0, 0.0)
    return (rewards.returns(1.0) - baselines[:, None]) * rewards.mask


def opo(rewards: Rewards) -> Tensor:
    """r - sum(length r) / sum(length) over the group: the optimal baseline of arXiv 2505.23585. A group of one keeps
    its reward, as in verl."""
    scores, lengths = rewards.scores, rewards.mask.sum(-1)
    baseline = rewards.group_sum(lengths * scores) / rewards.group_sum(lengths).clamp(min=1)
    return rewards.of_tokens(rewards.less_baseline(scores, baseline))


def gpg(rewards: Rewards, *, f_norm: float = 1.0) -> Tensor:
    """alpha (r - group mean) / f_norm with alpha = samples / samples whose reward is not zero, over the whole batch:
    GPG, arXiv 2504.02546, in verl's form."""
    scores = rewards.scores
    counts = torch.stack([rewards.scored.sum(), (scores.ne(0) * rewards.scored).sum()])
    samples, rewarded = rewards.ranks.sum(counts)
    return rewards.of_tokens(samples / rewarded.clamp(min=1) * rewards.centred(scores) / f_norm)


def gdpo(
    rewards: Rewards,
    *,
    components: Tensor,
    weights: Sequence[float] | None = None,
    normalize_std: bool = True,
) -> Tensor:
    """Each reward normalised in its group as GRPO does, their weighted sum whitened over all tokens of the batch:
    GDPO, arXiv 2601.05242.

    `components` [B, K]: the single rewards; `weights`: K numbers, all 1 by default. The token-level rewards, and with
    them a KL penalty in the reward, are not used."""
    components = components.to(rewards.scored).where(rewards.scored[:, None] > 0, 0.0)
    weights = [1.0] * components.shape[1] if weights is None else weights
    parts = [
        weight * rewards.normalised(component, normalize_std)
        for weight, component in zip(weights, components.unbind(-1), strict=True)
    ]
    return rewards.whitened(rewards.of_tokens(torch.stack(parts).sum(0))) * rewards.mask


ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
}
OWN_RETURNS = frozenset({"reinforce_plus_plus", "remax"})


def estimate(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Sequence[Hashable],
    *,
    scored: Tensor | None = None,
    ranks: Ranks = ALONE,
    **options,
) -> Tensor:
    """Advantages [B, T] of this rank's whole rollout batch, zero outside `response_mask`.

    Args:
        name: key of `ESTIMATORS`.
        token_level_rewards: [B, T]; a sample's reward is their sum (the score at the last token, less a KL penalty
        per token where that is used).
        response_mask: [B, T], 1 at completion tokens.
        group_ids: B hashable ids; samples of one prompt share theirs.
        scored: BoolTensor[B] or None for all; a sample that is not scored is in no statistic and gets advantage 0.
        ranks: collectives for what is taken over the whole batch.
        options: the estimator's own keywords.

    Raises:
        KeyError: unknown name.
        NotImplementedError: gae, with the reason.
    """
    if name in REFUSED:
        raise NotImplementedError(f"advantage estimator {name}: {REFUSED[name]}")
    live = torch.ones_like(response_mask[:, 0]) if scored is None else scored
    rewards = _rewards(token_level_rewards, response_mask, live, group_index(group_ids), ranks)
    return ESTIMATORS[name](rewards, **options).to(token_level_rewards)


def returns(
    name: str, token_level_rewards: Tensor, response_mask: Tensor, *, gamma: float = 1.0, scored: Tensor | None = None
) -> Tensor | None:
    """What EasyR1 and verl log as critic/returns [B, T] beside the advantages of an estimator: for reinforce_plus_plus
    and remax the sum of the rewards from a token on (discounted by gamma for the former); None for all others, whose
    returns are their advantages. Arguments as of `estimate`."""
    if name not in OWN_RETURNS:
        return None
    live = torch.ones_like(response_mask[:, 0]) if scored is None else scored
    rewards = _rewards(token_level_rewards, response_mask, live, torch.arange(len(live)), ALONE)
    return (rewards.returns(gamma if name == "reinforce_plus_plus" else 1.0) * rewards.mask).to(token_level_rewards)


def _rewards(
    token_level_rewards: Tensor, response_mask: Tensor, scored: Tensor, groups: Tensor, ranks: Ranks
) -> Rewards:
    live = scored.to(response_mask.device, torch.float64)
    mask = response_mask.double() * live[:, None]
    per_token = torch.where(mask > 0, token_level_rewards.double(), 0.0)
    return Rewards(per_token, mask, live, groups.to(mask.device), ranks)
