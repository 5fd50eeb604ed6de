"""Batch arithmetic: every divisibility and length rule, with the numbers filled in and the nearest values that work.

data.rollout_batch_size R and worker.actor.global_batch_size B count prompts; each has n = worker.rollout.n responses.
A group stays whole on one of the W processes, so that each holds R / W and B / W prompts.
"""

import math

from grpo_vlm.config.faults import Fault
from grpo_vlm.config.schema import Config

ROLLOUT = "data.rollout_batch_size"
GLOBAL = "worker.actor.global_batch_size"


def batch_faults(config: Config, world_size: int) -> list[Fault]:
    """One fault for each divisibility rule that is broken. Sizes below 1 are left to the range checks."""
    rollout, update = config.data.rollout_batch_size, config.worker.actor.global_batch_size
    faults = []
    if update > 0 and rollout % update:
        faults.append(_indivisible(ROLLOUT, rollout, GLOBAL, update, "so that updates use whole batches"))
    for key, value in ((ROLLOUT, rollout), (GLOBAL, update)):
        if value % world_size:
            reason = "so that each process holds whole groups"
            faults.append(_indivisible(key, value, "the number of processes", world_size, reason))
    return faults


def _indivisible(key: str, value: int, by_key: str, by: int, reason: str) -> Fault:
    below, above = nearest_multiples(value, by)
    nearest = " or ".join(str(item) for item in dict.fromkeys((below, above)))
    text = (
        f"{key}: {value} is not a multiple of {by_key} = {by}, {reason} "
        f"({value} = {value // by} x {by} + {value % by}); nearest that work: {nearest}"
    )
    return Fault((key, by_key), text)


def nearest_multiples(value: int, by: int) -> tuple[int, int]:
    """The nearest positive multiples of `by` from below and above; equal when only one exists or value is one."""
    above = -(-value // by) * by
    return max(value // by * by, by), above


def nearest_divisors(number: int, value: int) -> tuple[int, int]:
    """The nearest divisors of `number` from below and above `value`; equal when only one exists or value is one."""
    divisors = [item for item in range(1, number + 1) if number % item == 0]
    below = max(item for item in divisors if item <= value)
    return below, min((item for item in divisors if item >= value), default=below)


def working_sizes(config: Config, world_size: int) -> str:
    """One line with two batch sizes that satisfy every rule: fewest changed from the given ones, then nearest."""
    wanted = (max(config.data.rollout_batch_size, 1), max(config.worker.actor.global_batch_size, 1))
    rollout, update = wanted
    updates = set(nearest_multiples(update, world_size))
    if rollout % world_size == 0:
        updates |= {
            item * world_size for item in nearest_divisors(rollout // world_size, max(update // world_size, 1))
        }
    candidates = [
        (new_rollout, new_update)
        for new_update in sorted(updates, reverse=True)
        for new_rollout in nearest_multiples(rollout, new_update)
    ]

    def distance(candidate: tuple[int, int]) -> tuple[int, float]:
        pairs = list(zip(candidate, wanted, strict=True))
        return sum(new != old for new, old in pairs), sum(abs(math.log(new / old)) for new, old in pairs)

    best = min(candidates, key=distance)
    text = " ".join(f"{key}={value}" for key, value in zip((ROLLOUT, GLOBAL), best, strict=True))
    return f"Batch sizes that satisfy every rule with {world_size} process(es): {text}"


def length_faults(config: Config) -> list[Fault]:
    """Rules between the lengths of prompt and response and the limits of the vLLM server; transformers has none."""
    data, rollout = config.data, config.worker.rollout
    if rollout.name != "vllm":
        return []
    total = data.max_prompt_length + data.max_response_length
    prompt, response = data.max_prompt_length, data.max_response_length
    sums = f"data.max_prompt_length {prompt} + data.max_response_length {response} = {total}"
    lengths = ("data.max_prompt_length", "data.max_response_length")
    faults = []
    for name in ("max_num_batched_tokens", "max_model_len"):
        limit, key = getattr(rollout, name), f"worker.rollout.{name}"
        if limit is not None and limit < total:
            text = f"{key}: {limit} is less than {sums}; set it to at least {total} or shorten one of them"
            faults.append(Fault((key, *lengths), text))
    batched, longest = rollout.max_num_batched_tokens, rollout.max_model_len
    if longest is not None and total <= batched < longest:
        key, longest_key = "worker.rollout.max_num_batched_tokens", "worker.rollout.max_model_len"
        text = f"{key}: {batched} is less than {longest_key} = {longest}; raise the first or lower the second"
        faults.append(Fault((key, longest_key), text))
    max_tokens = rollout.val_override_config.get("max_tokens")
    room = (rollout.max_model_len or total) - prompt
    if isinstance(max_tokens, int) and max_tokens > room:
        key = "worker.rollout.val_override_config.max_tokens"
        text = (
            f"{key}: {max_tokens} does not fit; after data.max_prompt_length {prompt} the engine has room for {room} "
            f"tokens; lower it, or set worker.rollout.max_model_len to {prompt + max_tokens}"
        )
        faults.append(Fault((key, *lengths), text))
    return faults
