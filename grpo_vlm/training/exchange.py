"""Groups move between ranks so that all ranks finish an optimizer update at the same time.

Which groups an update has, over all ranks, stays as it is, and groups stay whole: advantages, losses and gradients
are what they were. Only who computes them changes.

Shape legend: W ranks.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import distributed

from grpo_vlm.data import transfer
from grpo_vlm.model.balance import assign
from grpo_vlm.training.batch import Group

SLACK = 0.01  # of the slowest rank's time: not worth a move


def balance(
    updates: Sequence[Sequence[Group]], costs: Sequence[Sequence[float]], accelerator: Accelerator
) -> list[list[Group]]:
    """This rank's groups of each update, so that the ranks' sums of costs are as equal as whole groups allow.

    updates: the groups that this rank holds, per optimizer update; costs: predicted seconds of each. A group that
    costs nothing stays where it is. Returned groups are in the order of `Group.index`. With one rank the same groups
    come back. A collective: every rank must call it, with as many updates. Only groups that change ranks are sent,
    each once, with their pixels once however many answers or groups share them.
    """
    if accelerator.num_processes == 1:
        return [list(groups) for groups in updates]
    mine = accelerator.process_index
    kept: list[list[Group]] = [[] for _ in updates]
    leaving: list[list[tuple[int, Group]]] = [[] for _ in range(accelerator.num_processes)]
    everyones = gather_object([[list(map(float, of_update)) for of_update in costs]])
    for update, groups in enumerate(updates):
        destinations = place([rank[update] for rank in everyones])[mine]
        for group, rank in zip(groups, destinations, strict=True):
            if rank == mine:
                kept[update].append(group)
            else:
                leaving[rank].append((update, group))
    for arrived in exchange(leaving, accelerator.device):
        for update, group in arrived:
            kept[update].append(group)
    return [sorted(groups, key=lambda group: group.index) for groups in kept]


def place(costs: Sequence[Sequence[float]]) -> list[list[int]]:
    """The new rank of each group of one update, given the costs by rank.

    As even as `assign` makes it, up to SLACK, with few moves. Deterministic, so that all ranks agree.
    """
    ranks = len(costs)
    everything = [(rank, number) for rank, row in enumerate(costs) for number in range(len(row))]
    moving = [(rank, number) for rank, number in everything if costs[rank][number] > 0]
    values, sources = [costs[rank][number] for rank, number in moving], [rank for rank, _ in moving]
    bins = assign(values, ranks)
    slowest = max(sum(values[item] for item in items) for items in bins)
    owners = _few_moves(values, sources, ranks, slowest * (1 + SLACK))
    if owners is None:
        owners = [0] * len(values)
        for items, rank in zip(bins, _ranks(bins, sources, ranks), strict=True):
            for item in items:
                owners[item] = rank
    new = dict(zip(moving, owners, strict=True))
    return [[new.get((rank, number), rank) for number in range(len(row))] for rank, row in enumerate(costs)]


def _few_moves(values: Sequence[float], owners: Sequence[int], ranks: int, limit: float) -> list[int] | None:
    """Moves or swaps items between the slowest and the fastest rank until none is above the limit; None when that
    gets stuck."""
    owners = list(owners)
    while True:
        loads = [
            sum(value for value, owner in zip(values, owners, strict=True) if owner == rank) for rank in range(ranks)
        ]
        slow, fast = loads.index(max(loads)), loads.index(min(loads))
        if loads[slow] <= limit:
            return owners
        gap = loads[slow] - loads[fast]
        leave = [item for item, owner in enumerate(owners) if owner == slow]
        back = [None, *(item for item, owner in enumerate(owners) if owner == fast)]
        gaps = {(i, j): abs(gap - 2 * (values[i] - (0.0 if j is None else values[j]))) for i in leave for j in back}
        item, other = min(gaps, key=gaps.__getitem__)
        if gaps[item, other] >= gap * (1 - SLACK):
            return None
        owners[item] = fast
        if other is not None:
            owners[other] = slow


def _ranks(bins: Sequence[Sequence[int]], sources: Sequence[int], ranks: int) -> list[int]:
    """A rank for each bin, so that few items leave theirs: the largest overlaps first."""
    overlaps = [
        (-sum(sources[item] == rank for item in items), number, rank)
        for number, items in enumerate(bins)
        for rank in range(ranks)
    ]
    owners: dict[int, int] = {}
    for _, number, rank in sorted(overlaps):
        if number not in owners and rank not in owners.values():
            owners[number] = rank
    return [owners[number] for number in range(len(bins))]


def exchange(leaving: Sequence[list], device: torch.device) -> list[list]:
    """Sends the W-th part of `leaving` to rank W and returns what each rank sent here; a collective.

    One all-to-all of bytes, so that no order of sends and receives can block. device: where the process group's
    backend takes tensors.
    """
    messages = [transfer.dumps(part) if part else [] for part in leaving]
    sizes = torch.tensor([transfer.size_of(message) for message in messages], device=device)
    arriving = torch.empty_like(sizes)
    distributed.all_to_all_single(arriving, sizes)
    sizes, arriving = sizes.tolist(), arriving.tolist()
    outgoing = torch.empty(sum(sizes), dtype=torch.uint8)
    memory = memoryview(outgoing.numpy())
    for message, first in zip(messages, accumulate(sizes[:-1], initial=0), strict=True):
        transfer.write(message, memory[first:])
    incoming = torch.empty(sum(arriving), dtype=torch.uint8, device=device)
    distributed.all_to_all_single(incoming, outgoing.to(device), arriving, sizes)
    return [transfer.loads(memoryview(part.numpy())) if len(part) else [] for part in incoming.cpu().split(arriving)]
