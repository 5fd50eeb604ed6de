"""What EasyR1, verl and TRL call our options, for the table in docs/options.md.

EasyR1's names are ours where it has the key; verl's come from the table that translates them; TRL's are arguments of
its GRPOConfig.
"""

from functools import cache

from grpo_vlm.config.dialect_verl_keys import KEYS

_MODEL = (
    "model_path tokenizer_path override_config enable_gradient_checkpointing trust_remote_code freeze_vision_tower "
    "lora.rank lora.alpha lora.target_modules lora.exclude_modules"
)
_OPTIM = "lr betas weight_decay strategy lr_warmup_ratio lr_warmup_steps min_lr_ratio lr_scheduler_type"
_FSDP = (
    "enable_full_shard enable_cpu_offload enable_rank0_init use_orig_params torch_dtype fsdp_size mp_param_dtype "
    "mp_reduce_dtype mp_buffer_dtype"
)
_OFFLOAD = "offload_params offload_optimizer"
_UPDATE = (
    "strategy global_batch_size micro_batch_size_per_device_for_update micro_batch_size_per_device_for_experience "
    "max_grad_norm loss_avg_mode ppo_epochs padding_free dynamic_batching ulysses_size"
)
# The keys of EasyR1 0.3.3 by section.
_EASYR1 = {
    "data": "train_files val_files prompt_key answer_key image_key video_key image_dir video_fps max_prompt_length "
    "max_response_length rollout_batch_size mini_rollout_batch_size val_batch_size format_prompt "
    "override_chat_template shuffle seed min_pixels max_pixels filter_overlong_prompts "
    "filter_overlong_prompts_workers",
    "algorithm": "gamma lam adv_estimator disable_kl use_kl_loss kl_penalty kl_coef kl_type kl_horizon kl_target "
    "online_filtering filter_key filter_low filter_high",
    "worker": "hybrid_engine",
    "worker.actor": f"{_UPDATE} clip_ratio_low clip_ratio_high clip_ratio_dual loss_type tau_positive tau_negative "
    "use_torch_compile",
    "worker.critic": f"{_UPDATE} cliprange_value",
    "worker.ref": "strategy",
    "worker.rollout": "name n temperature top_p top_k seed limit_images dtype gpu_memory_utilization ignore_eos "
    "enforce_eager enable_chunked_prefill tensor_parallel_size max_model_len max_num_batched_tokens "
    "disable_log_stats disable_tqdm val_override_config",
    "worker.reward": "reward_function reward_function_kwargs skip_special_tokens num_cpus",
    "trainer": "total_epochs max_steps project_name experiment_name logger nnodes n_gpus_per_node max_try_make_batch "
    "critic_warmup val_freq val_before_train val_only val_generations_to_log save_freq save_limit save_model_only "
    "save_checkpoint_path load_checkpoint_path ray_timeline find_last_checkpoint",
}
_EASYR1 |= {f"worker.{part}.{name}": keys for part in ("actor", "critic") for name, keys in (
    ("model", _MODEL), ("optim", _OPTIM), ("fsdp", _FSDP), ("offload", _OFFLOAD)
)}  # fmt: skip
_EASYR1 |= {"worker.ref.fsdp": _FSDP, "worker.ref.offload": _OFFLOAD}
EASYR1_KEYS = frozenset(f"{section}.{name}" for section, names in _EASYR1.items() for name in names.split())

# Our key -> the argument of TRL 1.16's GRPOConfig that is nearest to it.
TRL = {
    "data.max_response_length": "max_completion_length",
    "data.rollout_batch_size": "generation_batch_size",
    "data.shuffle": "shuffle_dataset",
    "data.seed": "data_seed",
    "data.num_workers": "dataloader_num_workers",
    "algorithm.kl_coef": "beta",
    "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
    "algorithm.mask_truncated_completions": "mask_truncated_completions",
    "algorithm.ref_model_sync_steps": "sync_ref_model, ref_model_sync_steps",
    "algorithm.rollout_is": "vllm_importance_sampling_correction",
    "algorithm.rollout_is_mode": "vllm_importance_sampling_mode",
    "algorithm.rollout_is_threshold": "vllm_importance_sampling_clip_max",
    "algorithm.rollout_is_threshold_low": "vllm_importance_sampling_clip_min",
    "worker.actor.micro_batch_size_per_device_for_update": "per_device_train_batch_size",
    "worker.actor.max_grad_norm": "max_grad_norm",
    "worker.actor.clip_ratio_low": "epsilon",
    "worker.actor.clip_ratio_high": "epsilon_high",
    "worker.actor.clip_ratio_dual": "delta",
    "worker.actor.loss_type": "loss_type",
    "worker.actor.tau_positive": "sapo_temperature_pos",
    "worker.actor.tau_negative": "sapo_temperature_neg",
    "worker.actor.vespo_k_positive": "vespo_k_pos",
    "worker.actor.vespo_lambda_positive": "vespo_lambda_pos",
    "worker.actor.vespo_k_negative": "vespo_k_neg",
    "worker.actor.vespo_lambda_negative": "vespo_lambda_neg",
    "worker.actor.entropy_coeff": "entropy_coef",
    "worker.actor.ppo_epochs": "num_iterations",
    "worker.actor.use_torch_compile": "torch_compile",
    "worker.actor.model.enable_gradient_checkpointing": "gradient_checkpointing",
    "worker.actor.model.trust_remote_code": "trust_remote_code",
    "worker.actor.optim.lr": "learning_rate",
    "worker.actor.optim.betas": "adam_beta1, adam_beta2",
    "worker.actor.optim.weight_decay": "weight_decay",
    "worker.actor.optim.strategy": "optim",
    "worker.actor.optim.lr_warmup_steps": "warmup_steps",
    "worker.actor.optim.lr_scheduler_type": "lr_scheduler_type",
    "worker.actor.fsdp.mp_param_dtype": "bf16",
    "worker.rollout.name": "use_vllm",
    "worker.rollout.n": "num_generations",
    "worker.rollout.temperature": "temperature",
    "worker.rollout.top_p": "top_p",
    "worker.rollout.top_k": "top_k",
    "worker.rollout.min_p": "min_p",
    "worker.rollout.repetition_penalty": "repetition_penalty",
    "worker.rollout.seed": "seed",
    "worker.rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "worker.rollout.tensor_parallel_size": "vllm_tensor_parallel_size",
    "worker.rollout.max_model_len": "vllm_max_model_length",
    "worker.rollout.placement": "vllm_mode",
    "worker.rollout.base_url": "vllm_server_base_url",
    "trainer.total_epochs": "num_train_epochs",
    "trainer.max_steps": "max_steps",
    "trainer.project_name": "project",
    "trainer.experiment_name": "run_name",
    "trainer.logger": "report_to",
    "trainer.val_freq": "eval_steps",
    "trainer.val_before_train": "eval_on_start",
    "trainer.val_generations_to_log": "num_completions_to_print",
    "trainer.save_freq": "save_steps",
    "trainer.save_limit": "save_total_limit",
    "trainer.save_model_only": "save_only_model",
    "trainer.save_checkpoint_path": "output_dir",
    "trainer.load_checkpoint_path": "resume_from_checkpoint",
}


def easyr1_name(key: str) -> str:
    """EasyR1's name of one of our keys, or an empty string."""
    return key if key in EASYR1_KEYS else ""


@cache
def _verl_names() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verl, rule in KEYS.items():
        if rule.to:
            found.setdefault(rule.to, []).append(f"{verl}*" if verl.endswith((".", "_")) else verl)
    return found


def verl_name(key: str) -> str:
    """verl's names of one of our keys, joined by commas, or an empty string; `section.*` for several below it."""
    return ", ".join(_verl_names().get(key, ()))


def trl_name(key: str) -> str:
    """TRL's name of one of our keys, or an empty string."""
    return TRL.get(key, "")
