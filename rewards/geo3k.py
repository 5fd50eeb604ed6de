"""Reward for mathematics with pictures: think first, answer in \\boxed{}. Edit freely; nothing else has to change.

overall = 0.9 * accuracy + 0.1 * format, as in EasyR1's math reward. Use:
worker.reward.reward_function=./rewards/geo3k.py:compute_score
"""

import re

from math_verify import parse, verify

REWARD_TYPE = "batch"
SPACED = re.compile(r"\s*(<|>|/)\s*")  # some models write "< think >"
FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def boxed_answer(text):
    """The content of the last \\boxed{...} whose braces balance, or None."""
    for start in reversed([match.end() for match in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for position in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start:position].strip()
    return None


def format_score(response):
    return 1.0 if FORMAT.fullmatch(SPACED.sub(r"\1", response).strip()) else 0.0


def accuracy_score(response, ground_truth):
    answer = boxed_answer(response)
    if not answer:
        return 0.0
    if answer.replace(" ", "") == ground_truth.replace(" ", ""):
        return 1.0
    return 1.0 if verify(parse(f"${ground_truth}$"), parse(f"${answer}$")) else 0.0


def compute_score(reward_inputs, format_weight=0.1):
    scores = []
    for item in reward_inputs:
        form, accuracy = format_score(item["response"]), accuracy_score(item["response"], item["ground_truth"])
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
