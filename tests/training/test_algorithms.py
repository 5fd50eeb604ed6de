"""Every loss, estimator and filter through the trainer's own parts: the tiny model, real rollouts, real gradients."""

import copy
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
from grpo_vlm.errors import ConfigError, DataError, RewardError
from grpo_vlm.training.batch import RolloutBatch
from grpo_vlm.training.credit import Credit
from grpo_vlm.training.scoring import make_scorer
from grpo_vlm.training.update import Learner
from tests.training.rigs import largest_difference, parameters, session, settings

CASES = [(name, None) for name in (*LOSS_NAMES, *TRL_LOSSES)] + [("default", average) for average in AVERAGES]


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A session whose engine runs, and the scored groups of its first step, one answer of them unscored."""
    folder = tmp_path_factory.mktemp("algorithms")
    config = settings(tmp_path_factory.getbasetemp(), folder / "run", **{"worker.rollout.n": 3})
    with session(config) as parts:
        trainer = parts.trainer
        trainer.create_optimizer_and_scheduler(1)
        trainer.model_wrapped = trainer.accelerator.prepare(trainer.model)
        trainer.engine.start()
        trainer.engine.sync(trainer.model, 0)
        prompts = trainer.prompts[0]
        groups = trainer.rounds.collect(prompts, 1)
        first = groups[0]
        groups[0] = dataclasses.replace(first, scores=(None, *first.scores[1:]))
        yield parts, groups


def changed(config, **changes):
    """A copy of the configuration with some dotted keys set."""
    config = copy.deepcopy(config)
    for key, value in changes.items():
        *way, name = key.split(".")
        target = config
        for part in way:
            target = getattr(target, part)
        setattr(target, name, value)
    return config


def learner_of(parts, config):
    trainer = parts.trainer
    scorer = trainer.learner.scorer
    made = make_scorer(config, trainer.model, banned_ids=scorer.banned_ids, padding=scorer.padding, sharded=False)
    return Learner(config, made, trainer.accelerator, trainer.meter)


def gradients(parts, groups, config):
    """Of one update on the groups, whose policy has moved since the rollout."""
    trainer, learner = parts.trainer, learner_of(parts, config)
    update = learner.prepare(groups)
    noise = torch.randn(update.batch.tokens.shape, generator=torch.Generator().manual_seed(5)) * 0.3
    update = update.having(old_log_probs=update.batch.sampler_log_probs + noise * update.batch.tokens)
    if learner.selects:
        update = learner.selected(trainer.model_wrapped, update, 1)
    trainer.model.zero_grad()
    loss = learner.accumulate(trainer.model_wrapped, update, unmoved=False)
    trainer.meter.totals(trainer.accelerator)
    return float(loss), {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}


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
    parts.trainer.meter.totals(parts.trainer.accelerator)


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


def test_names_in_the_schema_are_those_of_the_registries():
    assert set(LOSS_NAMES) == set(LOSSES) and set(ESTIMATORS) == set(advantages.ESTIMATORS)
    assert set(KL_ESTIMATORS) == set(kl.ESTIMATORS)
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


FILTERING = {
    "algorithm.online_filtering": True,
    "algorithm.filter_low": 0.35,
    "algorithm.filter_high": 0.65,
    "data.mini_rollout_batch_size": 5,
    "algorithm.kl_type": "adaptive",
    "algorithm.disable_kl": False,
    "algorithm.kl_penalty": "low_var_kl",
    "algorithm.ref_model_sync_steps": 2,
    "worker.actor.optim.lr": 1e-3,
    "trainer.val_before_train": False,
}


def test_a_filtered_run_fills_its_batches_and_resumes_with_what_was_left_over(tmp_path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()

    def train(folder, steps):
        config = settings(root, tmp_path / folder, **{**FILTERING, "trainer.max_steps": steps, "trainer.save_freq": 2})
        with session(config) as parts:
            parts.train()
            records = [record for record in parts.trainer.state.log_history if "filter/rounds" in record]
            return parameters(parts.trainer), records, parts.trainer.rounds.done, parts.trainer.credit.kl.coef

    whole, records, rounds, coefficient = train("whole", 3)
    assert rounds == sum(record["filter/rounds"] for record in records) > 3  # more than one a step
    assert records[1]["filter/kept_for_next_step"] > 0  # in the checkpoint of step 2
    assert all(0.35 < record["critic/score/mean"] < 0.65 for record in records)
    train("broken", 2)
    resumed, more, _, resumed_coefficient = train("broken", 3)
    assert more[-1]["critic/score/mean"] == records[-1]["critic/score/mean"]
    assert largest_difference(whole, resumed) == 0.0 and coefficient == resumed_coefficient != 1e-3


def test_a_batch_that_cannot_be_filled_is_an_error_with_the_remedy(tmp_path, tmp_path_factory):
    never = {"algorithm.filter_low": 0.98, "algorithm.filter_high": 0.99, "trainer.max_try_make_batch": 2}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **{**FILTERING, **never})
    with session(config) as parts, pytest.raises(DataError, match=r"2 rounds .* widen the bounds"):
        parts.train()


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


def test_a_resumed_run_takes_a_new_kl_coefficient():
    before = kl.controller("adaptive", coef=0.1, target=0.1, horizon=100.0)
    before.update(1.0, 10)
    same, other = (kl.controller("adaptive", coef=coef, target=0.1, horizon=100.0) for coef in (0.1, 0.5))
    for controller in (same, other):
        controller.load_state_dict(before.state_dict())
    assert same.coef == before.coef != 0.1 and other.coef == 0.5
