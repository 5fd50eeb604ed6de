"""A reward in a module of its own: a reward worker imports the module that a function comes from, and this one needs
none of what the tests need."""

import hashlib


def hashed_reward(reward_inputs: list[dict]) -> list[dict]:
    """Scores that differ within a group and depend on nothing but the text."""
    digests = [hashlib.blake2b(item["response"].encode(), digest_size=2).digest() for item in reward_inputs]
    return [{"overall": int.from_bytes(digest, "big") / 65535} for digest in digests]
