"""Reward for answers in tags: <think> ... </think> <answer> ... </answer>. Edit freely.

overall = 0.5 * accuracy + 0.5 * format, as in EasyR1's r1v reward; unlike there an answer may span several lines. Use:
worker.reward.reward_function=./rewards/r1v.py:compute_score
"""

import re

from grpo_vlm.rewards.grade import grade, last_tag, with_prefill

REWARD_TYPE = "sequential"
FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>", re.DOTALL)


def compute_score(reward_input, format_weight=0.5, tolerance=0.0):
    response = with_prefill(reward_input["response"], reward_input["prompt_text"])
    answer = last_tag(response)
    if answer is None:
        answer = response  # without tags the accuracy is that of the whole response
    accuracy = float(grade(answer, reward_input["ground_truth"], tolerance=tolerance).correct)
    form = float(FORMAT.fullmatch(response.strip()) is not None)
    return {"overall": (1 - format_weight) * accuracy + format_weight * form, "format": form, "accuracy": accuracy}
