"""Reward for counting: 1 for the right number, optionally a part of it for a near one. Edit freely.

overall = (1 - near_weight) * accuracy + near_weight * near, with near = max(0, 1 - |counted - there| / there). With
near_weight 0, the default, nothing but the right number counts. Use:
worker.reward.reward_function=./rewards/counting.py:compute_score
"""

from grpo_vlm.rewards.grade import grade, value_of

REWARD_TYPE = "batch"


def nearness(response, ground_truth):
    counted, there = value_of(response), value_of(ground_truth)
    if counted is None or there is None:
        return 0.0
    return max(0.0, 1 - abs(counted - there) / max(abs(there), 1))


def compute_score(reward_inputs, near_weight=0.0):
    scores = []
    for item in reward_inputs:
        accuracy = float(grade(item["response"], item["ground_truth"]).correct)
        near = nearness(item["response"], item["ground_truth"])
        scores.append(
            {"overall": (1 - near_weight) * accuracy + near_weight * near, "accuracy": accuracy, "near": near}
        )
    return scores
