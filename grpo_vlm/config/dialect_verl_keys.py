"""verl's options (0.10, commit 1dda039) one by one: the key of ours that each one is, or why nothing takes it.

A key that ends in a dot stands for everything below it; the longest that fits decides. What decides memory or speed
alone is left out with its reason; what would change a result and is not here is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """What becomes of one verl key."""

    to: str = ""
    """Our key; empty: none."""
    values: Mapping[Any, Any] | None = None
    """verl's value -> ours, where they differ."""
    reason: str = ""
    """Why no key of ours takes it."""
    accepted: tuple = ()
    """With a reason: the only values that may be left out; any other is refused. Empty: every value is left out."""
    together: bool = False
    """Read together with other keys, in dialect_verl_groups.py; `to` is the key that it decides, for the tables."""


def same(to: str, values: Mapping[Any, Any] | None = None) -> Rule:
    return Rule(to, values)


def joint(to: str = "") -> Rule:
    return Rule(to, together=True)


def left_out(reason: str) -> Rule:
    return Rule(reason=reason)


def only(reason: str, *accepted: Any) -> Rule:
    return Rule(reason=reason, accepted=accepted)


A, R, M, REF = (f"actor_rollout_ref.{name}." for name in ("actor", "rollout", "model", "ref"))
MEGATRON = (
    "there is no Megatron here; the trainer shards by the launcher's accelerate_configs/ file (fsdp2, zero2, zero3), "
    "which changes the memory and not the result"
)
ENGINE = "the generation engine here is vLLM"
LAUNCHER = "the launcher's file in accelerate_configs/ decides how the trainer shards"
SAME_ROWS = "old and reference log-probabilities are computed on the update's own packed rows"
PROFILER = "there is no profiler in this version"
RAY = "there is no Ray here"
ALWAYS = "it is always so here"
ULYSSES = "sequences are not split over devices here; rows are packed, and a prompt is computed once for its group"
CHUNKED = "log-probabilities and entropy are always computed in chunks of the vocabulary"
QUANTIZED = "no training or generation with quantised weights in this version"
MIXTURE = "no routing to replay: the supported models are dense"
TURNS = "answers are one turn here; no tools and no agents"
STORE = "rollouts are handed over within the process; there is no queue to set up"
NO_CRITIC = "only adv_estimator gae has a critic"
OVERLONG = (
    "a penalty of overlong answers is part of a reward function here: rewards/dapo.py has it, name it by "
    "custom_reward_function.path"
)
REWARD_MODEL = "no reward model in this version; a reward function may ask a server of yours"

KEYS: dict[str, Rule] = {
    # data
    "data.train_files": joint("data.train_files"),
    "data.val_files": joint("data.val_files"),
    "data.prompt_key": same("data.prompt_key"),
    "data.image_key": same("data.image_key"),
    "data.video_key": same("data.video_key"),
    "data.audio_key": only("no model with sound in this version", "audios"),
    "data.reward_fn_key": joint(),
    "data.max_prompt_length": same("data.max_prompt_length"),
    "data.max_response_length": same("data.max_response_length"),
    "data.train_batch_size": same("data.rollout_batch_size"),
    "data.gen_batch_size": same("data.mini_rollout_batch_size"),
    "data.val_batch_size": same("data.val_batch_size", {None: -1}),
    "data.shuffle": same("data.shuffle"),
    "data.seed": same("data.seed", {None: 1}),
    "data.validation_shuffle": left_out("the order of validation rows changes no metric"),
    "data.filter_overlong_prompts": same("data.filter_overlong_prompts"),
    "data.filter_overlong_prompts_workers": same("data.filter_overlong_prompts_workers"),
    "data.truncation": only(
        "a cut prompt loses image tokens; write error, and data.filter_overlong_prompts=True to drop such rows",
        "error",
    ),
    "data.dataloader_num_workers": same("data.num_workers"),
    "data.mm_processor_kwargs": joint("data.min_pixels"),
    "data.image_patch_size": left_out("it is read from the model"),
    "data.train_max_samples": only("write the rows that are wanted to a file of their own", -1),
    "data.val_max_samples": only("write the rows that are wanted to a file of their own", -1),
    "data.tokenizer": only("name it by worker.actor.model.tokenizer_path", None),
    "data.use_shm": left_out("files are read where they are"),
    "data.tool_config_path": only(TURNS, None),
    "data.function_tool_path": only(TURNS, None),
    "data.return_raw_input_ids": left_out(ALWAYS),
    "data.return_raw_chat": left_out(ALWAYS),
    "data.return_full_prompt": left_out("reward functions get the rendered prompt in any case"),
    "data.return_multi_modal_inputs": left_out(ALWAYS),
    "data.trust_remote_code": left_out("worker.actor.model.trust_remote_code decides it for both"),
    "data.custom_cls.path": only("bring rows as a list: Run(..., train_rows=rows)", None),
    "data.custom_cls.": left_out("bring rows as a list: Run(..., train_rows=rows)"),
    "data.apply_chat_template_kwargs": only("no arguments of chat templates; data.override_chat_template", {}, None),
    # actor_rollout_ref.actor
    A + "strategy": left_out(LAUNCHER),
    A + "ppo_mini_batch_size": same("worker.actor.global_batch_size"),
    A + "ppo_micro_batch_size": only("deprecated by verl; write ppo_micro_batch_size_per_gpu", None),
    A + "ppo_micro_batch_size_per_gpu": joint("worker.actor.micro_batch_size_per_device_for_update"),
    A + "use_dynamic_bsz": joint("worker.actor.dynamic_batching"),
    A + "ppo_max_token_len_per_gpu": joint("worker.actor.max_token_len_per_gpu"),
    A + "clip_ratio": joint("worker.actor.clip_ratio_low"),
    A + "clip_ratio_low": joint("worker.actor.clip_ratio_low"),
    A + "clip_ratio_high": joint("worker.actor.clip_ratio_high"),
    A + "clip_ratio_c": joint("worker.actor.clip_ratio_dual"),
    A + "tau_pos": same("worker.actor.tau_positive"),
    A + "tau_neg": same("worker.actor.tau_negative"),
    A + "freeze_vision_tower": same("worker.actor.model.freeze_vision_tower"),
    A + "policy_loss.": joint("worker.actor.loss_type"),
    A + "loss_agg_mode": joint("worker.actor.loss_avg_mode"),
    A + "loss_scale_factor": only("seq-mean-token-sum-norm divides by max_response_length", None),
    A + "entropy_coeff": same("worker.actor.entropy_coeff"),
    A + "calculate_entropy": left_out(ALWAYS),
    A + "calculate_sum_pi_squared": left_out("a diagnostic that this version does not log"),
    A + "use_kl_loss": joint("algorithm.use_kl_loss"),
    A + "kl_loss_coef": joint("algorithm.kl_coef"),
    A + "kl_loss_type": joint("algorithm.kl_penalty"),
    A + "use_prefix_grouper": left_out("a prompt is always computed once for its group (padding_free)"),
    A + "use_torch_compile": same("worker.actor.use_torch_compile"),
    A + "ppo_epochs": same("worker.actor.ppo_epochs"),
    A + "shuffle": only("updates take the groups in the order in which they were drawn", False),
    A + "data_loader_seed": left_out("updates take the groups in the order in which they were drawn"),
    A + "grad_clip": same("worker.actor.max_grad_norm"),
    A + "ulysses_sequence_parallel_size": left_out(ULYSSES),
    A + "entropy_from_logits_with_chunking": left_out(CHUNKED),
    A + "entropy_from_logits_chunk_size": left_out(CHUNKED),
    A + "entropy_checkpointing": left_out(CHUNKED),
    A + "pad_to_length": left_out("rows are packed, not padded"),
    A + "use_remove_padding": same("worker.actor.padding_free"),
    A + "use_fused_kernels": left_out(CHUNKED),
    A + "rollout_n": left_out(f"{R}n decides it"),
    A + "checkpoint.save_contents": joint("trainer.save_model_only"),
    A + "checkpoint.": left_out("resuming needs everything that was saved"),
    A + "profiler.": left_out(PROFILER),
    A + "router_replay.mode": only(MIXTURE, "disabled"),
    A + "router_replay.": left_out(MIXTURE),
    A + "qat.enable": only(QUANTIZED, False),
    A + "qat.": left_out(QUANTIZED),
    A + "megatron.": left_out(MEGATRON),
    A + "optim.lr": same("worker.actor.optim.lr"),
    A + "optim.betas": same("worker.actor.optim.betas"),
    A + "optim.weight_decay": same("worker.actor.optim.weight_decay"),
    A + "optim.lr_warmup_steps_ratio": same("worker.actor.optim.lr_warmup_ratio"),
    A + "optim.lr_warmup_steps": same("worker.actor.optim.lr_warmup_steps", {-1: None, 0: None}),
    A + "optim.min_lr_ratio": same("worker.actor.optim.min_lr_ratio"),
    A + "optim.lr_scheduler_type": same("worker.actor.optim.lr_scheduler_type"),
    A + "optim.lr_decay_style": same("worker.actor.optim.lr_scheduler_type"),
    A + "optim.warmup_style": same("worker.actor.optim.lr_scheduler_type", {None: "constant"}),
    A + "optim.clip_grad": same("worker.actor.max_grad_norm"),
    A + "optim.total_training_steps": left_out("the schedule's length follows from the run's"),
    A + "optim.num_cycles": only("the cosine is half a wave", 0.5),
    A + "optim.zero_indexed_step": left_out("a first warm-up step of rate 0 would be without effect"),
    A + "optim.optimizer": only("AdamW is the only optimizer", "AdamW", "adam"),
    A + "optim.optimizer_impl": only("AdamW is torch's own", "torch.optim"),
    A + "optim.override_optimizer_config": only("AdamW takes no further arguments", None, {}),
    A + "fsdp_config.param_offload": same("worker.actor.offload.offload_params"),
    A + "fsdp_config.optimizer_offload": same("worker.actor.offload.offload_optimizer"),
    A + "fsdp_config.offload_policy": same("worker.actor.fsdp.enable_cpu_offload"),
    A + "fsdp_config.reshard_after_forward": same("worker.actor.fsdp.enable_full_shard"),
    A + "fsdp_config.fsdp_size": same("worker.actor.fsdp.fsdp_size"),
    A + "fsdp_config.use_orig_params": same("worker.actor.fsdp.use_orig_params"),
    A + "fsdp_config.model_dtype": same("worker.actor.fsdp.torch_dtype"),
    A + "fsdp_config.dtype": same("worker.actor.fsdp.mp_param_dtype"),
    A + "fsdp_config.mixed_precision.": left_out("worker.actor.fsdp.mp_param_dtype decides it (bf16)"),
    A + "fsdp_config.qat.enable": only(QUANTIZED, False),
    A + "fsdp_config.ulysses_sequence_parallel_size": left_out(ULYSSES),
    A + "fsdp_config.": left_out(LAUNCHER),
    # actor_rollout_ref.ref
    REF + "fsdp_config.param_offload": same("worker.ref.offload.offload_params"),
    REF + "fsdp_config.": left_out("the reference model is sharded as the policy is"),
    REF + "log_prob_": left_out(SAME_ROWS),
    REF + "megatron.": left_out(MEGATRON),
    REF + "": left_out("the reference model follows the policy's settings"),
    # actor_rollout_ref.rollout
    R + "name": joint("worker.rollout.name"),
    R + "n": same("worker.rollout.n"),
    R + "temperature": same("worker.rollout.temperature"),
    R + "top_p": same("worker.rollout.top_p"),
    R + "top_k": same("worker.rollout.top_k", {0: -1}),
    R + "repetition_penalty": same("worker.rollout.repetition_penalty"),
    R + "seed": same("worker.rollout.seed"),
    R + "do_sample": only("training needs samples; write a temperature", True),
    R + "dtype": same("worker.rollout.dtype"),
    R + "gpu_memory_utilization": same("worker.rollout.gpu_memory_utilization"),
    R + "ignore_eos": same("worker.rollout.ignore_eos"),
    R + "enforce_eager": same("worker.rollout.enforce_eager"),
    R + "tensor_model_parallel_size": same("worker.rollout.tensor_parallel_size"),
    R + "data_parallel_size": same("worker.rollout.data_parallel_size", {1: None}),
    R + "expert_parallel_size": left_out("worker.rollout.engine_kwargs.enable_expert_parallel is vLLM's switch"),
    R + "pipeline_model_parallel_size": left_out("an engine's GPUs are split by tensors only"),
    R + "max_num_batched_tokens": same("worker.rollout.max_num_batched_tokens"),
    R + "max_model_len": same("worker.rollout.max_model_len"),
    R + "max_num_seqs": same("worker.rollout.engine_kwargs.max_num_seqs"),
    R + "enable_chunked_prefill": same("worker.rollout.enable_chunked_prefill"),
    R + "enable_prefix_caching": same("worker.rollout.engine_kwargs.enable_prefix_caching"),
    R + "disable_log_stats": same("worker.rollout.disable_log_stats"),
    R + "limit_images": same("worker.rollout.limit_images", {None: 0}),
    R + "quantization": only(QUANTIZED, None),
    R + "quantization_config_file": only(QUANTIZED, None),
    R + "qat": only(QUANTIZED, None),
    R + "val_kwargs.": joint("worker.rollout.val_override_config"),
    R + "engine_kwargs.vllm": joint("worker.rollout.engine_kwargs"),
    R + "engine_kwargs.sglang": left_out(f"{ENGINE}; there is no SGLang"),
    R + "engine_kwargs.trtllm": left_out(f"{ENGINE}; there is no TensorRT-LLM"),
    R + "multi_turn.enable": only(TURNS, False),
    R + "multi_turn.": left_out(TURNS),
    R + "agent.": left_out(TURNS),
    R + "mode": left_out("requests to the vLLM server always run side by side"),
    R + "prompt_length": left_out("data.max_prompt_length decides it"),
    R + "response_length": left_out("data.max_response_length decides it"),
    R + "nnodes": left_out("worker.rollout.placement says where the server runs"),
    R + "n_gpus_per_node": left_out("worker.rollout.placement says where the server runs"),
    R + "free_cache_engine": left_out("a server on shared GPUs always sleeps while the trainer updates"),
    R + "multi_stage_wake_up": left_out("a server on shared GPUs always wakes in two stages"),
    R + "calculate_log_probs": left_out("the sampler's log-probabilities always come with the answers"),
    R + "logprobs_mode": only("the trainer compares with the sampled distribution", "processed_logprobs"),
    R + "log_prob_": left_out(SAME_ROWS),
    R + "load_format": left_out("the weights are sent to the server before each rollout"),
    R + "layered_summon": left_out("the weights are gathered one at a time in any case"),
    R + "cudagraph_capture_sizes": left_out("vLLM chooses them; worker.rollout.enforce_eager=true uses no graphs"),
    R + "scheduling_policy": left_out("all requests of a step are equal"),
    R + "skip_tokenizer_init": left_out("the server needs the tokenizer for stop texts"),
    R + "full_determinism": only("batch-invariant kernels are not a switch in this version", False),
    R + "over_sample_rate": only("a step waits for all its answers", 0),
    R + "enable_rollout_routing_replay": only(MIXTURE, False),
    R + "moe_load_balance_metrics_interval": left_out("the supported models are dense"),
    R + "mtp": only("no multi-token prediction", None),
    R + "trace.": left_out("samples.jsonl holds the answers of every step"),
    R + "profiler.": left_out(PROFILER),
    R + "prometheus.": left_out("vllm.log holds the server's figures; disable_log_stats=false writes more"),
    R + "checkpoint_engine.": left_out("how weights reach the server follows from worker.rollout.placement"),
    R + "disaggregation.enabled": only("one server does prefill and decoding", False),
    R + "disaggregation.": left_out("one server does prefill and decoding"),
    # actor_rollout_ref.model
    M + "path": same("worker.actor.model.model_path"),
    M + "tokenizer_path": same("worker.actor.model.tokenizer_path"),
    M + "trust_remote_code": same("worker.actor.model.trust_remote_code"),
    M + "override_config": same("worker.actor.model.override_config"),
    M + "enable_gradient_checkpointing": same("worker.actor.model.enable_gradient_checkpointing"),
    M + "enable_activation_offload": left_out("activations are recomputed, not moved to CPU memory"),
    M + "use_remove_padding": same("worker.actor.padding_free"),
    M + "lora_rank": joint("worker.actor.model.lora.rank"),
    M + "lora_alpha": joint("worker.actor.model.lora.alpha"),
    M + "target_modules": joint("worker.actor.model.lora.target_modules"),
    M + "exclude_modules": joint("worker.actor.model.lora.exclude_modules"),
    M + "lora_adapter_path": only("training starts with a new adapter", None),
    M + "lora.rank": only("Megatron's LoRA; write actor_rollout_ref.model.lora_rank and lora_alpha", 0),
    M + "lora.": left_out("Megatron's LoRA; write actor_rollout_ref.model.lora_rank and lora_alpha"),
    M + "custom_chat_template": only("write it to a file and name that by data.override_chat_template", None),
    M + "hf_config_path": only("the configuration lies beside the weights", None),
    M + "external_lib": only("no module is imported by name; worker.actor.model.trust_remote_code", None),
    M + "use_liger": left_out("layers are compiled (worker.actor.use_torch_compile)"),
    M + "use_fused_kernels": left_out(CHUNKED),
    M + "fused_kernel_options.": left_out(CHUNKED),
    M + "use_shm": left_out("weights are read where they are"),
    M + "tiled_mlp.": left_out("packed rows and max_token_len_per_gpu bound the memory"),
    M + "mtp.enable": only("no multi-token prediction", False),
    M + "mtp.": left_out("no multi-token prediction"),
    "actor_rollout_ref.hybrid_engine": same("worker.hybrid_engine"),
    "actor_rollout_ref.nccl_timeout": left_out("each call has a time limit of its own here"),
    # algorithm
    "algorithm.adv_estimator": same("algorithm.adv_estimator", {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}),
    "algorithm.gamma": same("algorithm.gamma"),
    "algorithm.lam": same("algorithm.lam"),
    "algorithm.norm_adv_by_std_in_grpo": same("algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.use_kl_in_reward": joint("algorithm.use_kl_loss"),
    "algorithm.kl_penalty": joint("algorithm.kl_penalty"),
    "algorithm.kl_ctrl.type": joint("algorithm.kl_type"),
    "algorithm.kl_ctrl.kl_coef": joint("algorithm.kl_coef"),
    "algorithm.kl_ctrl.horizon": joint("algorithm.kl_horizon"),
    "algorithm.kl_ctrl.target_kl": joint("algorithm.kl_target"),
    "algorithm.filter_groups.": joint("algorithm.online_filtering"),
    "algorithm.rollout_correction.": joint("algorithm.rollout_is"),
    "algorithm.gdpo_reward_keys": same("algorithm.gdpo_reward_keys"),
    "algorithm.gdpo_reward_weights": same("algorithm.gdpo_reward_weights"),
    "algorithm.use_pf_ppo": only("no sampling of the batch by rewards", False),
    "algorithm.pf_ppo.": left_out("no sampling of the batch by rewards"),
    # rewards
    "custom_reward_function.": joint("worker.reward.reward_function"),
    "reward.custom_reward_function.": joint("worker.reward.reward_function"),
    "reward_model.enable": only(REWARD_MODEL, False, None),
    "reward.reward_model.enable": only(REWARD_MODEL, False, None),
    "reward_model.reward_manager": joint(),
    "reward.reward_manager.": joint(),
    "reward_model.overlong_buffer.enable": only(OVERLONG, False, None),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": only(OVERLONG, False, None),
    "reward_model.": left_out(REWARD_MODEL),
    "reward.num_workers": left_out("worker.reward decides how rewards are computed"),
    "reward.": left_out(REWARD_MODEL),
    "sandbox_fusion.": left_out("no code is run for a reward"),
    # trainer
    "trainer.total_epochs": same("trainer.total_epochs"),
    "trainer.total_training_steps": same("trainer.max_steps"),
    "trainer.project_name": same("trainer.project_name"),
    "trainer.experiment_name": same("trainer.experiment_name"),
    "trainer.logger": joint("trainer.logger"),
    "trainer.log_val_generations": same("trainer.val_generations_to_log"),
    "trainer.nnodes": same("trainer.nnodes"),
    "trainer.n_gpus_per_node": same("trainer.n_gpus_per_node"),
    "trainer.save_freq": same("trainer.save_freq", {0: -1}),
    "trainer.test_freq": same("trainer.val_freq", {0: -1}),
    "trainer.val_before_train": same("trainer.val_before_train"),
    "trainer.val_only": same("trainer.val_only"),
    "trainer.critic_warmup": same("trainer.critic_warmup"),
    "trainer.default_local_dir": same("trainer.save_checkpoint_path"),
    "trainer.max_actor_ckpt_to_keep": same("trainer.save_limit", {None: -1}),
    "trainer.max_critic_ckpt_to_keep": left_out(NO_CRITIC),
    "trainer.resume_mode": joint("trainer.find_last_checkpoint"),
    "trainer.resume_from_path": joint("trainer.load_checkpoint_path"),
    "trainer.balance_batch": left_out(ALWAYS),
    "trainer.rollout_data_dir": left_out("samples.jsonl in the run folder holds the answers of every step"),
    "trainer.validation_data_dir": left_out("samples.jsonl in the run folder holds the answers of every validation"),
    "trainer.default_hdfs_dir": only("checkpoints are written to a folder", None),
    "trainer.del_local_ckpt_after_load": only("a checkpoint is deleted by trainer.save_limit only", False),
    "trainer.device": left_out(
        "the device is the one that torch finds; on an Ascend NPU the trainer's code is untried, and vLLM's server "
        "needs vllm-ascend"
    ),
    "trainer.ray_wait_register_center_timeout": left_out(RAY),
    "trainer.esi_redundant_time": left_out("checkpoints are written by trainer.save_freq"),
    "trainer.use_v1": left_out("there is one trainer"),
    "trainer.v1.trainer_mode": only("rollouts and updates take turns; no stale samples", "sync"),
    "trainer.v1.": left_out("rollouts and updates take turns; no stale samples"),
    # everything else at the top
    "critic.": left_out(NO_CRITIC),
    "model_engine": left_out(MEGATRON),
    "global_profiler.": left_out(PROFILER),
    "ray_kwargs.": left_out(RAY),
    "ray_init.": left_out(RAY),
    "transfer_queue.": left_out(STORE),
    "skip.": left_out("no cache of rollouts"),
    "distillation.enabled": only("no distillation in this version", False),
    "distillation.": left_out("no distillation in this version"),
    "hydra.": left_out("there is no Hydra here; a run writes to its run folder"),
}


def rule_of(key: str) -> Rule | None:
    """The rule of a verl key: its own, or that of the longest section above it."""
    if key in KEYS:
        return KEYS[key]
    above = [name for name in KEYS if name.endswith((".", "_")) and key.startswith(name)]
    return KEYS[max(above, key=len)] if above else None
