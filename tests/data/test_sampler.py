"""Row order: every row once an epoch, a new order each epoch, and a pure function of the step."""

import pytest

from grpo_vlm.data.sampler import rollout_rows, steps_per_epoch
from grpo_vlm.errors import DataError


def test_an_epoch_uses_each_row_at_most_once_and_drops_the_rest():
    assert steps_per_epoch(10, 3) == 3
    rows = [row for step in range(3) for row in rollout_rows(10, 3, step, shuffle=True, seed=1)]
    assert len(rows) == len(set(rows)) == 9
    assert set(rows) < set(range(10))


def test_full_epoch_is_a_permutation_and_the_next_one_differs():
    first = [row for step in range(4) for row in rollout_rows(12, 3, step, shuffle=True, seed=5)]
    second = [row for step in range(4, 8) for row in rollout_rows(12, 3, step, shuffle=True, seed=5)]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second and first != sorted(first)


def test_step_alone_decides_so_a_resumed_run_draws_the_same_rows():
    whole = [rollout_rows(100, 8, step, shuffle=True, seed=3) for step in range(40)]
    assert [rollout_rows(100, 8, step, shuffle=True, seed=3) for step in reversed(range(40))] == whole[::-1]
    assert rollout_rows(100, 8, 0, shuffle=True, seed=4) != whole[0]


def test_without_shuffle_rows_come_in_file_order():
    assert rollout_rows(7, 3, 1, shuffle=False, seed=0) == [3, 4, 5]
    assert rollout_rows(7, 3, 2, shuffle=False, seed=0) == [0, 1, 2]


def test_too_few_rows_is_an_error_with_both_numbers():
    with pytest.raises(DataError, match=r"5 usable rows.*takes 8.*data\.rollout_batch_size"):
        steps_per_epoch(5, 8)
