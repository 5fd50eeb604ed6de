"""A session whose engine runs, shared by the tests of a file."""

import dataclasses

import pytest

from tests.training.rigs import session, settings


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
