"""Reward for easy-VQA: 1 for the right answer in the asked form, `\\boxed{circle}` and nothing else. Edit freely.

`names_it` is only logged: the right word stands anywhere in the answer, whatever the form.
"""

import re

REWARD_TYPE = "batch"


def compute_score(reward_inputs):
    scores = []
    for item in reward_inputs:
        response, answer = item["response"].strip(), item["ground_truth"]
        named = re.search(rf"\b{re.escape(answer)}\b", response) is not None
        scores.append({"overall": float(response == f"\\boxed{{{answer}}}"), "names_it": float(named)})
    return scores
