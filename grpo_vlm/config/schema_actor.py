"""Schema of worker.actor, worker.ref and worker.critic: the model, the optimizer, the loss and the memory they use."""

from dataclasses import dataclass
from typing import Any

from grpo_vlm.config.options import (
    NEUTRAL,
    above,
    at_least,
    between,
    from_to_below,
    neutral,
    off_or_at_least,
    option,
    planned,
    section,
)

LOSSES = (
    "default",
    "gspo",
    "gspo_token",
    "cispo",
    "sapo",
    "dr_grpo",
    "gpg",
    "geo_mean",
    "clip_cov",
    "kl_cov",
    "dppo_tv",
    "dppo_kl",
    "luspo",
    "vespo",
)
TRL_LOSSES = ("grpo", "bnpo", "dapo")  # names of the default loss with an averaging; TRL's others are called alike
AVERAGES = ("token", "seq", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_SAME_ROWS = "old and reference log-probabilities are computed on the update's own micro-batches"


@dataclass
class LoraConfig:
    """Low-rank adapters."""

    rank: int = option(0, "Rank of the adapters. 0: train all weights.", rule=at_least(0), common=True)
    alpha: int = option(64, "Scale of the adapters, divided by the rank.", rule=at_least(1))
    target_modules: str = option(
        "all-linear",
        "Modules that get adapters: all-linear (all linear layers but the head), names with commas between them, or a "
        "regular expression.",
    )
    exclude_modules: str | None = option(
        None,
        "Regular expression of modules that get none. null: the vision tower with its merger. Empty: no module.",
        example=".*lm_head.*",
    )


@dataclass
class ModelConfig:
    """Which model, and how it is loaded."""

    model_path: str | None = option(
        None, "Folder or hub id of the model.", common=True, example="Qwen/Qwen2.5-VL-3B-Instruct"
    )
    tokenizer_path: str | None = option(None, "Folder or hub id of the tokenizer and processor. null: model_path.")
    override_config: dict[str, Any] = option(
        {},
        "Entries of the model's config.json to replace, for trainer, reference and server alike; those of a part in a "
        "mapping of its name.",
        example="{text_config: {rms_norm_eps: 1.0e-5}}",
    )
    enable_gradient_checkpointing: bool = option(True, "Recompute activations in the backward pass to save memory.")
    trust_remote_code: bool = option(True, "Run Python code that comes with the model.")
    freeze_vision_tower: bool = option(False, "Do not train the vision tower.")
    freeze_merger: bool | None = option(
        None, "Do not train the merger between vision tower and language model. null: as freeze_vision_tower."
    )
    lora: LoraConfig = section(LoraConfig)


@dataclass
class OptimConfig:
    """AdamW and its learning rate, which is constant within one rollout step."""

    lr: float = option(1e-6, "Peak learning rate.", rule=above(0), common=True)
    betas: list[float] = option([0.9, 0.999], "AdamW's two betas.")
    weight_decay: float = option(1e-2, "AdamW's weight decay.", rule=at_least(0))
    strategy: str = option(
        "adamw",
        "Optimizer. adamw_bf16: states in bf16, with compensated rounding for bf16 weights (fsdp.torch_dtype=bf16). "
        "adamw_8bit: states in 8 bits, by bitsandbytes, on an accelerator. DeepSpeed knows only adamw.",
        choices=("adamw", "adamw_bf16", "adamw_8bit"),
    )
    lr_warmup_ratio: float = option(
        0.0, "Share of the rollout steps in which the rate rises from 0.", rule=from_to_below(0, 1)
    )
    lr_warmup_steps: int | None = option(
        None, "Rollout steps in which the rate rises from 0; replaces lr_warmup_ratio.", rule=at_least(0)
    )
    min_lr_ratio: float | None = option(None, "Where the cosine ends, as a share of lr. null: 0.", rule=between(0, 1))
    lr_scheduler_type: str = option(
        "constant", "Course of the rate after the warm-up.", choices=("constant", "cosine")
    )


@dataclass
class FSDPConfig:
    """Precision and sharding. The launcher's accelerate_configs/ file decides the scheme; these keys set what is open
    in it, and one that contradicts it is refused."""

    enable_full_shard: bool = option(
        True,
        "Drop gathered weights after each layer's forward pass. false: keep them until its backward pass (fsdp2), for "
        "speed and more memory.",
    )
    enable_cpu_offload: bool = option(False, "Keep the divided weights and optimizer states in CPU memory (fsdp2).")
    enable_rank0_init: bool = option(True, "Load the weights on the first process only and send them out (fsdp2).")
    use_orig_params: bool = neutral(False, "Keep the original parameters in FSDP.", "FSDP2 always keeps them")
    torch_dtype: str | None = option(
        None,
        "Type of the trained weights. null or float32: float32 masters; bf16: half the memory, coarser updates.",
        choices=("fp32", "float32", "bf16", "bfloat16"),
    )
    fsdp_size: int = option(-1, "Devices that share the weights. -1: all.", rule=off_or_at_least(1))
    mp_param_dtype: str = option(
        "bf16",
        "Type of the computation. bf16: bf16 autocast on an accelerator (float32 on a CPU); float32: none.",
        choices=("bf16", "bfloat16", "fp32", "float32"),
    )
    mp_reduce_dtype: str = option(
        "fp32",
        "Type in which gradients are summed over devices (fsdp2, zero2, zero3).",
        choices=("fp32", "float32", "bf16", "bfloat16"),
    )
    mp_buffer_dtype: str = neutral("fp32", "Type of the model's buffers.", "buffers keep the type they have")


@dataclass
class OffloadConfig:
    """Moving tensors to CPU memory between the phases of a step."""

    offload_params: bool = option(False, "Park the weights in CPU memory while answers are generated.")
    offload_optimizer: bool = option(False, "Park the optimizer states in CPU memory but for the updates.")


@dataclass
class ActorConfig:
    """The policy's update."""

    strategy: str = option("fsdp", "EasyR1's only value; the launcher's accelerate config decides.", choices=("fsdp",))
    global_batch_size: int = option(
        256,
        "Prompts per optimizer update, over all devices (times worker.rollout.n samples).",
        rule=at_least(1),
        common=True,
    )
    micro_batch_size_per_device_for_update: int = option(
        4,
        "Samples per forward and backward pass on one device; with dynamic_batching as many tokens as they may have.",
        rule=at_least(1),
        common=True,
    )
    micro_batch_size_per_device_for_experience: int = option(
        16,
        "Samples per forward pass for log-probabilities on one device.",
        rule=at_least(1),
        status=NEUTRAL,
        reason=_SAME_ROWS,
    )
    max_token_len_per_gpu: int | None = option(
        None,
        "Tokens per forward and backward pass on one device, a prompt counted once for all its answers. null: "
        "micro_batch_size_per_device_for_update x (max_prompt_length + max_response_length).",
        rule=at_least(1),
        common=True,
    )
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.", rule=above(0))
    clip_ratio_low: float = option(0.2, "The importance ratio is clipped below at 1 - this.", rule=between(0, 1))
    clip_ratio_high: float = option(0.3, "The importance ratio is clipped above at 1 + this.", rule=above(0))
    clip_ratio_dual: float | None = option(
        3.0, "Bound of the loss when the advantage is negative, times |advantage|. null: none.", rule=above(1)
    )
    loss_avg_mode: str | None = option(
        None,
        "Mean of the loss over the tokens of the update (token), over samples of their means (seq), or over samples "
        "of their sums, undivided or by max_response_length (-norm). null: token, or what loss_type implies.",
        choices=AVERAGES,
    )
    penalty_avg_mode: str | None = option(
        None,
        "The same for the KL and entropy terms of the loss. null: as the policy loss is averaged.",
        choices=AVERAGES,
    )
    loss_type: str = option(
        "default",
        "Policy loss: default = dual-clip PPO; docs/algorithms.md has all. TRL's names imply their averaging.",
        choices=(*LOSSES, *TRL_LOSSES),
        common=True,
    )
    tau_positive: float = option(1.0, "SAPO's temperature for positive advantages.", rule=above(0))
    tau_negative: float = option(1.05, "SAPO's temperature for negative advantages.", rule=above(0))
    clip_cov_ratio: float = option(
        2e-4, "Share of the tokens that clip_cov takes the gradient of.", rule=between(0, 1)
    )
    clip_cov_lb: float = option(1.0, "clip_cov chooses among covariances above this.")
    clip_cov_ub: float = option(5.0, "clip_cov chooses among covariances below this.")
    kl_cov_ratio: float = option(2e-4, "Share of the tokens that kl_cov penalises.", rule=between(0, 1))
    kl_cov_coef: float = option(1.0, "Weight of kl_cov's penalty.", rule=at_least(0))
    vespo_k_positive: float = option(2.0, "VESPO's exponent for positive advantages.", rule=at_least(0))
    vespo_lambda_positive: float = option(3.0, "VESPO's decay for positive advantages.", rule=at_least(0))
    vespo_k_negative: float = option(3.0, "VESPO's exponent for negative advantages.", rule=at_least(0))
    vespo_lambda_negative: float = option(2.0, "VESPO's decay for negative advantages.", rule=at_least(0))
    entropy_coeff: float = option(0.0, "Weight of the entropy that is added to the objective.", rule=at_least(0))
    ppo_epochs: int = option(1, "Passes over each rollout batch.", rule=at_least(1))
    padding_free: bool = option(
        True, "Pack answers, and compute each prompt and picture once for its group. false: one padded row per answer."
    )
    dynamic_batching: bool = option(
        True, "Fill each pass to a number of tokens. false: to a number of samples (packed passes only)."
    )
    ulysses_size: int = planned(
        1,
        "Devices that share one sequence.",
        "DeepSpeed's Ulysses needs positions that Qwen-VL's attention is not given (TypeError), and drops the mask "
        "that packed rows need (docs/launch.md)",
    )
    use_torch_compile: bool = option(
        True, "Compile the layers of the model (on an accelerator, where the weights are not sharded)."
    )
    model: ModelConfig = section(ModelConfig)
    optim: OptimConfig = section(OptimConfig)
    fsdp: FSDPConfig = section(FSDPConfig)
    offload: OffloadConfig = section(OffloadConfig)


@dataclass
class RefConfig:
    """The reference model of the KL term. Its micro-batch is the actor's for experience."""

    strategy: str = option("fsdp", "EasyR1's only value.")
    fsdp: FSDPConfig = section(FSDPConfig)
    offload: OffloadConfig = section(OffloadConfig)


@dataclass
class CriticConfig:
    """The value model of gae."""

    strategy: str = option("fsdp", "EasyR1's only value.")
    global_batch_size: int = option(256, "Prompts per update of the critic.")
    micro_batch_size_per_device_for_update: int = option(4, "Samples per forward and backward pass on one device.")
    micro_batch_size_per_device_for_experience: int = option(16, "Samples per forward pass for values on one device.")
    max_grad_norm: float = option(1.0, "Gradients are scaled down to this norm.")
    cliprange_value: float = option(0.5, "Clip range of the value loss.")
    loss_avg_mode: str = option("token", "Mean of the loss over tokens or samples.")
    ppo_epochs: int = option(1, "Passes over each rollout batch.")
    padding_free: bool = option(False, "Compute on samples without padding.")
    dynamic_batching: bool = option(True, "Group samples by length.")
    ulysses_size: int = option(1, "Devices that share one sequence.")
    model: ModelConfig = section(ModelConfig)
    optim: OptimConfig = section(OptimConfig)
    fsdp: FSDPConfig = section(FSDPConfig)
    offload: OffloadConfig = section(OffloadConfig)
