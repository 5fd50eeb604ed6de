"""The configuration in the terms of TRL's GRPOConfig: what the inherited trainer reads. One trainer step is one
optimizer update."""

import math
import os
from pathlib import Path

import torch
from trl import GRPOConfig

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.config.check_sharding import FSDP2, ZERO, launched
from grpo_vlm.config.values import is_bf16


def launched_sharded() -> bool:
    """Whether `accelerate launch` started this process for DeepSpeed or FSDP."""
    return launched(os.environ).kind in (ZERO, FSDP2)


def computes_in_bf16(config: Config) -> bool:
    """Whether an accelerator computes in bf16."""
    return is_bf16(config.worker.actor.fsdp.mp_param_dtype)


def has_bf16_weights(config: Config) -> bool:
    """Whether the trained weights are bf16 themselves."""
    return is_bf16(config.worker.actor.fsdp.torch_dtype)


def casts_to_bf16(config: Config) -> bool:
    """Whether float32 weights are cast for the computation: by autocast, DeepSpeed or FSDP."""
    return torch.accelerator.is_available() and computes_in_bf16(config) and not has_bf16_weights(config)


def training_arguments(config: Config, output_dir: Path, rollout_steps: int, world_size: int) -> GRPOConfig:
    """GRPOConfig for `rollout_steps` steps. Saving, logging and evaluation are ours, so TRL's are switched off; so
    is its reference model (beta 0) and its own generation."""
    actor = config.worker.actor
    on_cpu = not torch.accelerator.is_available()
    sharded = launched_sharded()
    group = max(2, config.worker.rollout.n)  # TRL's own sampler, which is not used, knows no groups of one answer
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"  # `mp_param_dtype` decides, not the launcher's file
    return GRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=actor.global_batch_size // world_size * group,
        gradient_accumulation_steps=1,
        num_generations=group,
        max_completion_length=config.data.max_response_length,
        temperature=config.worker.rollout.temperature,
        max_steps=rollout_steps * updates_per_step(config),
        learning_rate=actor.optim.lr,
        adam_beta1=actor.optim.betas[0],
        adam_beta2=actor.optim.betas[1],
        weight_decay=actor.optim.weight_decay,
        optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        max_grad_norm=actor.max_grad_norm,
        gradient_checkpointing=actor.model.enable_gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=casts_to_bf16(config),
        use_cpu=on_cpu and not sharded,
        accelerator_config={"use_configured_state": on_cpu and sharded},
        seed=config.worker.rollout.seed,
        beta=0.0,
        use_vllm=False,
        remove_unused_columns=False,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,  # it waits for the device after every update
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        trust_remote_code=actor.model.trust_remote_code,
    )


def learning_rate_factor(config: Config, step: int, rollout_steps: int) -> float:
    """The schedule at rollout step `step` (from 0), as a factor of `lr`: linear warm-up, then constant or a cosine
    down to `min_lr_ratio`.

    EasyR1 advances its scheduler once per rollout step as well; its first warm-up step has rate 0, here it has 1 /
    warm-up, so that no step is without effect.
    """
    optim = config.worker.actor.optim
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps is not None else int(optim.lr_warmup_ratio * rollout_steps)
    if step < warmup:
        return (step + 1) / warmup
    if optim.lr_scheduler_type == "constant":
        return 1.0
    progress = (step - warmup) / max(1, rollout_steps - warmup)
    floor = optim.min_lr_ratio or 0.0
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
