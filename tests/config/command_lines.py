"""Command lines that EasyR1 and verl document, as keys and values; the shell variables in them are filled in.

EasyR1 at 0.3.3 (examples/*.sh and examples/config.yaml), verl at 0.10 (examples/grpo_trainer: Qwen2.5-VL with FSDP,
Qwen3-VL with FSDP, Qwen2.5-VL with Megatron; the NPU branches of the first two).
"""

# examples/config.yaml of EasyR1, with the older `reward_type` that articles about it still write.
EASYR1_CONFIG = {
    "data": {
        "train_files": "hiyouga/math12k@train",
        "val_files": "hiyouga/math12k@test",
        "prompt_key": "problem",
        "answer_key": "answer",
        "image_key": "images",
        "video_key": "videos",
        "image_dir": None,
        "video_fps": 2.0,
        "max_prompt_length": 2048,
        "max_response_length": 2048,
        "rollout_batch_size": 512,
        "mini_rollout_batch_size": None,
        "val_batch_size": 1024,
        "format_prompt": "./examples/format_prompt/math.jinja",
        "override_chat_template": None,
        "shuffle": True,
        "seed": 1,
        "min_pixels": 262144,
        "max_pixels": 4194304,
        "filter_overlong_prompts": True,
    },
    "algorithm": {
        "adv_estimator": "grpo",
        "disable_kl": False,
        "use_kl_loss": True,
        "kl_penalty": "low_var_kl",
        "kl_coef": 1.0e-2,
        "online_filtering": False,
        "filter_key": "overall",
        "filter_low": 0.01,
        "filter_high": 0.99,
    },
    "worker": {
        "actor": {
            "global_batch_size": 128,
            "micro_batch_size_per_device_for_update": 1,
            "micro_batch_size_per_device_for_experience": 2,
            "max_grad_norm": 1.0,
            "padding_free": True,
            "dynamic_batching": True,
            "ulysses_size": 1,
            "model": {
                "model_path": "Qwen/Qwen2.5-7B-Instruct",
                "enable_gradient_checkpointing": True,
                "trust_remote_code": False,
                "freeze_vision_tower": False,
            },
            "optim": {"lr": 1.0e-6, "weight_decay": 1.0e-2, "strategy": "adamw", "lr_warmup_ratio": 0.0},
            "fsdp": {"enable_full_shard": True, "enable_cpu_offload": False, "enable_rank0_init": True},
            "offload": {"offload_params": True, "offload_optimizer": True},
        },
        "rollout": {
            "n": 5,
            "temperature": 1.0,
            "top_p": 1.0,
            "limit_images": 0,
            "gpu_memory_utilization": 0.6,
            "enforce_eager": False,
            "enable_chunked_prefill": False,
            "tensor_parallel_size": 2,
            "disable_tqdm": False,
            "val_override_config": {"temperature": 0.6, "top_p": 0.95, "n": 1},
        },
        "ref": {
            "fsdp": {"enable_full_shard": True, "enable_cpu_offload": True, "enable_rank0_init": True},
            "offload": {"offload_params": False},
        },
        "reward": {
            "reward_type": "batch",
            "reward_function": "./examples/reward_function/math.py:compute_score",
        },
    },
    "trainer": {
        "total_epochs": 15,
        "max_steps": None,
        "project_name": "easy_r1",
        "experiment_name": "qwen2_5_7b_math_grpo",
        "logger": ["file", "wandb"],
        "nnodes": 1,
        "n_gpus_per_node": 8,
        "max_try_make_batch": 20,
        "val_freq": 5,
        "val_before_train": True,
        "val_only": False,
        "val_generations_to_log": 3,
        "save_freq": 5,
        "save_limit": 3,
        "save_model_only": False,
        "save_checkpoint_path": None,
        "load_checkpoint_path": None,
        "find_last_checkpoint": True,
    },
}

_GEO3K = (
    "config=examples/config.yaml data.train_files=hiyouga/geometry3k@train data.val_files=hiyouga/geometry3k@test "
)
_7B = _GEO3K + "worker.actor.model.model_path=Qwen/Qwen2.5-VL-7B-Instruct trainer.n_gpus_per_node=8 "
EASYR1 = {
    "qwen2_5_vl_7b_geo3k_grpo": _7B + "trainer.experiment_name=qwen2_5_vl_7b_geo_grpo",
    "qwen2_5_vl_3b_geo3k_grpo": _GEO3K
    + "worker.actor.model.model_path=Qwen/Qwen2.5-VL-3B-Instruct worker.rollout.tensor_parallel_size=1 "
    "trainer.experiment_name=qwen2_5_vl_3b_geo_grpo trainer.n_gpus_per_node=2",
    "qwen2_5_vl_32b_geo3k_grpo": _GEO3K
    + "worker.actor.model.model_path=Qwen/Qwen2.5-VL-32B-Instruct worker.actor.fsdp.torch_dtype=bf16 "
    "worker.actor.optim.strategy=adamw_bf16 worker.rollout.tensor_parallel_size=8 "
    "trainer.experiment_name=qwen2_5_vl_32b_geo_grpo trainer.n_gpus_per_node=8",
    "qwen2_5_vl_7b_geo3k_dapo": _7B
    + "data.mini_rollout_batch_size=128 worker.actor.clip_ratio_low=0.2 worker.actor.clip_ratio_high=0.28 "
    "algorithm.disable_kl=True algorithm.online_filtering=True algorithm.filter_key=accuracy "
    "trainer.experiment_name=qwen2_5_vl_7b_geo_dapo",
    "qwen2_5_vl_7b_geo3k_gspo": _7B
    + "worker.actor.loss_type=gspo_token worker.actor.loss_avg_mode=seq worker.actor.clip_ratio_low=3e-4 "
    "worker.actor.clip_ratio_high=4e-4 algorithm.disable_kl=True trainer.experiment_name=qwen2_5_vl_7b_geo_gspo",
    "qwen2_5_vl_7b_geo3k_cispo": _7B
    + "worker.actor.loss_type=cispo worker.actor.clip_ratio_low=0.0 worker.actor.clip_ratio_high=4.0 "
    "trainer.experiment_name=qwen2_5_vl_7b_geo_cispo",
    "qwen2_5_vl_7b_geo3k_sapo": _7B
    + "worker.actor.loss_type=sapo worker.actor.tau_positive=1.0 worker.actor.tau_negative=1.05 "
    "algorithm.disable_kl=True trainer.experiment_name=qwen2_5_vl_7b_geo_sapo",
    "qwen2_5_vl_7b_geo3k_swanlab": _7B + "trainer.logger=['file','swanlab']",
    "qwen3_vl_30b_geo3k_grpo": _GEO3K
    + "worker.actor.model.model_path=Qwen/Qwen3-VL-30B-A3B-Instruct worker.actor.fsdp.torch_dtype=bf16 "
    "worker.actor.optim.strategy=adamw_bf16 worker.rollout.tensor_parallel_size=8 "
    "trainer.experiment_name=qwen3_vl_30b_geo_grpo trainer.n_gpus_per_node=8",
    "qwen3_4b_math_grpo_lora": "config=examples/config.yaml data.max_response_length=2048 "
    "worker.actor.model.model_path=Qwen/Qwen3-4B trainer.experiment_name=qwen3_4b_math_grpo_lora "
    "worker.actor.model.lora.rank=64 worker.actor.model.lora.alpha=64 worker.actor.optim.lr=1e-5 "
    "worker.rollout.tensor_parallel_size=1 trainer.n_gpus_per_node=1",
    "qwen3_14b_dapo17k_dapo": "config=examples/config.yaml data.train_files=Saigyouji-Yuyuko1000/dapo17k@train "
    "data.val_files=Saigyouji-Yuyuko1000/dapo17k@test data.format_prompt=./examples/format_prompt/math.jinja "
    "data.max_prompt_length=2048 data.max_response_length=20480 data.rollout_batch_size=512 "
    "data.mini_rollout_batch_size=1536 worker.actor.micro_batch_size_per_device_for_update=1 "
    "worker.actor.micro_batch_size_per_device_for_experience=8 worker.actor.model.model_path=Qwen/Qwen3-14B-Base "
    "worker.actor.fsdp.torch_dtype=bf16 worker.actor.optim.strategy=adamw_bf16 worker.actor.optim.weight_decay=0.1 "
    "worker.actor.optim.lr_warmup_steps=10 worker.actor.global_batch_size=32 worker.actor.clip_ratio_low=0.2 "
    "worker.actor.clip_ratio_high=0.28 worker.actor.clip_ratio_dual=10.0 worker.rollout.n=16 "
    "worker.rollout.max_num_batched_tokens=22528 "
    'worker.rollout.val_override_config={"n":16,"temperature":1.0,"top_p":0.7} '
    "worker.rollout.gpu_memory_utilization=0.8 "
    "worker.reward.reward_function=./examples/reward_function/dapo.py:compute_score "
    "worker.reward.reward_function_kwargs="
    '{"max_response_length":20480,"overlong_buffer_length":4096,"overlong_penalty_factor":1.0} '
    "algorithm.disable_kl=True algorithm.online_filtering=True algorithm.filter_key=accuracy_normalized "
    "algorithm.filter_low=0.01 algorithm.filter_high=0.99 trainer.total_epochs=10 trainer.max_try_make_batch=10 "
    "trainer.experiment_name=qwen3_14b_dapo17k_dapo trainer.n_gpus_per_node=8",
    "two nodes, as an article about it has it": _7B + "trainer.n_nodes=2 worker.reward.reward_type=function",
}

_DATA = (
    "algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False data.train_files=data/geo3k/train.parquet "
    "data.val_files=data/geo3k/test.parquet data.image_key=images data.train_batch_size=512 "
    "data.max_prompt_length=1024 data.max_response_length=2048 data.filter_overlong_prompts=True "
    "data.truncation=error "
)
_ACTOR = (
    "actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
    "actor_rollout_ref.actor.entropy_coeff=0 "
)
_ROLLOUT = (
    "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 "
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True "
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576 "
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True "
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576 "
)
_TRAINER = (
    'trainer.balance_batch=True trainer.logger=["console","wandb"] trainer.project_name=verl_grpo_geo3k '
    "trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 "
)
_QWEN2_5 = (
    _DATA
    + _ACTOR
    + "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct "
    + "actor_rollout_ref.model.enable_gradient_checkpointing=True "
    "actor_rollout_ref.actor.fsdp_config.param_offload=False "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False "
    + _ROLLOUT
    + "actor_rollout_ref.ref.fsdp_config.param_offload=True "
    + _TRAINER
    + "trainer.experiment_name=qwen2_5_vl_7b_vllm_fsdp actor_rollout_ref.actor.strategy=fsdp2 "
    "actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.rollout.multi_stage_wake_up=True "
    "actor_rollout_ref.rollout.enable_chunked_prefill=False actor_rollout_ref.rollout.enforce_eager=False "
    "actor_rollout_ref.rollout.free_cache_engine=True "
)
_QWEN3 = (
    _DATA
    + _ACTOR
    + "actor_rollout_ref.model.path=Qwen/Qwen3-VL-8B-Instruct "
    + "actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp2 "
    + _ROLLOUT
    + "actor_rollout_ref.rollout.enable_chunked_prefill=False actor_rollout_ref.ref.fsdp_config.param_offload=True "
    + _TRAINER
    + "trainer.experiment_name=qwen3_vl_8b_grpo_vllm_fsdp "
)
VERL = {
    "qwen2_5_vl_7b_fsdp": _QWEN2_5,
    "qwen2_5_vl_7b_fsdp on npu": _QWEN2_5
    + "trainer.n_gpus_per_node=16 actor_rollout_ref.rollout.gpu_memory_utilization=0.5 "
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=0 "
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 actor_rollout_ref.model.use_fused_kernels=False "
    "actor_rollout_ref.rollout.multi_stage_wake_up=False actor_rollout_ref.rollout.free_cache_engine=False",
    "qwen3_vl_8b_fsdp": _QWEN3
    + "actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.actor.fsdp_config.param_offload=False "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.enforce_eager=False "
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "qwen3_vl_8b_fsdp on npu": _QWEN3
    + "actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.param_offload=True "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True "
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1 "
    "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=1",
    "qwen2_5_vl_7b_megatron": _DATA
    + _ACTOR
    + "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.model.use_fused_kernels=True "
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 "
    "actor_rollout_ref.actor.megatron.use_mbridge=True "
    + _ROLLOUT
    + "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 "
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.ref.megatron.use_mbridge=True "
    + _TRAINER
    + "trainer.experiment_name=qwen2_5_vl_7b_vllm_megatron model_engine=megatron",
}
