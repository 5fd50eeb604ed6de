"""Which rows a rank builds for which update, and when: nothing for skipped updates, the next step while one trains."""

import operator
from dataclasses import replace

import pytest
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.workers import Pending, PromptPool
from grpo_vlm.training.plan import RolloutPlan


class Rows:
    """A data set of 16 numbers that notes what is built."""

    def __init__(self):
        self.built: list[int] = []

    def __len__(self) -> int:
        return 16

    def prompts(self, indices):
        self.built += indices
        return list(indices)

    def picture_sources(self, index):
        return []


class Pool(PromptPool):
    """Notes what is asked for."""

    def __init__(self):
        super().__init__(0)
        self.asked: list[list[int]] = []

    def submit(self, rows, indices) -> Pending:
        self.asked.append(list(indices))
        return super().submit(rows, indices)


def settings(**data) -> Config:
    config = Config()
    data = {"rollout_batch_size": 4, "shuffle": False} | data
    actor = replace(config.worker.actor, global_batch_size=2)
    return replace(config, data=replace(config.data, **data), worker=replace(config.worker, actor=actor))


def plan(rows, *, rank=0, world_size=1, steps=4, pool=None, **data) -> RolloutPlan:
    return RolloutPlan(rows, settings(**data), steps, rank=rank, world_size=world_size, pool=pool)


def loader(prompts: RolloutPlan) -> DataLoader:
    """As GRPOVLMTrainer.get_train_dataloader makes it."""
    return DataLoader(prompts, batch_size=1, shuffle=False, collate_fn=operator.itemgetter(0))


def test_the_prompts_of_a_step_come_at_its_first_update():
    assert updates_per_step(settings()) == 2
    assert list(loader(plan(Rows()))) == [[0, 1, 2, 3], [], [4, 5, 6, 7], [], [8, 9, 10, 11], [], [12, 13, 14, 15], []]
    with pytest.raises(IndexError):
        plan(Rows())[8]


def test_updates_that_a_resumed_run_skips_are_not_built():
    rows = Rows()
    assert list(skip_first_batches(loader(plan(rows)), 4)) == [[8, 9, 10, 11], [], [12, 13, 14, 15], []]
    assert rows.built == list(range(8, 16))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_every_update_and_places_name_their_rows(world_size):
    ranks = [plan(Rows(), rank=rank, world_size=world_size, shuffle=True) for rank in range(world_size)]
    alone = plan(Rows(), shuffle=True)
    for step in range(4):
        step_rows = alone.row_numbers(step)
        shares = [rank.row_numbers(step) for rank in ranks]
        for rank, share in zip(ranks, shares, strict=True):
            assert share == [step_rows[place] for place in rank.places]
        half = 2 // world_size  # one update's prompts of one rank
        for update in range(2):
            together = [row for share in shares for row in share[update * half : (update + 1) * half]]
            assert together == step_rows[2 * update : 2 * update + 2]


def test_the_next_step_is_asked_for_when_a_step_is_taken():
    rows, pool = Rows(), Pool()
    prompts = plan(rows, pool=pool)
    prompts.prefetch(1)  # a resumed run begins before the loop asks
    assert pool.asked == [[4, 5, 6, 7]]
    assert prompts[2] == [4, 5, 6, 7] and pool.asked == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert prompts[3] == [] and len(pool.asked) == 2
    assert prompts[4] == [8, 9, 10, 11] and prompts[6] == [12, 13, 14, 15]
    assert len(pool.asked) == 3  # each step once, and none after the last
    assert rows.built == list(range(4, 16))
