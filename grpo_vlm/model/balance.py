"""Which item goes into which bin so that the heaviest bin is light: groups over ranks, groups over rows.

Pure Python and deterministic: the same numbers give the same bins on every rank.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Bins = list[list[int]]  # item numbers of each bin
TOLERANCE = 1e-9  # relative gain below which an exchange is not worth making


def assign(costs: Sequence[float], bins: int) -> Bins:
    """Item numbers for each of `bins` bins, ascending in each; a bin is empty when there are fewer items.

    Karmarkar and Karp's largest differencing method (1982), then moves and swaps out of the heaviest bin.
    """
    return _tidy(_improve(_largest_difference(costs, bins), costs, lambda items: True))


@dataclass(frozen=True)
class Limits:
    """What a bin may hold: `tokens` in all and `count` in all."""

    tokens: int
    count: int | None = None

    def test(self, tokens: Sequence[int], counts: Sequence[int]) -> Callable[[Sequence[int]], bool]:
        """Says of a list of items whether one bin can hold them."""

        def fits(items: Sequence[int]) -> bool:
            few = self.count is None or sum(counts[i] for i in items) <= self.count
            return few and sum(tokens[i] for i in items) <= self.tokens

        return fits


def fill(
    tokens: Sequence[int],
    limits: Limits,
    *,
    costs: Sequence[float] | None = None,
    counts: Sequence[int] | None = None,
    bins: int | None = None,
) -> Bins:
    """The fewest bins found that respect the limits, or exactly `bins` of them, balanced by cost.

    costs: balanced (the tokens when absent). counts: what an item counts against limits.count (1 each when absent).
    Raises ValueError when an item alone is over a limit or when `bins` are too few.
    """
    costs = tokens if costs is None else costs
    counts = [1] * len(tokens) if counts is None else counts
    fits = limits.test(tokens, counts)
    for item in range(len(costs)):
        if not fits([item]):
            raise ValueError(
                f"item {item} with {tokens[item]} tokens and count {counts[item]} is over the limits {limits}"
            )
    if not costs:
        return [[] for _ in range(bins or 0)]
    fewest = max(1, -(-sum(tokens) // max(limits.tokens, 1)))  # without room there are items without tokens alone
    if limits.count is not None:
        fewest = max(fewest, -(-sum(counts) // limits.count))
    found = _first_fit(tokens, fits)
    for number in range(fewest, len(found)):
        candidate = _balanced(costs, tokens, number, fits)
        if candidate is not None:
            found = candidate
            break
    wanted = len(found) if bins is None else bins
    if wanted < len(found):
        raise ValueError(f"{wanted} bins asked for, {len(found)} needed to stay within {limits}")
    found = found + [[] for _ in range(wanted - len(found))]
    candidates = [_improve(found, costs, fits)]
    balanced = _balanced(costs, tokens, wanted, fits)
    if balanced is not None:
        candidates.append(balanced)
    return _tidy(min(candidates, key=lambda candidate: _heaviest(candidate, costs)))


def first_fit(tokens: Sequence[int], limits: Limits) -> Bins:
    """Bins filled one after the other, longest items first; each item counts 1 against limits.count."""
    return _tidy(_first_fit(tokens, limits.test(tokens, [1] * len(tokens))))


def _balanced(
    costs: Sequence[float], tokens: Sequence[int], bins: int, fits: Callable[[Sequence[int]], bool]
) -> Bins | None:
    """Exactly `bins` bins that fit, or None when neither costs nor tokens, differenced, lead to such."""
    for weights in (costs, tokens):
        candidate = _largest_difference(weights, bins)
        if all(fits(items) for items in candidate):
            return _improve(candidate, costs, fits)
    return None


def _largest_difference(costs: Sequence[float], bins: int) -> Bins:
    """Repeatedly joins the two partial solutions with the widest spread, the heaviest bin of one to the lightest of
    the other.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        parts = [(0.0, []) for _ in range(bins - 1)] + [(float(cost), [item])]
        heap.append((-float(cost), item, parts))
    heapq.heapify(heap)
    ties = len(heap)  # no two entries compare their parts
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = [
            (light[0] + heavy[0], light[1] + heavy[1]) for light, heavy in zip(one, reversed(other), strict=True)
        ]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], ties, joined))
        ties += 1
    return [items for _, items in heap[0][2]] if heap else [[] for _ in range(bins)]


def _first_fit(tokens: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> Bins:
    """First-fit decreasing by tokens: always feasible, at most 11/9 of the fewest bins plus one."""
    bins: Bins = []
    for item in sorted(range(len(tokens)), key=lambda i: -tokens[i]):
        for items in bins:
            if fits([*items, item]):
                items.append(item)
                break
        else:
            bins.append([item])
    return bins


def _improve(bins: Bins, costs: Sequence[float], fits: Callable[[Sequence[int]], bool]) -> Bins:
    """Moves or swaps items out of the heaviest bin for as long as that makes the pair of bins lighter."""
    bins = [list(items) for items in bins]
    weights = [sum(costs[i] for i in items) for items in bins]
    for _ in range(2 * len(costs)):
        heaviest = max(range(len(bins)), key=weights.__getitem__)
        best: tuple[float, int, list[int], list[int]] | None = None
        for other in range(len(bins)):
            gap = weights[heaviest] - weights[other]
            if gap <= TOLERANCE * weights[heaviest]:
                continue
            for item in bins[heaviest]:
                for back in (None, *bins[other]):
                    moved = costs[item] - (0.0 if back is None else costs[back])
                    rest = abs(gap - 2 * moved)  # the pair's gap afterwards
                    if rest >= gap * (1 - TOLERANCE) or (best is not None and rest - gap >= best[0]):
                        continue
                    here = [i for i in bins[heaviest] if i != item] + ([] if back is None else [back])
                    there = [i for i in bins[other] if i != back] + [item]
                    if fits(here) and fits(there):
                        best = (rest - gap, other, here, there)
        if best is None:
            break
        _, other, bins[heaviest], bins[other] = best
        for changed in (heaviest, other):
            weights[changed] = sum(costs[i] for i in bins[changed])
    return bins


def _heaviest(bins: Bins, costs: Sequence[float]) -> float:
    return max(sum(costs[i] for i in items) for items in bins)


def _tidy(bins: Bins) -> Bins:
    return [sorted(items) for items in bins]
