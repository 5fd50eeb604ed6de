"""The demo's model learns the same from packed rows as from padded samples."""

from argparse import Namespace

from benchmarks.ours_update import checked, settings, use_made_up_rollouts
from benchmarks.workload import DEMO_MODEL, Workload, questions, reward
from grpo_vlm.training.session import Session
from tests.training.rigs import largest_difference, parameters

WORKLOAD = Workload("demo", prompts=16, group=8, image_tokens=9, shortest=1, longest=12)
STEPS = 3


def train(folder, padding_free: bool):
    """Weights before and after three steps on rollouts that do not depend on the weights."""
    options = Namespace(folder=DEMO_MODEL, device="cpu", checkpointing=False, row_tokens=0)
    values = settings(options, WORKLOAD, folder, STEPS) | {
        "worker.actor.optim.lr": 1e-4,
        "worker.actor.padding_free": padding_free,
        "worker.rollout.name": "transformers",  # replaced by the ready answers
    }
    rows = [question.row() for question in questions(WORKLOAD, WORKLOAD.prompts * STEPS)]
    with Session(checked(values, []), train_rows=rows, reward=reward) as session:
        use_made_up_rollouts(session.trainer, WORKLOAD)
        before = parameters(session.trainer)
        session.train()
        return before, parameters(session.trainer)


def test_three_steps_lead_to_the_same_weights(tmp_path):
    before, packed = train(tmp_path / "packed", True)
    _, plain = train(tmp_path / "plain", False)
    assert largest_difference(before, packed) > 1e-4
    assert largest_difference(packed, plain) <= 1e-5
