"""Reward for multiple choice: the letter or the text of the right option, in <answer> tags or \\boxed{}. Edit freely.

The options are the row's column `choices` (a list of texts); rows without it are graded by letter or text alone.
"A or B" is wrong, and so is "B. 12 cm" when option B says something else. Use:
worker.reward.reward_function=./rewards/choice.py:compute_score
"""

from grpo_vlm.rewards.grade import grade, last_box, last_tag

REWARD_TYPE = "batch"


def compute_score(reward_inputs, format_weight=0.1, choices_column="choices"):
    scores = []
    for item in reward_inputs:
        options = item["columns"].get(choices_column)
        choices = None if options is None or len(options) == 0 else [str(option) for option in options]
        accuracy = float(grade(item["response"], item["ground_truth"], choices=choices).correct)
        form = float(bool(last_tag(item["response"]) or last_box(item["response"])))
        overall = (1 - format_weight) * accuracy + format_weight * form
        scores.append({"overall": overall, "format": form, "accuracy": accuracy})
    return scores
