"""Schema of the algorithm section: advantages, the KL term, which groups and samples count, and the correction for the
sampler's log-probabilities. EasyR1's names; norm_adv_by_std_in_grpo, gdpo_*, rollout_is* are verl's,
mask_truncated_completions and ref_model_sync_steps TRL's."""

from dataclasses import dataclass

from grpo_vlm.config.options import above, above_to, at_least, between, neutral, option

ESTIMATORS = (
    "grpo",
    "grpo_passk",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gdpo",
)
KL_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl", "k1", "k2", "k3", "k1+", "k3+", "full")
_CRITIC = (
    "needs a value model beside the policy, which this trainer does not have. Instead: reinforce_plus_plus_baseline "
    "(whitened over the batch as gae is), grpo, rloo, opo, gpg (baseline from the group), remax (from a greedy answer)"
)


@dataclass
class AlgorithmConfig:
    """Advantages and the KL penalty."""

    gamma: float = option(
        1.0, "Discount of later rewards of a response, for reinforce_plus_plus.", rule=above_to(0, 1)
    )
    lam: float = neutral(1.0, "Lambda of the generalised advantage estimate.", "only adv_estimator gae has it")
    adv_estimator: str = option(
        "grpo",
        "How rewards become advantages: grpo = (reward - group mean) / (group std + 1e-6); the others are in "
        "docs/algorithms.md.",
        choices=ESTIMATORS,
        refused={"gae": _CRITIC},
        common=True,
    )
    norm_adv_by_std_in_grpo: bool = option(
        True, "Divide by the standard deviation of the group (grpo, grpo_passk, gdpo). false: Dr.GRPO."
    )
    gdpo_reward_keys: list[str] = option(
        [], "Scores of the reward function that gdpo normalises one by one. Empty: all but overall."
    )
    gdpo_reward_weights: list[float] = option([], "Weights of gdpo_reward_keys. Empty: 1 each.")
    disable_kl: bool = option(False, "No reference model and no KL term at all.", common=True)
    use_kl_loss: bool = option(False, "true: the KL term is in the loss; false: it is subtracted from the reward.")
    kl_penalty: str = option(
        "kl",
        "Estimator of the KL term: kl (k1), abs, mse (k2), low_var_kl (k3); k1+ and k3+ have the value of k1 and k3 "
        "and the gradient of k2; full is no estimate but the sum over the vocabulary (a pass of the reference at each "
        "update; not with DeepSpeed or FSDP).",
        choices=KL_ESTIMATORS,
    )
    kl_coef: float = option(1e-3, "Weight of the KL term.", rule=at_least(0), common=True)
    kl_type: str = option(
        "fixed",
        "Course of kl_coef: fixed, or adaptive = times 1 + clip(KL / kl_target - 1, -0.2, 0.2) x samples / kl_horizon "
        "after each step (KL in the reward only).",
        choices=("fixed", "adaptive"),
    )
    kl_horizon: float = option(10000.0, "Horizon of the adaptive kl_coef in samples.", rule=above(0))
    kl_target: float = option(0.1, "KL that the adaptive kl_coef aims at.", rule=above(0))
    ref_model_sync_steps: int | None = option(
        None, "Rollout steps after which the reference model becomes the policy. null: it stays.", rule=at_least(1)
    )
    online_filtering: bool = option(
        False,
        "Train on groups whose mean score lies between filter_low and filter_high only, and generate more until the "
        "batch is full; groups beyond it are kept for the next step.",
        common=True,
    )
    filter_key: str = option("overall", "Score that online filtering looks at.")
    filter_low: float = option(0.01, "Online filtering keeps group means above this.")
    filter_high: float = option(0.99, "Online filtering keeps group means below this.")
    filter_zero_variance: bool = option(
        False, "Online filtering leaves out groups whose scores are all the same, too (verl's filter_groups)."
    )
    mask_truncated_completions: bool = option(
        False, "Responses that were cut at their longest count in the group's statistics but not in the loss."
    )
    overlong_filtering: bool = option(
        False, "Responses that were cut at their longest count nowhere: neither in the group nor in the loss (DAPO)."
    )
    rollout_is: str = option(
        "none",
        "Weights for the difference between trainer's and sampler's probabilities: exp(old - sampler) of each token, "
        "or of the mean over the sequence.",
        choices=("none", "token", "sequence"),
    )
    rollout_is_mode: str = option(
        "truncate",
        "What happens to weights outside the thresholds: truncate = set to the upper one; mask = 0, the token or "
        "sequence is left out.",
        choices=("truncate", "mask"),
    )
    rollout_is_threshold: float = option(2.0, "Upper threshold of these weights.", rule=above(0))
    rollout_is_threshold_low: float = option(0.0, "Lower threshold of these weights (mask only).", rule=between(0, 1))
