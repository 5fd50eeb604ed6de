"""Loads the processor, the policy and the reference model as the configuration says."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel, ProcessorMixin

from grpo_vlm.config import Config, dtype_name, read_template, tokenizer_path
from grpo_vlm.errors import ConfigError
from grpo_vlm.model.packed import enable_packing, form


def load_processor(config: Config) -> ProcessorMixin:
    """The multimodal processor of `tokenizer_path` (default: of the model), with `data.override_chat_template`
    applied."""
    model = config.worker.actor.model
    path = tokenizer_path(config)
    key = "worker.actor.model." + ("tokenizer_path" if model.tokenizer_path else "model_path")
    processor = _from_pretrained(AutoProcessor, path, key, trust_remote_code=model.trust_remote_code)
    if not isinstance(processor, ProcessorMixin):
        raise ConfigError(
            f"worker.actor.model.model_path: {path!r} has only a tokenizer ({type(processor).__name__}), no image"
            " processor. Give the path of a vision-language model (Qwen2.5-VL, Qwen3-VL, ...)."
        )
    if config.data.override_chat_template:
        template = read_template("data.override_chat_template", config.data.override_chat_template)
        processor.chat_template = processor.tokenizer.chat_template = template
    return processor


def load_policy(config: Config, path: str | Path | None = None) -> PreTrainedModel:
    """The model to train, with frozen parts already frozen. `path` overrides the configured model (a checkpoint's
    model folder on resume)."""
    model = _load(config, path, master_dtype(config))
    if config.worker.actor.model.freeze_vision_tower:
        for parameter in vision_tower(model).parameters():
            parameter.requires_grad_(False)
    return model


def load_reference(config: Config) -> PreTrainedModel:
    """The frozen start of the run: always the configured model, never a checkpoint of the run."""
    return _load(config, None, master_dtype(config)).requires_grad_(False).eval()


def master_dtype(config: Config) -> torch.dtype:
    """`worker.actor.fsdp.torch_dtype`; float32 when null."""
    return getattr(torch, dtype_name(config.worker.actor.fsdp.torch_dtype or "float32"))


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """The vision tower with its merger (transformers >= 5 puts it at `model.model.visual`)."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("visual", "vision_tower"):
            return module
    raise ConfigError(
        f"worker.actor.model.freeze_vision_tower: no vision tower was found in {type(model).__name__}."
        " Set it to false."
    )


def _load(config: Config, path: str | Path | None, dtype: torch.dtype) -> PreTrainedModel:
    model = config.worker.actor.model
    source = str(path or model.model_path)
    key = "worker.actor.model.model_path"
    loaded = _from_pretrained(
        AutoModelForImageTextToText,
        source,
        key,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=model.trust_remote_code,
    )
    if config.worker.actor.padding_free and form(loaded.config)[0] == "packed":
        enable_packing(loaded)
    return loaded


def _from_pretrained(cls: type, path: str, key: str, **options: Any) -> Any:
    """transformers reports an absent or unusable model as OSError or ValueError with a long text: one message with
    the key instead."""
    try:
        return cls.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}: {path!r} could not be loaded as a vision-language model: {reason}"
            " Give a folder written by save_pretrained, or the id of a model on a hub that this machine reaches."
        ) from error
