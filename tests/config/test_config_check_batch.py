"""Each divisibility and length rule with its numbers, and a proposal that really satisfies every rule."""

import random
from collections.abc import Callable

import pytest

from grpo_vlm.config import Config
from grpo_vlm.config.check_batch import (
    GLOBAL,
    ROLLOUT,
    batch_faults,
    nearest_divisors,
    nearest_multiples,
    working_sizes,
)

Check = Callable[..., list[str]]


def config(rollout: int, update: int) -> Config:
    made = Config()
    made.data.rollout_batch_size, made.worker.actor.global_batch_size = rollout, update
    return made


def sizes_in(line: str) -> list[int]:
    """The two sizes of a line from working_sizes."""
    pairs = dict(item.split("=") for item in line.partition(": ")[2].split())
    return [int(pairs[key]) for key in (ROLLOUT, GLOBAL)]


def test_rollout_batch_not_a_multiple_of_the_update_batch(faults: Check) -> None:
    fault, closing = faults("data.rollout_batch_size=100")
    assert fault == (
        "data.rollout_batch_size: 100 is not a multiple of worker.actor.global_batch_size = 32, so that updates use "
        "whole batches (100 = 3 x 32 + 4); nearest that work: 96 or 128"
    )
    assert sizes_in(closing) == [96, 32]


def test_rollout_batch_smaller_than_the_update_batch(faults: Check) -> None:
    fault, closing = faults("data.rollout_batch_size=16")
    assert "(16 = 0 x 32 + 16); nearest that work: 32" in fault
    assert sizes_in(closing) == [32, 32]


def test_batches_that_the_processes_cannot_share_in_whole_groups(faults: Check) -> None:
    rollout, update, closing = faults(world_size=3)
    assert rollout == (
        "data.rollout_batch_size: 64 is not a multiple of the number of processes = 3, so that each process holds "
        "whole groups (64 = 21 x 3 + 1); nearest that work: 63 or 66"
    )
    assert update.startswith("worker.actor.global_batch_size: 32 is not a multiple of the number of processes = 3")
    assert update.endswith("nearest that work: 30 or 33")
    assert closing.startswith("Batch sizes that satisfy every rule with 3 process(es): ")
    assert sizes_in(closing) == [66, 33]


def test_every_broken_rule_is_reported(faults: Check) -> None:
    *lines, closing = faults("data.rollout_batch_size=50", f"{GLOBAL}=21", world_size=2)
    assert [line.split(":")[0] for line in lines] == [ROLLOUT, GLOBAL]
    assert batch_faults(config(*sizes_in(closing)), 2) == []


def test_a_proposal_always_satisfies_every_rule() -> None:
    draw = random.Random(0)
    broken = 0
    for _ in range(500):
        world = draw.choice([1, 2, 3, 4, 6, 8])
        made = config(draw.randint(1, 300), draw.randint(1, 200))
        broken += bool(batch_faults(made, world))
        sizes = sizes_in(working_sizes(made, world))
        assert batch_faults(config(*sizes), world) == []
        assert min(sizes) >= 1
    assert broken > 400


def test_a_proposal_leaves_sound_sizes_alone() -> None:
    assert sizes_in(working_sizes(config(512, 128), 8)) == [512, 128]


def test_sizes_below_one_are_the_range_checks_business() -> None:
    assert [fault.keys[0] for fault in batch_faults(config(64, 0), 1)] == []


@pytest.mark.parametrize(("value", "by", "expected"), [(7, 3, (6, 9)), (6, 3, (6, 6)), (2, 3, (3, 3))])
def test_nearest_multiples(value: int, by: int, expected: tuple[int, int]) -> None:
    assert nearest_multiples(value, by) == expected


@pytest.mark.parametrize(("number", "value", "expected"), [(12, 5, (4, 6)), (12, 4, (4, 4)), (12, 99, (12, 12))])
def test_nearest_divisors(number: int, value: int, expected: tuple[int, int]) -> None:
    assert nearest_divisors(number, value) == expected


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_model_len"])
def test_the_engines_limits_hold_a_prompt_and_its_response(name: str, faults: Check, notices: Check) -> None:
    (fault,) = faults(f"worker.rollout.{name}=1000")
    assert fault == (
        f"worker.rollout.{name}: 1000 is less than data.max_prompt_length 512 + data.max_response_length 512 = 1024; "
        "set it to at least 1024 or shorten one of them"
    )
    assert notices(f"worker.rollout.{name}=1024") == []


def test_a_pass_of_the_server_holds_its_longest_sequence(faults: Check, notices: Check) -> None:
    items = ["worker.rollout.max_model_len=2000", "worker.rollout.max_num_batched_tokens=1500"]
    (fault,) = faults(*items)
    assert fault == (
        "worker.rollout.max_num_batched_tokens: 1500 is less than worker.rollout.max_model_len = 2000; raise the "
        "first or lower the second"
    )
    assert notices(items[0], "worker.rollout.max_num_batched_tokens=2000") == []


def test_transformers_has_none_of_the_servers_limits(notices: Check) -> None:
    items = ["data.max_prompt_length=9000", "worker.rollout.val_override_config.max_tokens=600"]
    assert notices(*items, "worker.rollout.name=transformers") == []


def test_validation_may_not_be_longer_than_the_engine_allows(faults: Check, notices: Check) -> None:
    (fault,) = faults("worker.rollout.val_override_config.max_tokens=600")
    assert fault == (
        "worker.rollout.val_override_config.max_tokens: 600 does not fit; after data.max_prompt_length 512 the engine "
        "has room for 512 tokens; lower it, or set worker.rollout.max_model_len to 1112"
    )
    assert notices("worker.rollout.val_override_config.max_tokens=600", "worker.rollout.max_model_len=1112") == []
