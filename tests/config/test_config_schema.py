"""The schema has every EasyR1 key with its default, and each key explains itself."""

import pytest
from omegaconf import OmegaConf

from grpo_vlm.config import Config
from grpo_vlm.config.load import fits, schema_options
from grpo_vlm.config.options import NEUTRAL, PLANNED, WORKS, sections

MODEL = {
    "model_path": None,
    "tokenizer_path": None,
    "override_config": {},
    "enable_gradient_checkpointing": True,
    "trust_remote_code": True,
    "freeze_vision_tower": False,
    "lora.rank": 0,
    "lora.alpha": 64,
    "lora.target_modules": "all-linear",
    "lora.exclude_modules": None,
}
OPTIM = {
    "lr": 1e-6,
    "betas": [0.9, 0.999],
    "weight_decay": 1e-2,
    "strategy": "adamw",
    "lr_warmup_ratio": 0.0,
    "lr_warmup_steps": None,
    "min_lr_ratio": None,
    "lr_scheduler_type": "constant",
}
FSDP = {
    "enable_full_shard": True,
    "enable_cpu_offload": False,
    "enable_rank0_init": True,
    "use_orig_params": False,
    "torch_dtype": None,
    "fsdp_size": -1,
    "mp_param_dtype": "bf16",
    "mp_reduce_dtype": "fp32",
    "mp_buffer_dtype": "fp32",
}
OFFLOAD = {"offload_params": False, "offload_optimizer": False}


def under(prefix: str, *groups: tuple[str, dict]) -> dict:
    return {f"{prefix}.{name}.{key}": value for name, group in groups for key, value in group.items()}


# EasyR1 0.3.3 (b44b311): every key and its dataclass default.
EASYR1 = {
    "data.train_files": "",
    "data.val_files": "",
    "data.prompt_key": "prompt",
    "data.answer_key": "answer",
    "data.image_key": "images",
    "data.video_key": "videos",
    "data.image_dir": None,
    "data.video_fps": 2.0,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.rollout_batch_size": 512,
    "data.mini_rollout_batch_size": None,
    "data.val_batch_size": -1,
    "data.format_prompt": None,
    "data.override_chat_template": None,
    "data.shuffle": True,
    "data.seed": 1,
    "data.min_pixels": 262144,
    "data.max_pixels": 4194304,
    "data.filter_overlong_prompts": True,
    "data.filter_overlong_prompts_workers": 16,
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.adv_estimator": "grpo",
    "algorithm.disable_kl": False,
    "algorithm.use_kl_loss": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_coef": 1e-3,
    "algorithm.kl_type": "fixed",
    "algorithm.kl_horizon": 10000,
    "algorithm.kl_target": 0.1,
    "algorithm.online_filtering": False,
    "algorithm.filter_key": "overall",
    "algorithm.filter_low": 0.01,
    "algorithm.filter_high": 0.99,
    "worker.hybrid_engine": True,
    "worker.actor.strategy": "fsdp",
    "worker.actor.global_batch_size": 256,
    "worker.actor.micro_batch_size_per_device_for_update": 4,
    "worker.actor.micro_batch_size_per_device_for_experience": 16,
    "worker.actor.max_grad_norm": 1.0,
    "worker.actor.clip_ratio_low": 0.2,
    "worker.actor.clip_ratio_high": 0.3,
    "worker.actor.clip_ratio_dual": 3.0,
    "worker.actor.loss_avg_mode": "token",
    "worker.actor.loss_type": "default",
    "worker.actor.tau_positive": 1.0,
    "worker.actor.tau_negative": 1.05,
    "worker.actor.ppo_epochs": 1,
    "worker.actor.padding_free": True,
    "worker.actor.dynamic_batching": True,
    "worker.actor.ulysses_size": 1,
    "worker.actor.use_torch_compile": True,
    **under("worker.actor", ("model", MODEL), ("optim", OPTIM), ("fsdp", FSDP), ("offload", OFFLOAD)),
    "worker.rollout.name": "vllm",
    "worker.rollout.n": 1,
    "worker.rollout.temperature": 1.0,
    "worker.rollout.top_p": 1.0,
    "worker.rollout.top_k": -1,
    "worker.rollout.seed": 1,
    "worker.rollout.limit_images": 0,
    "worker.rollout.dtype": "bf16",
    "worker.rollout.gpu_memory_utilization": 0.6,
    "worker.rollout.ignore_eos": False,
    "worker.rollout.enforce_eager": False,
    "worker.rollout.enable_chunked_prefill": False,
    "worker.rollout.tensor_parallel_size": 2,
    "worker.rollout.max_model_len": None,
    "worker.rollout.max_num_batched_tokens": 8192,
    "worker.rollout.disable_log_stats": True,
    "worker.rollout.disable_tqdm": False,
    "worker.rollout.val_override_config": {},
    "worker.ref.strategy": "fsdp",
    **under("worker.ref", ("fsdp", FSDP), ("offload", OFFLOAD)),
    "worker.critic.strategy": "fsdp",
    "worker.critic.global_batch_size": 256,
    "worker.critic.micro_batch_size_per_device_for_update": 4,
    "worker.critic.micro_batch_size_per_device_for_experience": 16,
    "worker.critic.max_grad_norm": 1.0,
    "worker.critic.cliprange_value": 0.5,
    "worker.critic.loss_avg_mode": "token",
    "worker.critic.ppo_epochs": 1,
    "worker.critic.padding_free": False,
    "worker.critic.dynamic_batching": True,
    "worker.critic.ulysses_size": 1,
    **under("worker.critic", ("model", MODEL), ("optim", OPTIM), ("fsdp", FSDP), ("offload", OFFLOAD)),
    "worker.reward.reward_function": None,
    "worker.reward.reward_function_kwargs": {},
    "worker.reward.skip_special_tokens": True,
    "worker.reward.num_cpus": 1,
    "trainer.total_epochs": 15,
    "trainer.max_steps": None,
    "trainer.project_name": "easy_r1",
    "trainer.experiment_name": "demo",
    "trainer.logger": ["console", "wandb"],
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.max_try_make_batch": 20,
    "trainer.critic_warmup": 0,
    "trainer.val_freq": -1,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.val_generations_to_log": 0,
    "trainer.save_freq": -1,
    "trainer.save_limit": -1,
    "trainer.save_model_only": False,
    "trainer.save_checkpoint_path": None,
    "trainer.load_checkpoint_path": None,
    "trainer.ray_timeline": None,
    "trainer.find_last_checkpoint": True,
}
DEVIATIONS = {
    "data.answer_key": None,  # what rows of each shape have; a name comes first, "answer" too
    "worker.rollout.tensor_parallel_size": None,
    "worker.rollout.dtype": "auto",
    "worker.actor.loss_avg_mode": None,  # token, or what a loss of TRL's implies
    "trainer.logger": ["console", "file", "tensorboard"],
    "trainer.nnodes": None,
    "trainer.n_gpus_per_node": None,
}


def test_the_schema_has_easyr1s_keys_with_their_defaults_but_for_the_deviations() -> None:
    found = {key: option.default for key, option in schema_options().items()}
    assert {key: found.get(key, "missing") for key in EASYR1} == EASYR1 | DEVIATIONS


def test_every_key_has_help_and_a_reason_when_it_does_not_work() -> None:
    for key, option in schema_options().items():
        assert option.help.strip() and option.help.strip()[-1] in ".)", key
        assert option.status in (WORKS, NEUTRAL, PLANNED), key
        assert bool(option.reason) or option.status == WORKS, key


def test_every_default_is_of_its_type_among_its_choices_and_in_its_range() -> None:
    for key, option in schema_options().items():
        assert fits(option.default, option.kind, option.optional), key
        if option.default is None:
            continue
        items = option.default if isinstance(option.default, list) else [option.default]
        assert not option.choices or all(item in option.choices for item in items), key
        assert option.rule is None or all(option.rule.holds(item) for item in items), key
        assert not set(option.choices) & set(option.refused), key


def test_the_common_keys_are_few_and_all_of_them_work() -> None:
    common = [option for option in schema_options().values() if option.common]
    assert 15 <= len(common) <= 25
    assert {option.status for option in common} == {WORKS}


@pytest.mark.parametrize("prefix", ["worker.critic.", "worker.ref."])
def test_a_neutral_section_makes_all_keys_below_it_neutral(prefix: str) -> None:
    statuses = {option.status for key, option in schema_options().items() if key.startswith(prefix)}
    assert statuses == {NEUTRAL}
    assert schema_options()["worker.actor.fsdp.torch_dtype"].status == WORKS  # same class, other section


def test_instances_share_no_lists_or_sections() -> None:
    one, other = Config(), Config()
    one.trainer.logger.append("x")
    one.worker.actor.optim.betas[0] = 0.5
    one.worker.rollout.val_override_config["n"] = 2
    one.worker.critic.optim.lr = 1.0
    assert other == Config()
    assert one.worker.actor.optim.lr == 1e-6


def test_omegaconf_accepts_the_schema() -> None:
    assert OmegaConf.to_object(OmegaConf.structured(Config)) == Config()


def test_sections_are_the_prefixes_of_all_keys() -> None:
    parents = {key.rpartition(".")[0] for key in schema_options()}
    prefixes = {".".join(parent.split(".")[:count]) for parent in parents for count in range(1, parent.count(".") + 2)}
    assert set(sections(Config)) == prefixes
    assert len(sections(Config)) == len(prefixes)
