"""One update gives the same gradient and metrics however it is ordered and split over micro-batches and ranks."""

import pytest
import torch

from grpo_vlm.algorithms import losses, selection
from grpo_vlm.algorithms.losses import AVERAGES, LOSSES, Denominators
from grpo_vlm.algorithms.selection import SELECTING
from tests.algorithms.draws import B, Draw, T, on_two_ranks

CLIPS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
SPLITS = {
    "8 micro-batches of 1": [[row] for row in range(B)],
    "2 ranks x 4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[0, 3, 5], [1, 2, 4, 6, 7]],
    "permuted": [[7, 2, 0, 5, 4, 6, 1, 3]],
    "permuted and split": [[6, 1], [7], [3, 0, 2, 5, 4]],
}


def choose(name, draw, rows, ranks=selection.ALONE):
    if name not in SELECTING:
        return None
    tensors = [values[rows] for values in (draw.old, draw.new, draw.advantages, draw.mask)]
    return selection.select(
        name,
        *tensors,
        sample_keys=[1000 + row for row in rows],
        seed=3,
        **CLIPS,
        clip_cov_ratio=0.2,
        kl_cov_ratio=0.2,
        clip_cov_lb=0.1,
        ranks=ranks,
    )


def update(name, mode, parts, seed=0):
    """Loss, gradient and metrics, micro-batch by micro-batch, each only as wide as its longest completion."""
    draw = Draw.make(seed)
    new = draw.new.clone().requires_grad_()
    whole = Denominators.of(draw.mask)
    selected = choose(name, draw, list(range(B)))
    total, sums = 0.0, {}
    for rows in parts:
        wide = int(draw.mask[rows].sum(-1).max())
        part = lambda values: values[rows, :wide]  # noqa: B023, E731
        loss, metrics = losses.policy_loss(
            name,
            part(draw.old),
            part(new),
            part(draw.advantages),
            part(draw.mask),
            clip_ratio_dual=1.5,
            loss_avg_mode=mode,
            whole=whole,
            weights=part(draw.weights),
            selected=None if selected is None else part(selected),
            **CLIPS,
        )
        loss.backward()
        total += loss.item()
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + value.item()
    return total, new.grad, sums


@pytest.mark.parametrize("mode", AVERAGES)
@pytest.mark.parametrize("name", LOSSES)
def test_one_batch_equals_any_split(name, mode):
    whole_loss, whole_gradient, whole_metrics = update(name, mode, [list(range(B))])
    assert whole_gradient.abs().max() > 1e-4
    for parts in SPLITS.values():
        loss, gradient, metrics = update(name, mode, parts)
        assert loss == pytest.approx(whole_loss, abs=1e-9)
        torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-9)
        assert metrics == pytest.approx(whole_metrics, abs=1e-9)
    _, dropped, _ = update(name, mode, [list(range(B - 1))])
    assert (dropped - whole_gradient).abs().max() > 1e-6


@pytest.mark.parametrize("mode", AVERAGES)
def test_a_masked_sample_is_as_if_it_were_not_there(mode):
    draw = Draw.make(1)
    emptied = draw.mask.clone()
    emptied[[2, 5]] = 0
    others = [0, 1, 3, 4, 6, 7]
    gradients = []
    for rows, mask in ((list(range(B)), emptied), (others, draw.mask)):
        new = draw.new.clone().requires_grad_()
        loss, _ = losses.policy_loss(
            "gspo", draw.old[rows], new[rows], draw.advantages[rows], mask[rows], loss_avg_mode=mode,
            clip_ratio_dual=3.0, **CLIPS,
        )  # fmt: skip
        loss.backward()
        gradients.append(new.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    assert gradients[0][others].abs().max() > 0


def test_metrics_are_means_over_the_watched_samples_alone():
    draw = Draw.make(2)
    few = [0, 1, 2]  # the others have no gradient and are not run, but count in the loss
    arguments = [values[few] for values in (draw.old, draw.new, draw.advantages, draw.mask)]
    whole, watched = Denominators.of(draw.mask), Denominators.of(draw.mask[few])
    for mode in AVERAGES:
        options = {"clip_ratio_dual": 3.0, "loss_avg_mode": mode, **CLIPS}
        loss, metrics = losses.policy_loss("default", *arguments, whole=whole, watched=watched, **options)
        alone_loss, alone_metrics = losses.policy_loss("default", *arguments, **options)
        assert metrics == alone_metrics
        ratio = watched.tokens / whole.tokens if mode == "token" else watched.sequences / whole.sequences
        assert loss.item() == pytest.approx(alone_loss.item() * ratio, rel=1e-12)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", sorted(SELECTING))
def test_selection_does_not_depend_on_order_ranks_or_padding(name, seed):
    draw = Draw.make(seed)
    whole = choose(name, draw, list(range(B)))
    assert whole.any()
    order, parts = SPLITS["permuted"][0], SPLITS["uneven"]
    assert torch.equal(choose(name, draw, order), whole[order])
    of_ranks = on_two_ranks(lambda rank, ranks: choose(name, draw, parts[rank], ranks))
    for rows, ours in zip(parts, of_ranks, strict=True):
        assert torch.equal(ours, whole[rows])
    wider = Draw(*(torch.nn.functional.pad(values, (0, 5)) for values in vars(draw).values()))
    assert torch.equal(choose(name, wider, list(range(B)))[:, :T], whole)
