"""Online filtering in whole runs: full batches, resumes, errors."""

import json

import pytest

from grpo_vlm.errors import DataError
from grpo_vlm.training.rounds import Rounds
from tests.training.rigs import largest_difference, parameters, session, settings
from tests.training.updates import changed

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
            return parameters(parts.trainer), records, parts.trainer.rounds.drawn, parts.trainer.credit.kl.coef

    whole, records, drawn, coefficient = train("whole", 3)
    assert drawn == 5 * sum(record["filter/rounds"] for record in records) > 5 * 3  # more than one a step
    assert records[1]["filter/kept_for_next_step"] > 0  # in the checkpoint of step 2
    assert all(0.35 < record["critic/score/mean"] < 0.65 for record in records)
    train("broken", 2)
    resumed, more, _, resumed_coefficient = train("broken", 3)
    assert more[-1]["critic/score/mean"] == records[-1]["critic/score/mean"]
    assert largest_difference(whole, resumed) == 0.0 and coefficient == resumed_coefficient != 1e-3


def test_filtering_switched_on_at_a_resume_draws_what_follows(tmp_path, tmp_path_factory):
    root = tmp_path_factory.getbasetemp()
    plain = {**FILTERING, "algorithm.online_filtering": False, "trainer.max_steps": 2, "trainer.save_freq": 2}
    with session(settings(root, tmp_path / "run", **plain), count=40) as parts:
        parts.train()
    with session(settings(root, tmp_path / "run", **{**FILTERING, "trainer.max_steps": 3}), count=40) as parts:
        plan, seen = parts.trainer.prompts, []
        plan.round, take = lambda number: (seen.append(number), take(number))[1], plan.round
        parts.train()
    assert seen == list(range(2, 2 + len(seen)))  # 8 prompts were drawn, a round has 5
    assert parts.trainer.rollout_step == 3


def test_groups_that_filtering_kept_are_let_go_where_it_is_switched_off(parts):
    parts, groups = parts
    trainer, kept = parts.trainer, {}
    for filtering in (True, False):
        config = changed(parts.config, **{"algorithm.online_filtering": filtering})
        rounds = Rounds(config, trainer.collector, trainer.prompts, trainer.accelerator, trainer._phase)
        rounds.kept, rounds.drawn = [(3, groups[1])], 15
        resumed = Rounds(config, trainer.collector, trainer.prompts, trainer.accelerator, trainer._phase)
        resumed.load_state(json.loads(json.dumps(rounds.state())))
        assert resumed.drawn == 15
        kept[filtering] = [(row, group.scores, group.completions) for row, group in resumed.kept]
    assert kept == {True: [(3, groups[1].scores, groups[1].completions)], False: []}


def test_a_batch_that_cannot_be_filled_is_an_error_with_the_remedy(tmp_path, tmp_path_factory):
    never = {"algorithm.filter_low": 0.98, "algorithm.filter_high": 0.99, "trainer.max_try_make_batch": 2}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **{**FILTERING, **never})
    with session(config) as parts, pytest.raises(DataError, match=r"2 rounds .* widen the bounds"):
        parts.train()
