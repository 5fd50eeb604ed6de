"""DAPO's reward: 1 or -1 for the answer behind the last "Answer:", and a penalty for completions near the limit.

overall = accuracy + overlong_penalty_factor * overlong, as in EasyR1's dapo reward. `accuracy_normalized` is 0 or 1,
for algorithm.filter_key. Edit freely. Use, with worker.reward.reward_function=./rewards/dapo.py:compute_score,
worker.reward.reward_function_kwargs={max_response_length: 2048, overlong_buffer_length: 512,
overlong_penalty_factor: 1.0}
"""

import re

from grpo_vlm.rewards.grade import grade
from grpo_vlm.rewards.overlong import overlong_penalty

REWARD_TYPE = "batch"
TAIL = 300  # characters of the response that may hold the answer
ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)


def accuracy_score(response, ground_truth, tolerance=0.0):
    answers = ANSWER.findall(response[-TAIL:])
    right = bool(answers) and grade(f"Answer: {answers[-1]}", ground_truth, tolerance=tolerance).correct
    return 1.0 if right else -1.0


def compute_score(reward_inputs, max_response_length, overlong_buffer_length, overlong_penalty_factor, tolerance=0.0):
    scores = []
    for item in reward_inputs:
        accuracy = accuracy_score(item["response"], item["ground_truth"], tolerance)
        overlong = overlong_penalty(item["response_length"], max_response_length, overlong_buffer_length)
        scores.append(
            {
                "overall": accuracy + overlong_penalty_factor * overlong,
                "accuracy": accuracy,
                "overlong": overlong,
                "accuracy_normalized": (accuracy + 1) / 2,
            }
        )
    return scores
