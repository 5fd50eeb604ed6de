"""Reward for mathematics with pictures: think first, answer in \\boxed{}. Edit freely; nothing else has to change.

overall = 0.9 * accuracy + 0.1 * format, as in EasyR1's math reward. Use:
worker.reward.reward_function=./rewards/geo3k.py:compute_score
"""

import re

from grpo_vlm.rewards.grade import grade, last_box, with_prefill

REWARD_TYPE = "batch"
SPACED = re.compile(r"\s*(<|>|/)\s*")  # some models write "< think >"
FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def format_score(response):
    return 1.0 if FORMAT.fullmatch(SPACED.sub(r"\1", response).strip()) else 0.0


def accuracy_score(response, ground_truth, tolerance=0.0):
    answer = last_box(response)  # nothing but the last box counts, with a unit behind it
    return float(grade(f"\\boxed{{{answer}}}", ground_truth, tolerance=tolerance).correct) if answer else 0.0


def compute_score(reward_inputs, format_weight=0.1, tolerance=0.0):
    scores = []
    for item in reward_inputs:
        response = with_prefill(item["response"], item["prompt_text"])
        form, accuracy = format_score(response), accuracy_score(response, item["ground_truth"], tolerance)
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
