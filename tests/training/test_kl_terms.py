"""The KL term through the trainer's own parts: over the whole vocabulary, averaged apart, resumed; and every kind of
setting combined."""

import contextlib
import dataclasses
import math

import pytest
import torch

from grpo_vlm.algorithms import kl, losses
from grpo_vlm.algorithms.losses import AVERAGES, Denominators
from grpo_vlm.model.load import load_reference
from grpo_vlm.training.batch import RolloutBatch, pad, split
from grpo_vlm.training.credit import Credit
from grpo_vlm.training.scoring import make_scorer
from tests.training.rigs import session, settings
from tests.training.test_sharding import difference, run
from tests.training.updates import changed, learner_of


def plain_divergences(parts, config, groups, reference):
    """KL over the whole vocabulary [t] of each completion, sample by sample from all logits at once."""
    trainer, found = parts.trainer, []
    scorer = make_scorer(
        changed(config, **{"worker.actor.padding_free": False}),
        trainer.model,
        banned_ids=trainer.learner.scorer.banned_ids,
        padding=trainer.learner.scorer.padding,
        sharded=False,
    )
    for prompt, completion in RolloutBatch.of(groups).samples:
        inputs, length = pad([(prompt, completion)], scorer.padding).inputs, len(completion.token_ids)
        rows = []
        for model in (trainer.model, reference):
            logits = model(**inputs, use_cache=False).logits[0, -length - 1 : -1] / config.worker.rollout.temperature
            logits[:, scorer.banned_ids] = -torch.inf
            rows.append(logits.log_softmax(-1))
        policy, other = rows
        allowed = policy.exp() > 0
        found.append(torch.where(allowed, policy.exp() * (policy - other).masked_fill(~allowed, 0.0), 0.0).sum(-1))
    return found


def test_full_kl_is_the_sum_over_the_vocabulary_in_value_and_gradient(parts):
    """In the loss and in the reward, packed and padded, whole groups and single samples in a row."""
    parts, groups = parts
    trainer = parts.trainer
    config = changed(
        parts.config,
        **{
            "algorithm.disable_kl": False,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_penalty": "full",
            "algorithm.kl_coef": 0.7,
            "worker.rollout.temperature": 0.8,
            "worker.actor.dynamic_batching": False,
        },
    )
    reference = load_reference(config).requires_grad_(False)
    for number, weights in enumerate(reference.parameters()):
        weights += 0.05 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(number))
    divergences = plain_divergences(parts, config, groups, reference)
    trainer.model.zero_grad()
    expected = 0.7 * torch.cat(divergences).mean()
    expected.backward()
    gradient = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    largest = max(value.abs().max() for value in gradient.values())
    assert expected > 0.01 and largest > 0.01
    still = [
        dataclasses.replace(group, advantages=torch.zeros(len(group.completions), 1), rewards=None) for group in groups
    ]  # without advantages the loss is the KL term alone
    for packed, samples in ((False, 3), (True, 99), (True, 1)):
        cut = {"worker.actor.padding_free": packed, "worker.actor.micro_batch_size_per_device_for_update": samples}
        learner = learner_of(parts, changed(config, **cut), lambda: contextlib.nullcontext(reference))
        update = learner.prepare(still)
        trainer.model.zero_grad()
        loss = learner.accumulate(trainer.model_wrapped, update, unmoved=True)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for name, value in gradient.items():
            ours = dict(trainer.model.named_parameters())[name].grad
            assert (ours - value).abs().max() <= 1e-5 * largest, name
        per_group = learner.penalties(trainer.model_wrapped, update)
        ours = [row[: len(values)] for row, values in zip((r for g in per_group for r in g), divergences, strict=True)]
        torch.testing.assert_close(torch.cat(ours), torch.cat(divergences).detach(), rtol=1e-4, atol=1e-5)
    assert trainer.meter.totals(trainer.accelerator)["actor/kl_loss"] == pytest.approx(expected.item() / 0.7, rel=1e-5)
    trainer.model.zero_grad()


@pytest.mark.parametrize("lora, in_loss", [(4, True), (0, False)])
def test_full_kl_is_zero_before_the_first_update_and_then_grows(tmp_path, tmp_path_factory, lora, in_loss):
    changes = {
        "algorithm.disable_kl": False,
        "algorithm.use_kl_loss": in_loss,
        "algorithm.kl_penalty": "full",
        "worker.actor.model.lora.rank": lora,
        "worker.actor.optim.lr": 1e-2,
        "trainer.max_steps": 2,
        "trainer.val_before_train": False,
    }
    with session(settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)) as parts:
        parts.train()
        first, second = parts.trainer.state.log_history[:2]
    key = "actor/kl_loss" if in_loss else "actor/kl_penalty"
    assert first[key] == 0.0 < second[key]


@pytest.mark.slow
def test_full_kl_on_two_ranks_is_that_of_one(tmp_path):
    """Two steps, so that there is a KL in the second."""
    found = run(tmp_path, "qwen2_5_vl", "full kl", ("cpu", "multi_gpu"), steps=2)
    alone, both = found["cpu"], found["multi_gpu"]
    assert difference(alone["ranks"][0]["after"], both["ranks"][0]["after"]) <= 2e-5
    assert both["record"]["actor/kl_loss"] == pytest.approx(alone["record"]["actor/kl_loss"], rel=1e-3)
    assert alone["record"]["actor/kl_loss"] > 1e-5


@pytest.mark.parametrize("mode", AVERAGES)
def test_kl_and_entropy_may_be_averaged_apart_as_verl_does(parts, mode):
    """verl's gspo: the policy loss by sequence, the other terms by loss_agg_mode; here both are worked out alone."""
    parts, groups = parts
    base = changed(
        parts.config,
        **{
            "worker.actor.loss_type": "gspo_token",
            "worker.actor.loss_avg_mode": "seq",
            "algorithm.disable_kl": False,
            "algorithm.use_kl_loss": True,
            "algorithm.kl_penalty": "k2",
            "algorithm.kl_coef": 0.5,
            "worker.actor.entropy_coeff": 0.1,
        },
    )
    credit = Credit(base, parts.trainer.accelerator, parts.trainer.meter)
    groups = credit.assign(credit.flag(groups))
    config = changed(base, **{"worker.actor.penalty_avg_mode": mode})
    trainer, found = parts.trainer, {}
    for name, of in (
        ("both", config),
        ("without", changed(config, **{"algorithm.kl_coef": 0.0, "worker.actor.entropy_coeff": 0.0})),
    ):
        learner = learner_of(parts, of)
        update = learner.prepare(groups)
        update = update.having(
            old_log_probs=update.batch.sampler_log_probs - 0.1 * update.batch.tokens,
            ref_log_probs=update.batch.sampler_log_probs - 0.4 * update.batch.tokens,
        )
        (row,) = update.rows
        with torch.no_grad():
            found[name] = learner.loss(update, learner.scorer.score(trainer.model_wrapped, row), unmoved=False).item()
    scores = learner.scorer.score(trainer.model_wrapped, row)
    order = scores.samples
    mask, ours = update.batch.mask[order], scores.log_probs.detach()
    whole = dataclasses.replace(Denominators.of(mask), longest=8.0)
    divergence = 0.5 * (ours - update.batch.ref_log_probs[order]).square()
    expected = 0.5 * losses.average(divergence, mask, mode, whole)
    expected -= 0.1 * losses.average(scores.entropy.detach(), mask, mode, whole)
    assert found["both"] - found["without"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    trainer.meter.totals(trainer.accelerator)


def test_a_resumed_run_takes_a_new_kl_coefficient():
    before = kl.controller("adaptive", coef=0.1, target=0.1, horizon=100.0)
    before.update(1.0, 10)
    same, other = (kl.controller("adaptive", coef=coef, target=0.1, horizon=100.0) for coef in (0.1, 0.5))
    for controller in (same, other):
        controller.load_state_dict(before.state_dict())
    assert same.coef == before.coef != 0.1 and other.coef == 0.5


COMBINATIONS = [  # estimator, loss, average, KL estimator, in the loss, sampler's weights
    ("grpo", "gspo_token", "seq", "full", False, "sequence"),
    ("reinforce_plus_plus", "default", "token", "low_var_kl", False, "none"),
    ("rloo", "kl_cov", "seq-mean-token-sum", "k3+", True, "token"),
    ("remax", "geo_mean", "seq", "mse", False, "token"),
    ("gpg", "gpg", "seq-mean-token-sum-norm", "full", True, "none"),
    ("gdpo", "vespo", "token", "abs", True, "sequence"),
    ("opo", "dppo_kl", "token", "k1", False, "none"),
    ("grpo_passk", "cispo", "seq", "kl", False, "token"),
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join(row[0] for row in COMBINATIONS).split("-"))
def test_two_updates_of_a_step_do_not_depend_on_rows_whatever_is_combined(parts, combination, monkeypatch):
    """The trainer's own way from scored groups to gradients, KL in the reward or the loss, one answer unscored: padded
    in one piece and packed in single samples, to 1e-5 of the largest."""
    parts, groups = parts
    trainer = parts.trainer
    estimator, loss_type, average, penalty, in_loss, weights = combination
    config = changed(
        parts.config,
        **{
            "algorithm.adv_estimator": estimator,
            "algorithm.disable_kl": False,
            "algorithm.use_kl_loss": in_loss,
            "algorithm.kl_penalty": penalty,
            "algorithm.kl_coef": 0.1,
            "algorithm.rollout_is": weights,
            "worker.actor.loss_type": loss_type,
            "worker.actor.loss_avg_mode": average,
            "worker.actor.kl_cov_ratio": 0.3,
            "worker.actor.global_batch_size": 2,
            "worker.actor.dynamic_batching": False,
            "worker.actor.entropy_coeff": 0.01,
        },
    )
    groups = [dataclasses.replace(group, baseline=0.25 if group.index else None) for group in groups]
    reference = load_reference(config).requires_grad_(False)
    for number, weight in enumerate(reference.parameters()):
        weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
    monkeypatch.setattr(trainer, "ref_model", reference)
    found = []
    for packed, samples in ((False, 99), (True, 1)):
        cut = {"worker.actor.padding_free": packed, "worker.actor.micro_batch_size_per_device_for_update": samples}
        of_form = changed(config, **cut)
        learner = learner_of(parts, of_form, lambda: contextlib.nullcontext(reference))
        credit = Credit(of_form, trainer.accelerator, trainer.meter)
        values = {"config": of_form, "learner": learner, "credit": credit, "updates_per_step": 2}
        for name, value in values.items():
            monkeypatch.setattr(trainer, name, value)
        flagged = credit.flag(groups)
        assigned = flagged if credit.in_reward else credit.assign(flagged)
        updates = trainer._with_log_probs([learner.prepare(part) for part in split(assigned, 2, 2)])
        for number, update in enumerate(updates):
            if learner.selects:
                update = learner.selected(trainer.model_wrapped, update, number)
            trainer.model.zero_grad()
            loss = learner.accumulate(trainer.model_wrapped, update, unmoved=number == 0)
            found.append([loss.item(), {n: p.grad.clone() for n, p in trainer.model.named_parameters()}])
        totals = trainer.meter.totals(trainer.accelerator)
        assert all(math.isfinite(value) for value in totals.values())
        assert totals["actor/kl_loss" if in_loss else "actor/kl_penalty"] != 0
    for (loss, gradient), (other_loss, other) in zip(found[:2], found[2:], strict=True):
        largest = max(value.abs().max() for value in gradient.values())
        assert largest > 0 and other_loss == pytest.approx(loss, abs=1e-4)
        assert max((other[name] - value).abs().max() for name, value in gradient.items()) <= 1e-5 * largest
