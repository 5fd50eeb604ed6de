"""verl's options that have to be read together: the KL term, passes, losses, validation, rewards, resuming.

Each function reads what it needs from a Reading and writes our keys to it; sources of formulas and of verl's meaning
are in algorithms/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_vlm.config.dialect_verl_keys import ENGINE, REWARD_MODEL, A, M, R
from grpo_vlm.config.reward_sources import BY_DATA_SOURCE

MISSING = object()


@dataclass
class Reading:
    """What a verl command line says, and what has been made of it."""

    given: dict[str, Any]
    """verl's keys that are named -> value."""
    defaults: Mapping[str, Any]
    """Values of keys that are not named, where they count."""
    made: list[tuple[tuple[str, ...], str, Any]] = field(default_factory=list)
    """verl's keys, our key, its value, in order."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """verl's key, why nothing takes it."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """verl's key, why its value is refused."""

    def get(self, key: str, default: Any = None) -> Any:
        return self.given.get(key, self.defaults.get(key, default))

    def names(self, *keys: str) -> bool:
        """Whether any of the keys is named."""
        return any(key in self.given for key in keys)

    def put(self, to: str, value: Any, *keys: str) -> None:
        self.made.append((keys, to, value))

    def leave(self, key: str, reason: str) -> None:
        if key in self.given:
            self.left.append((key, reason))

    def refuse(self, key: str, reason: str) -> None:
        self.refused.append((key, reason))


def files(read: Reading) -> None:
    """A list of files is a mixture, whose parts a comma separates."""
    for key in ("data.train_files", "data.val_files"):
        if read.names(key):
            value = read.get(key)
            read.put(key, ",".join(map(str, value)) if isinstance(value, list) else value, key)


def pixels(read: Reading) -> None:
    """verl leaves pictures to qwen_vl_utils, which keeps them between 4 and 16384 merged patches of 28 x 28."""
    key = "data.mm_processor_kwargs"
    given = read.get(key) or {}
    for name, default in (("min_pixels", 4 * 28 * 28), ("max_pixels", 16384 * 28 * 28)):
        read.put(f"data.{name}", given.get(name, default), *([key] if name in given else []))
    if unknown := sorted(set(given) - {"min_pixels", "max_pixels"}):
        read.refuse(key, f"{', '.join(unknown)}: the processor is given min_pixels and max_pixels only")


def passes(read: Reading) -> None:
    """How much one pass takes: tokens with use_dynamic_bsz, else samples."""
    dynamic, tokens, samples = (
        A + name for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
    )
    read.put("worker.actor.dynamic_batching", read.get(dynamic), dynamic)
    if read.get(dynamic):
        read.put("worker.actor.max_token_len_per_gpu", read.get(tokens), tokens)
        read.leave(samples, f"{dynamic} counts tokens")
        return
    if read.names(samples) and read.get(samples) is not None:
        read.put("worker.actor.micro_batch_size_per_device_for_update", read.get(samples), samples)
    read.leave(tokens, f"without {dynamic} a pass has a number of samples")


UNCLIPPED = ("sapo", "gpg", "kl_cov")  # losses without a clip
DUAL = ("vanilla", "dppo_tv", "dppo_kl")  # those that read clip_ratio_c


def clipping(read: Reading) -> None:
    """clip_ratio_low and clip_ratio_high; verl reads clip_ratio itself where these are null, which they never are."""
    both, mode = A + "clip_ratio", read.get(A + "policy_loss.loss_mode")
    if mode in UNCLIPPED:
        for name in ("", "_low", "_high"):
            read.leave(both + name, f"loss_mode {mode} does not clip")
        return
    if read.names(both):
        read.leave(both, "verl clips at clip_ratio_low and clip_ratio_high, 0.2 each unless they are set")
    for side in ("low", "high"):
        own = A + f"clip_ratio_{side}"
        read.put(f"worker.actor.clip_ratio_{side}", read.get(own), own)


LOSSES = {
    "vanilla": "default",
    "gspo": "gspo_token",
    "sapo": "sapo",
    "cispo": "cispo",
    "gpg": "gpg",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "geo_mean": "geo_mean",
    "dppo_tv": "dppo_tv",
    "dppo_kl": "dppo_kl",
}
BY_SEQUENCE = ("gspo", "sapo", "geo_mean")  # verl averages these by sequence; loss_agg_mode is for KL and entropy
AVERAGES = {
    "token-mean": "token",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
}


def losses(read: Reading) -> None:
    """Policy loss and its average."""
    mode_key, average_key, dual_key = A + "policy_loss.loss_mode", A + "loss_agg_mode", A + "clip_ratio_c"
    mode, average = read.get(mode_key), read.get(average_key)
    if mode not in LOSSES:
        read.refuse(mode_key, f"{mode!r} is not here; available: {', '.join(LOSSES)}")
    else:
        read.put("worker.actor.loss_type", LOSSES[mode], mode_key)
    if mode in BY_SEQUENCE:
        read.put("worker.actor.loss_avg_mode", "seq-mean-token-mean", mode_key)
        terms = read.get(A + "use_kl_loss") or read.get(A + "entropy_coeff")
        if average not in AVERAGES:
            read.refuse(average_key, f"{average!r} is not here; available: {', '.join(AVERAGES)}")
        elif average != "seq-mean-token-mean" and terms:
            read.put("worker.actor.penalty_avg_mode", AVERAGES[average], average_key)
        elif average != "seq-mean-token-mean":
            read.leave(average_key, f"verl averages {mode} by sequence, and there are no KL and entropy terms")
        else:
            read.put("worker.actor.loss_avg_mode", AVERAGES[average], average_key)
    elif average not in AVERAGES:
        read.refuse(average_key, f"{average!r} is not here; available: {', '.join(AVERAGES)}")
    else:
        read.put("worker.actor.loss_avg_mode", AVERAGES[average], average_key)
    if mode == "gspo":
        read.put("worker.actor.clip_ratio_dual", None, mode_key)
        read.leave(dual_key, "verl's gspo has no dual clip")
    elif mode not in DUAL:
        read.leave(dual_key, f"loss_mode {mode} does not read it")
    else:
        read.put("worker.actor.clip_ratio_dual", read.get(dual_key), dual_key)
    for name, (needed, to) in COVARIANCE.items():
        key = A + f"policy_loss.{name}"
        if mode == needed:
            read.put(to, read.get(key), key)
        else:
            read.leave(key, f"loss_mode {mode} does not read it")
    read.leave(A + "policy_loss.dro_beta", "there is no dro loss")


COVARIANCE = {
    "clip_cov_ratio": ("clip_cov", "worker.actor.clip_cov_ratio"),
    "clip_cov_lb": ("clip_cov", "worker.actor.clip_cov_lb"),
    "clip_cov_ub": ("clip_cov", "worker.actor.clip_cov_ub"),
    "kl_cov_ratio": ("kl_cov", "worker.actor.kl_cov_ratio"),
    "ppo_kl_coef": ("kl_cov", "worker.actor.kl_cov_coef"),
}


def kl_term(read: Reading) -> None:
    """The KL term in the loss, in the reward, or nowhere (then there is no reference model)."""
    in_loss, in_reward = A + "use_kl_loss", "algorithm.use_kl_in_reward"
    loss_keys = {"kl_coef": A + "kl_loss_coef", "kl_penalty": A + "kl_loss_type"}
    reward_keys = {
        "kl_coef": "algorithm.kl_ctrl.kl_coef",
        "kl_penalty": "algorithm.kl_penalty",
        "kl_type": "algorithm.kl_ctrl.type",
        "kl_horizon": "algorithm.kl_ctrl.horizon",
        "kl_target": "algorithm.kl_ctrl.target_kl",
    }
    if read.get(in_loss) and read.get(in_reward):
        read.refuse(in_reward, f"the KL term is in the loss or in the reward, not in both; {in_loss} is true as well")
        read.put("algorithm.use_kl_loss", True, in_loss)
        return
    used = loss_keys if read.get(in_loss) else reward_keys if read.get(in_reward) else {}
    read.put("algorithm.disable_kl", not used, in_loss, in_reward)
    if used:
        read.put("algorithm.use_kl_loss", bool(read.get(in_loss)), in_loss, in_reward)
    for name, key in used.items():
        read.put(f"algorithm.{name}", read.get(key), key)
    for key in {*loss_keys.values(), *reward_keys.values()} - set(used.values()):
        read.leave(key, f"{in_loss if key in loss_keys.values() else in_reward} is false")


def validation(read: Reading) -> None:
    """Validation samples by val_kwargs: greedily, unless do_sample is true."""
    key = R + "val_kwargs."
    greedy = not read.get(key + "do_sample")
    values = {
        "temperature": 0.0 if greedy else read.get(key + "temperature"),
        "top_p": read.get(key + "top_p"),
        "top_k": -1 if read.get(key + "top_k") == 0 else read.get(key + "top_k"),
        "n": read.get(key + "n"),
    }
    named = [key + name for name in ("do_sample", *values) if read.names(key + name)]
    read.put("worker.rollout.val_override_config", values, *named)
    if greedy and read.get(key + "temperature"):
        read.leave(key + "temperature", f"{key}do_sample is false: validation is greedy")


METRICS = {
    "acc": "accuracy",
    "score": "overall",
    "seq_reward": "overall",
    "seq_final_reward": "overall",
    None: "overall",
}


def filtering(read: Reading) -> None:
    """filter_groups drops groups whose scores are all equal, whatever their mean."""
    key = "algorithm.filter_groups."
    if not read.get(key + "enable"):
        for name in ("enable", "metric", "max_num_gen_batches", "max_inflight_gen_batches"):
            read.leave(key + name, f"{key}enable is false")
        return
    metric = read.get(key + "metric")
    read.put("algorithm.online_filtering", True, key + "enable")
    own_reward = any(read.get(f"{prefix}custom_reward_function.path") for prefix in ("", "reward."))
    name = metric if own_reward and metric == "acc" else METRICS.get(metric, metric)  # ours call it accuracy
    read.put("algorithm.filter_key", name, key + "metric")
    read.put("algorithm.filter_zero_variance", True, key + "enable")
    read.put("algorithm.filter_low", -1e9, key + "enable")
    read.put("algorithm.filter_high", 1e9, key + "enable")
    rounds = key + "max_num_gen_batches"
    if read.names(rounds):
        read.put("trainer.max_try_make_batch", read.get(rounds) or -1, rounds)
    read.leave(key + "max_inflight_gen_batches", "one batch is generated at a time")


def mismatch(read: Reading) -> None:
    """rollout_correction: importance weights of the sampler, or samples masked by them."""
    key = "algorithm.rollout_correction."
    level = read.get(key + "rollout_is")
    if level is not None:
        read.put("algorithm.rollout_is", level, key + "rollout_is")
        threshold = key + "rollout_is_threshold"
        read.put("algorithm.rollout_is_threshold", read.get(threshold, 2.0), threshold)
        if level == "sequence":
            read.leave(
                key + "rollout_is", "a sequence's weight is of the mean of its log ratios here, not of their sum"
            )
    else:
        read.leave(key + "rollout_is", "null is our default as well")
        read.leave(key + "rollout_is_threshold", f"{key}rollout_is is null")
    for name, accepted in (("rollout_rs", None), ("bypass_mode", False), ("rollout_is_batch_normalize", False)):
        if read.get(key + name, accepted) != accepted:
            read.refuse(
                key + name, "rejection by the sampler's log-probabilities is algorithm.rollout_is_mode=mask here"
            )
        else:
            read.leave(key + name, "our default as well")
    for name in ("rollout_rs_threshold", "loss_type"):
        read.leave(key + name, f"{key}rollout_rs and bypass_mode are off")


def engine(read: Reading) -> None:
    """The engine is vLLM's server; vLLM's own arguments are passed on."""
    key = R + "name"
    if read.names(key):
        read.put("worker.rollout.name", "vllm", key)
        if read.get(key) not in ("vllm", "???", None):
            read.left.append((key, f"{ENGINE}, and takes its place"))
    key = R + "engine_kwargs.vllm"
    for name, value in (read.get(key) or {}).items():
        read.put(f"worker.rollout.engine_kwargs.{name}", value, key)
    if read.names(key) and not read.get(key):
        read.leave(key, "it is empty")


def reward(read: Reading) -> None:
    """A reward function of the user's, or the one that each row's data source has."""
    column, source = "data.reward_fn_key", None
    for prefix in ("custom_reward_function.", "reward.custom_reward_function."):
        if read.get(prefix + "path"):
            source = prefix
    if source is None:
        read.put("worker.reward.reward_function", BY_DATA_SOURCE)
        if read.get(column, "data_source") != "data_source":
            read.put("worker.reward.reward_function_kwargs", {"column": read.get(column)}, column)
        else:
            read.leave(column, "the column is data_source in any case")
    else:
        function = read.get(source + "name") or "compute_score"
        read.put(
            "worker.reward.reward_function",
            f"{read.get(source + 'path')}:{function}",
            source + "path",
            source + "name",
        )
        if read.get(source + "reward_kwargs"):
            read.put(
                "worker.reward.reward_function_kwargs", read.get(source + "reward_kwargs"), source + "reward_kwargs"
            )
        read.leave(column, "the reward function is named")
    for prefix in ("custom_reward_function.", "reward.custom_reward_function."):
        if prefix != source:
            for name in ("path", "name", "reward_kwargs"):
                read.leave(prefix + name, "no path names a file" if source is None else f"{source}path names the file")
    for key in ("reward_model.reward_manager", "reward.reward_manager.name"):
        if read.get(key) not in (None, "naive"):
            read.refuse(key, f"{REWARD_MODEL}; for DAPO's overlong penalty take ./rewards/dapo.py:compute_score")
        else:
            read.leave(key, "rewards are computed by a function in any case")
    for key in ("source", "module.path", "module.name"):
        read.leave(f"reward.reward_manager.{key}", "rewards are computed by a function in any case")


def saving(read: Reading) -> None:
    """What a checkpoint holds, and where a run goes on."""
    key = A + "checkpoint.save_contents"
    if read.names(key):
        read.put("trainer.save_model_only", "optimizer" not in (read.get(key) or ()), key)
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if read.get(mode) == "resume_path":
        read.put("trainer.load_checkpoint_path", read.get(path), path, mode)
    else:
        read.leave(path, f"{mode} is {read.get(mode)}")
        read.put("trainer.find_last_checkpoint", read.get(mode) != "disable", mode)


def adapters(read: Reading) -> None:
    """The scale of the adapters counts only where there are any; a list of modules is names with commas between, or
    as many alternatives of a regular expression."""
    rank, alpha, target, exclude = (
        M + name for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
    )
    if read.get(rank):
        read.put("worker.actor.model.lora.rank", read.get(rank), rank)
        read.put("worker.actor.model.lora.alpha", read.get(alpha), alpha)
        for key, name, between in ((target, "target_modules", ","), (exclude, "exclude_modules", "|")):
            if read.names(key):
                value = read.get(key)
                text = between.join(map(str, value)) if isinstance(value, list) else value
                read.put(f"worker.actor.model.lora.{name}", text, key)
        return
    read.leave(rank, "all weights are trained")
    for key in (alpha, target, exclude):
        read.leave(key, f"{rank} is 0")


OTHER_LOGGERS = ("clearml", "rl_insight", "vemlp_wandb")


def loggers(read: Reading) -> None:
    """The services that only verl writes to are left out; metrics.jsonl is always written."""
    key = "trainer.logger"
    if not read.names(key):
        return
    value = read.get(key)
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list) and (gone := [name for name in names if name in OTHER_LOGGERS]):
        read.left.append((key, f"{', '.join(gone)}: not written to; metrics.jsonl always is"))
        names = [name for name in names if name not in gone] or ["file"]
    read.put(key, names, key)


GROUPS: tuple[Callable[[Reading], None], ...] = (
    files,
    pixels,
    passes,
    clipping,
    losses,
    kl_term,
    validation,
    filtering,
    mismatch,
    engine,
    reward,
    saving,
    adapters,
    loggers,
)
