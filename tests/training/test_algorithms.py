"""Every loss, estimator and filter through the trainer's own parts: the tiny model, real rollouts, real gradients."""

import dataclasses

import pytest
import torch

from grpo_vlm.algorithms import advantages, kl, losses
from grpo_vlm.algorithms.losses import AVERAGES, LOSSES, Denominators
from grpo_vlm.algorithms.ranks import Ranks
from grpo_vlm.config import check_algorithm
from grpo_vlm.config.schema_actor import LOSSES as LOSS_NAMES
from grpo_vlm.config.schema_actor import TRL_LOSSES
from grpo_vlm.config.schema_algorithm import ESTIMATORS, KL_ESTIMATORS
from grpo_vlm.errors import ConfigError, RewardError
from grpo_vlm.training.batch import RolloutBatch
from grpo_vlm.training.credit import Credit
from grpo_vlm.training.evaluate import to_samples
from grpo_vlm.training.observe import in_order, placed, rollout_metrics
from tests.training.rigs import largest_difference, parameters, session, settings
from tests.training.updates import changed, gradients, learner_of

CASES = [(name, None) for name in (*LOSS_NAMES, *TRL_LOSSES)] + [("default", average) for average in AVERAGES]


@pytest.mark.parametrize(("loss_type", "average"), CASES)
def test_a_loss_does_not_depend_on_rows(parts, loss_type, average):
    """Padded in one piece, packed in one row, packed in single samples: the same loss and gradients, to 1e-5 of the
    largest."""
    parts, groups = parts
    config = changed(
        parts.config,
        **{
            "worker.actor.loss_type": loss_type,
            "worker.actor.loss_avg_mode": average,
            "worker.actor.clip_cov_lb": -9.0,
            "worker.actor.clip_cov_ratio": 0.3,
            "worker.actor.kl_cov_ratio": 0.3,
            "worker.actor.dynamic_batching": False,
            "worker.actor.entropy_coeff": 0.01,
        },
    )
    credit = Credit(config, parts.trainer.accelerator, parts.trainer.meter)
    groups = credit.assign(credit.flag(groups))
    found = []
    for packed, samples in ((False, 99), (True, 99), (True, 1)):
        cut = {
            "worker.actor.padding_free": packed,
            "worker.actor.micro_batch_size_per_device_for_update": samples,
        }
        found.append(gradients(parts, groups, changed(config, **cut)))
    (plain_loss, plain), *others = found
    largest = max(value.abs().max() for value in plain.values())
    assert largest > 0
    for loss, packed in others:
        assert loss == pytest.approx(plain_loss, abs=1e-5)
        assert max((packed[name] - value).abs().max() for name, value in plain.items()) <= 1e-5 * largest


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_sees_what_was_scored(parts, name):
    """Each completion's advantage is what the formula gives for the whole batch; an unscored one is nowhere."""
    parts, groups = parts
    config = changed(
        parts.config,
        **{"algorithm.adv_estimator": name, "algorithm.gamma": 0.9, "algorithm.norm_adv_by_std_in_grpo": False},
    )
    groups = [dataclasses.replace(group, baseline=0.25) for group in groups]
    credit = Credit(config, parts.trainer.accelerator, parts.trainer.meter)
    assigned = credit.assign(credit.flag(groups))
    batch = RolloutBatch.of(groups)
    scores = [score for group in groups for score in group.scores]
    rewards = torch.zeros_like(batch.tokens)
    for row, score in enumerate(scores):
        rewards[row, int(batch.tokens[row].sum()) - 1] = 0.0 if score is None else score["overall"]
    options = {
        "reinforce_plus_plus": {"gamma": 0.9},
        "remax": {"baselines": torch.full((len(scores),), 0.25)},
        "grpo": {"normalize_std": False},
        "grpo_passk": {"normalize_std": False},
        "gdpo": {"components": rewards.sum(-1, keepdim=True), "normalize_std": False},
    }
    expected = advantages.estimate(
        name,
        rewards,
        batch.tokens,
        batch.group_ids,
        scored=torch.tensor([score is not None for score in scores]),
        **options.get(name, {}),
    )
    got = RolloutBatch.of(assigned)
    torch.testing.assert_close(got.advantages, expected)
    assert got.mask[0].sum() == 0 and got.advantages[0].abs().max() == 0
    assert got.mask[1:].sum() == batch.tokens[1:].sum()
    # what EasyR1 logs: over all tokens of what was scored, returns before whitening and baseline where there are any
    mask, scored = batch.tokens[1:] > 0, rewards[1:]
    returns = expected[1:]
    if name in ("reinforce_plus_plus", "remax"):
        discount = 0.9 if name == "reinforce_plus_plus" else 1.0
        left = batch.tokens[1:].flip(-1).cumsum(-1).flip(-1) - 1  # tokens that follow
        returns = scored.sum(-1, keepdim=True) * discount**left
    samples = to_samples(parts.trainer.collector, assigned, step=1, split="train")
    logged = rollout_metrics(in_order([placed(samples, assigned, batch.rewards.tolist())]), config)
    for key, values in (("advantages", expected[1:][mask]), ("returns", returns[mask])):
        of_kind = [logged[f"critic/{key}/{part}"] for part in ("mean", "max", "min")]
        assert of_kind == pytest.approx([float(f(values)) for f in (torch.mean, torch.max, torch.min)], abs=1e-6)
    parts.trainer.meter.totals(parts.trainer.accelerator)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_answer_without_tokens_counts_in_its_group_as_one_of_an_end_token(parts, name):
    """Its score is in every statistic; it adds nothing to the loss, in neither form, alone in its row or not."""
    parts, groups = parts
    config = changed(parts.config, **{"algorithm.adv_estimator": name, "worker.actor.dynamic_batching": False})
    groups = [dataclasses.replace(group, baseline=0.25) for group in groups]
    assigned, scores = {}, ({"overall": 0.2}, {"overall": 0.7}, {"overall": 3.0})
    for tokens in ((), (7,)):
        cut = dataclasses.replace(groups[1].completions[2], token_ids=tokens, logprobs=(-1.0,) * len(tokens))
        made = dataclasses.replace(groups[1], completions=(*groups[1].completions[:2], cut), scores=scores)
        credit = Credit(config, parts.trainer.accelerator, parts.trainer.meter)
        assigned[len(tokens)] = credit.assign(credit.flag([groups[0], made, *groups[2:]]))
    without, ended = assigned[0], assigned[1]
    for ours, theirs in zip(without, ended, strict=True):
        assert torch.equal(ours.rewards, theirs.rewards)
        assert torch.equal(ours.advantages[:2], theirs.advantages[:2])
        for values in (ours.returns, theirs.returns):
            assert (values is None) == (name not in ("reinforce_plus_plus", "remax"))
    assert without[1].rewards[2] == 3.0 and not without[1].advantages[2].any()
    found = []
    for packed, samples in ((False, 1), (True, 99), (True, 1)):
        cut = {"worker.actor.padding_free": packed, "worker.actor.micro_batch_size_per_device_for_update": samples}
        found.append(gradients(parts, without, changed(config, **cut)))
    largest = max(value.abs().max() for value in found[0][1].values())
    for loss, of_form in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-5)
        assert max((of_form[key] - value).abs().max() for key, value in found[0][1].items()) <= 1e-5 * largest


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_rank_without_groups_takes_part(parts, name):
    """Online filtering may leave one none: what the ranks reduce together must have the same names and shapes."""
    parts, groups = parts
    config = changed(parts.config, **{"algorithm.adv_estimator": name, "algorithm.mask_truncated_completions": True})
    trainer, seen = parts.trainer, []
    for given in (groups, []):
        credit, learner = Credit(config, trainer.accelerator, trainer.meter), learner_of(parts, config)
        credit.ranks = Ranks(sum=lambda values: values + 1.0)
        learner._gather = lambda sizes: [sizes, [1, 0, 4, 1, 4, 1]]  # another rank has a row
        update = learner.prepare(credit.assign(credit.flag(given)))
        assert update.batch.advantages.shape == update.batch.mask.shape
        seen.append(trainer.meter.totals(trainer.accelerator).keys())
    assert seen[0] == seen[1]


@pytest.mark.parametrize("key", ["mask_truncated_completions", "overlong_filtering"])
def test_truncated_answers_leave_the_loss_or_the_group_too(parts, key):
    parts, groups = parts
    group = groups[1]
    ends = ("length", "stop", "stop")
    made = tuple(
        dataclasses.replace(completion, finish_reason=end)
        for completion, end in zip(group.completions, ends, strict=True)
    )
    group = dataclasses.replace(group, completions=made, scores=({"overall": 1.0}, {"overall": 0.0}, {"overall": 1.0}))
    credit = Credit(
        changed(parts.config, **{f"algorithm.{key}": True}), parts.trainer.accelerator, parts.trainer.meter
    )
    (assigned,) = credit.assign(credit.flag([group]))
    totals = parts.trainer.meter.totals(parts.trainer.accelerator)
    assert assigned.counted == (False, True, True)
    assert totals["response_length/masked_share"] == pytest.approx(1 / 3)
    others = 2**-0.5 if key == "overlong_filtering" else (2 / 3) / 3**-0.5  # std of (0, 1), and of (1, 0, 1)
    assert assigned.advantages[1, 0] == pytest.approx(-others, rel=1e-4)
    assert Denominators.of(RolloutBatch.of([assigned]).mask).sequences == 2


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_estimators_that_compare_nothing_train_on_one_answer(tmp_path, tmp_path_factory, name):
    changes = {"worker.rollout.n": 1, "algorithm.adv_estimator": name, "trainer.max_steps": 1}
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)) as run:
        before = parameters(run.trainer)
        run.train()
        assert largest_difference(before, parameters(run.trainer)) > 0


def test_names_in_the_schema_are_those_of_the_registries():
    known = {*LOSSES, *losses.FIXED_AVERAGES}
    assert all(set(types) <= known for types in check_algorithm.READ_BY.values())
    assert set(LOSS_NAMES) == set(LOSSES) and set(ESTIMATORS) == set(advantages.ESTIMATORS)
    assert set(KL_ESTIMATORS) == {*kl.ESTIMATORS, "full"}
    assert check_algorithm.IMPLIED_AVERAGES == {name: mode for name, (_, mode) in losses.FIXED_AVERAGES.items()}


def test_the_first_update_of_a_step_has_ratio_one_and_the_next_has_not(tmp_path, tmp_path_factory, monkeypatch):
    ratios = []
    loss = losses.policy_loss

    def watched(loss_type, old, new, *args, **kwargs):
        ratios.append(float((new - old).detach().abs().max()))
        return loss(loss_type, old, new, *args, **kwargs)

    monkeypatch.setattr(losses, "policy_loss", watched)
    two = {"worker.actor.global_batch_size": 2, "worker.actor.ppo_epochs": 2, "worker.actor.optim.lr": 1e-3}
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **two)) as parts:
        parts.train()
    rows = len(ratios) // 4
    assert all(ratio == 0.0 for ratio in ratios[:rows]) and all(ratio > 0 for ratio in ratios[rows:])


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["style"]},
        {"algorithm.online_filtering": True, "algorithm.filter_key": "style"},
    ],
)
def test_a_score_that_the_reward_does_not_give_is_named_before_a_model_loads(tmp_path, tmp_path_factory, changes):
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    with pytest.raises(ConfigError, match=r"(gdpo_reward_keys|filter_key): .* no score 'style'; it gives overall"):
        session(config)


def test_gdpo_names_the_row_without_a_part_and_a_step_without_scores_is_an_error(parts):
    parts, groups = parts
    config = changed(
        parts.config, **{"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["overall", "style"]}
    )
    credit = Credit(config, parts.trainer.accelerator, parts.trainer.meter)
    with pytest.raises(RewardError, match=r"row .* has no score 'style'; it has overall"):
        credit.assign(groups)
    unscored = [dataclasses.replace(group, scores=(None,) * len(group.scores)) for group in groups]
    with pytest.raises(RewardError, match="none of the 12 samples of this step counts"):
        credit.assign(unscored)
