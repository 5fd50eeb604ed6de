"""Rules between the keys of the algorithm section and those that they lean on, and notices of keys without effect."""

from grpo_vlm.config.check_sharding import Launched
from grpo_vlm.config.faults import Fault
from grpo_vlm.config.schema import Config
from grpo_vlm.config.schema_algorithm import ESTIMATORS

# Loss types that say how they are averaged (algorithms/losses.py has the formulas; a test compares).
IMPLIED_AVERAGES = {
    "grpo": "seq",
    "bnpo": "token",
    "dapo": "token",
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
GROUPLESS = ("reinforce_plus_plus", "remax")  # estimators that need no second answer to compare with


# Settings of the losses -> the loss types that read them.
CLIPPED = ("default", "grpo", "bnpo", "dapo", "dr_grpo", "gspo", "gspo_token", "luspo")
READ_BY = {
    ("clip_ratio_low", "clip_ratio_high"): (*CLIPPED, "cispo", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"),
    ("clip_ratio_dual",): (*CLIPPED, "dppo_tv", "dppo_kl"),
    ("tau_positive", "tau_negative"): ("sapo",),
    ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"): ("clip_cov",),
    ("kl_cov_ratio", "kl_cov_coef"): ("kl_cov",),
    ("vespo_k_positive", "vespo_lambda_positive", "vespo_k_negative", "vespo_lambda_negative"): ("vespo",),
}


def algorithm_faults(config: Config, world_size: int, launch: Launched) -> list[Fault]:
    """Settings that contradict each other, or the launcher."""
    algorithm, actor, data = config.algorithm, config.worker.actor, config.data
    faults = []
    implied = IMPLIED_AVERAGES.get(actor.loss_type)
    if implied is not None and actor.loss_avg_mode not in (None, implied):
        text = (
            f"worker.actor.loss_avg_mode: {actor.loss_avg_mode} contradicts worker.actor.loss_type = "
            f"{actor.loss_type}, whose average is {implied}; remove loss_avg_mode, or take loss_type default with it"
        )
        faults.append(Fault(("worker.actor.loss_avg_mode", "worker.actor.loss_type"), text))
    n = config.worker.rollout.n
    if n < 2 and algorithm.adv_estimator in ESTIMATORS and algorithm.adv_estimator not in GROUPLESS:
        text = (
            f"worker.rollout.n: {n} gives no advantage with algorithm.adv_estimator = {algorithm.adv_estimator}, "
            "which compares the responses of a group; set it to 2 or more, e.g. 5"
        )
        faults.append(Fault(("worker.rollout.n",), text))
    if algorithm.adv_estimator == "gdpo" and not algorithm.disable_kl and not algorithm.use_kl_loss:
        text = (
            "algorithm.adv_estimator: gdpo normalises each reward by itself and has no place for a KL term in the "
            "reward; set algorithm.use_kl_loss=true or algorithm.disable_kl=true"
        )
        faults.append(Fault(("algorithm.adv_estimator", "algorithm.use_kl_loss"), text))
    if algorithm.kl_penalty == "full" and not algorithm.disable_kl and not launch.whole:
        text = (
            "algorithm.kl_penalty: full needs policy and reference whole in every process, and the launcher started "
            f"{launch.name}; take low_var_kl (k3), which has the same mean, or launch with "
            "accelerate_configs/multi_gpu.yaml"
        )
        faults.append(Fault(("algorithm.kl_penalty",), text))
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if weights and len(weights) != len(keys):
        text = (
            f"algorithm.gdpo_reward_weights: {len(weights)} weights for {len(keys)} algorithm.gdpo_reward_keys; give "
            "one for each"
        )
        faults.append(Fault(("algorithm.gdpo_reward_weights", "algorithm.gdpo_reward_keys"), text))
    for low, high in (("filter_low", "filter_high"), ("rollout_is_threshold_low", "rollout_is_threshold")):
        below, above = getattr(algorithm, low), getattr(algorithm, high)
        if below >= above:
            text = f"algorithm.{low}: {below:g} is not below algorithm.{high} = {above:g}, so nothing is left"
            faults.append(Fault((f"algorithm.{low}", f"algorithm.{high}"), text))
    if algorithm.ref_model_sync_steps is not None and actor.model.lora.rank > 0 and not algorithm.disable_kl:
        text = (
            f"algorithm.ref_model_sync_steps: {algorithm.ref_model_sync_steps} has no model to move: with "
            "worker.actor.model.lora.rank above 0 the reference is the policy without its adapters; set it to null"
        )
        faults.append(Fault(("algorithm.ref_model_sync_steps", "worker.actor.model.lora.rank"), text))
    size = data.mini_rollout_batch_size
    if algorithm.online_filtering and size is not None and size % world_size:
        text = (
            f"data.mini_rollout_batch_size: {size} is not a multiple of the number of processes = {world_size}, so "
            f"that each process holds whole groups; nearest that work: {max(size // world_size, 1) * world_size}"
        )
        faults.append(Fault(("data.mini_rollout_batch_size",), text))
    return faults


def algorithm_notices(config: Config) -> list[str]:
    """Lines about valid settings that change nothing."""
    algorithm, default = config.algorithm, type(config.algorithm)()
    without_kl, in_loss = algorithm.disable_kl, algorithm.use_kl_loss
    switches = ("use_kl_loss", "kl_type", "ref_model_sync_steps")
    kl_keys = [name for name in switches if getattr(algorithm, name) != getattr(default, name)]
    lines = {
        f"algorithm.{', '.join(kl_keys)}: no effect, algorithm.disable_kl is true": without_kl and kl_keys,
        "algorithm.kl_type adaptive has no effect: it steers the KL term in the reward only": (
            algorithm.kl_type == "adaptive" and in_loss and not without_kl
        ),
        "algorithm.kl_horizon and kl_target have no effect: algorithm.kl_type is fixed": (
            not without_kl
            and algorithm.kl_type == "fixed"
            and (algorithm.kl_horizon, algorithm.kl_target) != (default.kl_horizon, default.kl_target)
        ),
        "algorithm.mask_truncated_completions has no effect: algorithm.overlong_filtering leaves out more": (
            algorithm.mask_truncated_completions and algorithm.overlong_filtering
        ),
        "trainer.max_try_make_batch has no effect: algorithm.online_filtering is false": (
            not algorithm.online_filtering
            and config.trainer.max_try_make_batch != type(config.trainer)().max_try_make_batch
        ),
        "algorithm.gamma has no effect: only adv_estimator reinforce_plus_plus has it": (
            algorithm.gamma != default.gamma and algorithm.adv_estimator != "reinforce_plus_plus"
        ),
        "worker.actor.penalty_avg_mode has no effect: neither KL nor entropy is in the loss": (
            config.worker.actor.penalty_avg_mode is not None
            and (without_kl or not in_loss)
            and not config.worker.actor.entropy_coeff
        ),
        "algorithm.filter_* and data.mini_rollout_batch_size have no effect: algorithm.online_filtering is false": (
            not algorithm.online_filtering
            and (
                algorithm.filter_zero_variance
                or config.data.mini_rollout_batch_size is not None
                or any(
                    getattr(algorithm, name) != getattr(default, name)
                    for name in ("filter_key", "filter_low", "filter_high")
                )
            )
        ),
        "algorithm.rollout_is_threshold_low has no effect: algorithm.rollout_is_mode is not mask": (
            algorithm.rollout_is_threshold_low > 0 and algorithm.rollout_is_mode != "mask"
        ),
        "algorithm.gdpo_reward_keys and _weights have no effect: algorithm.adv_estimator is not gdpo": (
            bool(algorithm.gdpo_reward_keys) and algorithm.adv_estimator != "gdpo"
        ),
        "algorithm.norm_adv_by_std_in_grpo has no effect: only grpo, grpo_passk and gdpo divide": (
            not algorithm.norm_adv_by_std_in_grpo and algorithm.adv_estimator not in ("grpo", "grpo_passk", "gdpo")
        ),
        "algorithm.rollout_is_mode and its thresholds have no effect: algorithm.rollout_is is none": (
            algorithm.rollout_is == "none"
            and (algorithm.rollout_is_mode, algorithm.rollout_is_threshold)
            != (default.rollout_is_mode, default.rollout_is_threshold)
        ),
    }
    return [line for line, holds in lines.items() if holds] + _unread(config)


def _unread(config: Config) -> list[str]:
    """Settings of the loss that the loss type does not read."""
    actor, default = config.worker.actor, type(config.worker.actor)()
    lines = []
    for names, types in READ_BY.items():
        changed = [name for name in names if getattr(actor, name) != getattr(default, name)]
        if changed and actor.loss_type not in types:
            lines.append(f"worker.actor.{', '.join(changed)}: no effect with loss_type {actor.loss_type}")
    return lines
