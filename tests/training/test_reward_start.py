"""What a run says of its reward: at the start, of samples at fault, and of steps without anything to learn."""

import json

from grpo_vlm import Run
from grpo_vlm.report.console import Console
from grpo_vlm.report.record import StepRecord
from grpo_vlm.report.run_folder import FAULTS_NAME
from grpo_vlm.rewards.pool import Fault
from grpo_vlm.training.reward_start import SHOWN_FAULTS, ConstantReward, FaultLog
from tests.training.graded import graded
from tests.training.rigs import rows, settings

SOLUTION = "First we look at the triangle. Then we see that both of its sides are equal. So x must be seven."


def test_a_run_with_a_reward_that_fails_on_some_answers(tmp_path, tmp_path_factory, capsys):
    changes = {"worker.reward.on_error": "zero", "worker.reward.num_workers": 1, "trainer.logger": ["console", "file"]}
    config = settings(tmp_path_factory.getbasetemp(), tmp_path / "run", **changes)
    given = rows(8)
    given[5]["answer"] = SOLUTION
    result = Run(config, train_rows=given, reward=graded).train()
    faults = [json.loads(line) for line in (result.folder / FAULTS_NAME).read_text().splitlines()]
    shown = capsys.readouterr().out
    assert "reward of the bare gold answers of the first 4 rows" in shown and "overall 1, 1, 1, 1" in shown
    assert f"1 of 8 golds cannot be graded: rows:5 {SOLUTION[:40]!r}" in shown
    assert faults and all(fault["cause"] == "error" and fault["policy"] == "zero" for fault in faults)
    assert "ZeroDivisionError" in faults[0]["text"] and f"raised on row {faults[0]['row_id']}" in shown
    assert "step 1: every sample got the reward 0, so there was nothing to learn from" in shown


def test_the_console_names_some_faults_and_a_constant_reward_now_and_then(tmp_path, capsys):
    log, constant = FaultLog(Console()), ConstantReward(Console())
    log.write_to(tmp_path)
    for number in range(20):
        for _ in range(2):
            log(Fault("f", f"rows:{number}", "timeout", f"f took long on rows:{number}", "", "", 1.0, "none"))
        constant.log(StepRecord(number, {"critic/score/min": 0.5, "critic/score/max": 0.5}))
    constant.log(StepRecord(20, {"critic/score/min": 0.5, "critic/score/max": 0.6}))
    shown = capsys.readouterr().out
    assert shown.count("f took long") == SHOWN_FAULTS and len((tmp_path / FAULTS_NAME).read_text().splitlines()) == 40
    assert [f"step {number}: every" in shown for number in range(21)] == [n + 1 in (1, 2, 4, 8, 16) for n in range(21)]
