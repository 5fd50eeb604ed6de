"""DAPO's soft overlong penalty alone, 0 to -1, as one of several reward functions. Edit freely. Use:

worker.reward.reward_function=./rewards/length.py:compute_score
worker.reward.reward_function_kwargs={max_response_length: 2048, overlong_buffer_length: 512}
"""

from grpo_vlm.rewards.overlong import overlong_penalty

REWARD_TYPE = "batch"


def compute_score(reward_inputs, max_response_length, overlong_buffer_length):
    return [
        {"overall": overlong_penalty(item["response_length"], max_response_length, overlong_buffer_length)}
        for item in reward_inputs
    ]
