"""Which groups and samples are trained on."""

import torch

from grpo_vlm.algorithms.filtering import keep, keep_varied, without
from grpo_vlm.algorithms.losses import Denominators


def test_groups_are_kept_by_their_mean_between_bounds_that_are_excluded():
    groups = [[0, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0.5, 0.5], [1, None, None], [None, 0, 1], [None, None], []]
    assert keep(groups, 0.01, 0.99) == [False, False, True, True, False, True, False, False]
    assert keep([[0.25, 0.25], [0.75, 0.75], [0.25, 0.75]], 0.25, 0.75) == [False, False, True]


def test_groups_without_variance_are_not_kept():
    groups = [[0.1, 0.1, 0.1], [1, 0], [0.3], [1, None, 1], [1, None, 0], [None, 1], [None, None], [None]]
    assert keep_varied(groups) == [False, True, True, False, True, False, False, False]


def test_truncated_samples_leave_the_loss_and_its_denominators():
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    masked = without(mask, torch.tensor([True, False, False]))
    assert masked.tolist() == [[0, 0, 0], [1, 1, 0], [1, 0, 0]]
    assert Denominators.of(masked) == Denominators(tokens=3.0, sequences=2.0, longest=3.0)
