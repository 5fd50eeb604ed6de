"""One optimizer update on the groups of the fixture `parts`, under changed settings."""

import copy

import torch

from grpo_vlm.training.scoring import make_scorer
from grpo_vlm.training.update import Learner


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


def learner_of(parts, config, reference=None):
    trainer = parts.trainer
    scorer = trainer.learner.scorer
    made = make_scorer(config, trainer.model, banned_ids=scorer.banned_ids, padding=scorer.padding, sharded=False)
    return Learner(config, made, trainer.accelerator, trainer.meter, reference)


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
