"""Groups over ranks: balanced, each exactly once, and unharmed by the way, over real process groups."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from grpo_vlm.model.balance import assign
from grpo_vlm.training.exchange import SLACK, place

COSTS = st.floats(0.01, 10).map(lambda value: round(value, 2))


def loads(costs, destinations) -> list[float]:
    """Cost of each rank afterwards."""
    sums = [0.0] * len(costs)
    for row, ranks in zip(costs, destinations, strict=True):
        for cost, rank in zip(row, ranks, strict=True):
            sums[rank] += cost
    return sums


@given(st.lists(st.lists(st.one_of(COSTS, st.just(0.0)), min_size=1, max_size=8), min_size=1, max_size=5))
def test_the_slowest_rank_is_as_fast_as_whole_groups_allow(costs):
    destinations = place(costs)
    flat = [cost for row in costs for cost in row]
    best = max(sum(flat[item] for item in items) for items in assign(flat, len(costs)))
    assert max(loads(costs, destinations)) <= best * (1 + SLACK) + 1e-9
    assert all(
        rank == source
        for source, (row, ranks) in enumerate(zip(costs, destinations, strict=True))
        for cost, rank in zip(row, ranks, strict=True)
        if cost == 0
    )
    assert all(rank in [r for ranks in destinations for r in ranks] for rank in range(len(costs)))  # nobody is idle


def test_balanced_groups_stay_and_few_of_the_others_move():
    assert place([[2.0, 2.0], [1.0, 3.0]]) == [[0, 0], [1, 1]]
    assert place([[1.0, 1.003], [1.0, 1.0]]) == [[0, 0], [1, 1]]  # less than SLACK to gain
    unequal = place([[1.0] * 6, [1.0] * 2])
    assert loads([[1.0] * 6, [1.0] * 2], unequal) == [4.0, 4.0]
    assert unequal[1] == [1, 1] and sorted(unequal[0]) == [0, 0, 0, 0, 1, 1]


def test_one_rank_keeps_what_it_has():
    assert place([[3.0, 1.0, 0.0]]) == [[0, 0, 0]]


# Ranks are forked after the imports, which take longest.
SCRIPT = """
import os, sys
import torch
from PIL import Image
from accelerate import Accelerator
from grpo_vlm.data.rows import Prompt
from grpo_vlm.rollout.types import Completion
from grpo_vlm.training import exchange
from grpo_vlm.training.batch import Group

G, SHARE, PATCHES, DIM = 8, 4, 256, 1176

def group(index):
    picture, pixels = Image.new("RGB", (56, 28), (index, 0, 0)), torch.full((PATCHES, DIM), float(index))
    prompt = Prompt(f"rows:{index}", [], "?", [1, 2, index], [picture], (str(index),), (pixels,),
                    torch.tensor([[1, 16, 16]]), str(index), {"index": index})
    completions = tuple(Completion((index, n), (-0.5, -n / 7), "stop", f"{index}.{n}", 3) for n in range(G))
    return Group(prompt, completions, tuple({"overall": n / 3} for n in range(G)), index)

def cost(update, index):
    return 0.0 if index % 5 == 4 else 1.0 + update + (index % (SHARE * world_size) < 4) * 3.0

def check_group(got):
    want = group(got.index)
    assert got.completions == want.completions and got.scores == want.scores
    assert torch.equal(got.prompt.pixels[0], want.prompt.pixels[0])
    assert torch.equal(got.prompt.image_grid_thw, want.prompt.image_grid_thw)
    assert got.prompt.images[0].tobytes() == want.prompt.images[0].tobytes()
    assert (got.prompt.token_ids, got.prompt.columns) == (want.prompt.token_ids, want.prompt.columns)

def check_update(update, groups):
    assert [g.index for g in groups] == sorted(g.index for g in groups) and groups
    for got in groups:
        check_group(got)
    everyones = exchange.gather_object([[g.index for g in groups]])
    first = update * world_size * SHARE
    assert sorted(sum(everyones, [])) == list(range(first, first + world_size * SHARE))
    loads = [sum(cost(update, index) for index in indices) for indices in everyones]
    before = [sum(cost(update, first + r * SHARE + n) for n in range(SHARE)) for r in range(world_size)]
    dearest = max(cost(update, first + n) for n in range(world_size * SHARE))
    assert max(loads) < max(before) and max(loads) - min(loads) <= dearest, (before, loads)

def check():
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    rank = accelerator.process_index
    updates = [[group((update * world_size + rank) * SHARE + n) for n in range(SHARE)] for update in range(3)]
    costs = [[cost(update, group.index) for group in groups] for update, groups in enumerate(updates)]
    sent, real = [], exchange.transfer.dumps
    exchange.transfer.dumps = lambda value: sent.append(real(value)) or sent[-1]
    balanced = exchange.balance(updates, costs, accelerator)
    for update, groups in enumerate(balanced):
        check_update(update, groups)
    kept = {id(group) for groups in balanced for group in groups}
    moved = [group for groups in updates for group in groups if id(group) not in kept]
    pixels, size = PATCHES * DIM * 4, sum(exchange.transfer.size_of(message) for message in sent)
    assert len(moved) * pixels <= size <= len(moved) * (pixels + 20_000), (size, len(moved))  # once, not G times
    assert exchange.balance([[], []], [[], []], accelerator) == [[], []]

for world_size, port in ((2, sys.argv[1]), (3, sys.argv[2])):
    for rank in range(world_size):
        if os.fork() == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size),
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            check()
            os._exit(0)
    statuses = [os.wait()[1] for _ in range(world_size)]
    assert statuses == [0] * world_size, (world_size, statuses)
"""


def test_groups_arrive_once_and_whole():
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        ports = [str(free.getsockname()[1]) for free in (one, other)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT, *ports], env=environment, check=True, timeout=120)
