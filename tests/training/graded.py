"""A reward that uses our grader and fails on some answers, in a module that costs a reward worker little to import."""


def graded(solution_str: str, ground_truth: str) -> float:
    """0 for every answer of an untrained model; raises for about every fifth."""
    from grpo_vlm.rewards.grade import grade  # as late as this: the check of the golds still finds out

    if len(solution_str) > 1 and sum(map(ord, solution_str)) % 5 == 0:
        raise ZeroDivisionError(solution_str)
    return float(grade(solution_str, ground_truth).correct)
