"""A reward in a module of its own: a reward worker imports the module that a function comes from, and this one needs
none of what the tests need."""

import hashlib


def hashed_reward(reward_inputs: list[dict]) -> list[dict]:
    """Scores that differ within a group and depend on nothing but the text."""
    digests = [hashlib.blake2b(item["response"].encode(), digest_size=2).digest() for item in reward_inputs]
    return [{"overall": int.from_bytes(digest, "big") / 65535} for digest in digests]


def hashed_but_flat(reward_inputs: list[dict]) -> list[dict]:
    """The same, but one score for every answer to a row whose truth is "flat"."""
    flat = [item["ground_truth"] == "flat" for item in reward_inputs]
    scores = hashed_reward(reward_inputs)
    return [{"overall": 0.5} if same else score for same, score in zip(flat, scores, strict=True)]
