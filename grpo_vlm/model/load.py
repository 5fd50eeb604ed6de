"""Loads the processor, the policy and the reference model as the configuration says."""

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    PretrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
)
from transformers.integrations import deepspeed

from grpo_vlm.config import Config, dtype_name, read_template, tokenizer_path
from grpo_vlm.errors import ConfigError
from grpo_vlm.hub import model_folder
from grpo_vlm.model.packed import enable_packing, form

ADAPTER = "adapter"  # folder of a checkpoint
PLACEHOLDERS = {"image_token_id", "video_token_id"}  # what a processor of patch grids knows


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
    if not PLACEHOLDERS <= vars(processor).keys():
        raise ConfigError(
            f"{key}: {path!r} has a {type(processor).__name__}. Models are supported whose pictures and videos become"
            " grids of patches with placeholder tokens of their own: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and their mixtures"
            " of experts."
        )
    if config.data.override_chat_template:
        template = read_template("data.override_chat_template", config.data.override_chat_template)
        processor.chat_template = processor.tokenizer.chat_template = template
    return processor


def load_policy(config: Config, checkpoint: Path | None = None) -> PreTrainedModel | PeftModel:
    """The model to train, with frozen parts already frozen and adapters where `lora.rank` asks for them. checkpoint:
    the folder global_step_N to go on from."""
    settings = config.worker.actor.model
    adapted = settings.lora.rank > 0
    model = _load(config, None if checkpoint is None or adapted else checkpoint / "model", master_dtype(config))
    if settings.freeze_vision_tower or settings.freeze_merger:
        _freeze_vision(vision_tower(model), tower_too=settings.freeze_vision_tower, merger=settings.freeze_merger)
    if not adapted:
        return model
    return _carrying_gradients(_with_adapters(config, model, checkpoint))


def outline_policy(config: Config) -> PreTrainedModel | PeftModel:
    """The model that `load_policy` would train, without its weights: shapes and types alone, on torch's meta device.
    Of the model's folder only config.json is read."""
    settings = config.worker.actor.model
    key, source = "worker.actor.model.model_path", str(settings.model_path)
    shape = _from_pretrained(AutoConfig, source, key, trust_remote_code=settings.trust_remote_code)
    if settings.override_config:
        shape = _overridden(shape, settings.override_config, "worker.actor.model.override_config")
    with torch.device("meta"), _undivided():
        model = AutoModelForImageTextToText.from_config(
            shape, dtype=master_dtype(config), trust_remote_code=settings.trust_remote_code
        )
        if settings.freeze_vision_tower or settings.freeze_merger:
            _freeze_vision(vision_tower(model), tower_too=settings.freeze_vision_tower, merger=settings.freeze_merger)
        return get_peft_model(model, _lora(config)) if settings.lora.rank > 0 else model


@contextmanager
def _undivided() -> Iterator[None]:
    """Models made in the block are whole, also where ZeRO-3 divides those that are loaded, for which all processes
    are needed."""
    former = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = former


def _with_adapters(config: Config, model: PreTrainedModel, checkpoint: Path | None) -> PeftModel:
    if checkpoint is not None:
        return PeftModel.from_pretrained(model, checkpoint / ADAPTER, is_trainable=True)
    with torch.random.fork_rng():  # the same adapters for the same seed, and on every rank
        torch.manual_seed(config.worker.rollout.seed)
        return get_peft_model(model, _lora(config))


def _carrying_gradients(model: PeftModel) -> PeftModel:
    """Lets the embedded patches require gradients where the vision tower has adapters. Under ZeRO-3 TRL makes
    checkpointing reentrant for adapted models, which reaches a block's adapters only if the block's input requires
    gradients; transformers sees to that for the text embeddings alone."""
    tower = vision_tower(model)
    if any(parameter.requires_grad for parameter in tower.parameters()):
        embedding = next(part for name, part in tower.named_modules() if "patch_embed" in name)
        embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    return model


def _lora(config: Config) -> LoraConfig:
    settings = config.worker.actor.model
    named, left_out = settings.lora.target_modules, settings.lora.exclude_modules
    if left_out is None:
        left_out = ".*(visual|vision_tower).*"
    return LoraConfig(
        r=settings.lora.rank,
        lora_alpha=settings.lora.alpha,
        lora_dropout=0.0,  # the same policy must be scored twice
        target_modules=named.split(",") if "," in named else named,
        exclude_modules=left_out or None,
    )


def _freeze_vision(tower: nn.Module, *, tower_too: bool, merger: bool | None) -> None:
    """merger: None as the tower. Qwen3-VL's deepstack mergers go with the merger."""
    merger = tower_too if merger is None else merger
    for name, parameter in tower.named_parameters():
        if merger if "merger" in name else tower_too:
            parameter.requires_grad_(False)


def load_reference(config: Config, path: str | Path | None = None) -> PreTrainedModel:
    """The frozen start of the run: the configured model, or the one in `path` where the reference has moved since."""
    return _load(config, path, master_dtype(config)).requires_grad_(False).eval()


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
    changed = {}
    if model.override_config:
        base = _from_pretrained(AutoConfig, source, key, trust_remote_code=model.trust_remote_code)
        changed["config"] = _overridden(base, model.override_config, "worker.actor.model.override_config")
    loaded = _from_pretrained(
        AutoModelForImageTextToText,
        source,
        key,
        **changed,
        dtype=dtype,
        attn_implementation="sdpa",
        trust_remote_code=model.trust_remote_code,
    )
    if config.worker.actor.padding_free and form(loaded.config)[0] == "packed":
        enable_packing(loaded)
    return loaded


def _overridden(config: PretrainedConfig, entries: Mapping[str, Any], key: str) -> PretrainedConfig:
    """The configuration with these entries. ConfigError for one that it does not have."""
    known = config.to_dict()
    for name, value in entries.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"{key}.{name}: the config.json of {config.model_type} has no such entry"
                + (f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(known)[:20])}, ...")
            )
        part = getattr(config, name)
        if isinstance(part, PretrainedConfig) and isinstance(value, Mapping):
            _overridden(part, value, f"{key}.{name}")
        else:
            setattr(config, name, value)
    return config


def _from_pretrained(cls: type, path: str, key: str, **options: Any) -> Any:
    """transformers reports an absent or unusable model as OSError or ValueError with a long text: one message with
    the key instead."""
    folder = model_folder(path)
    try:
        return cls.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}: {path!r} could not be loaded as a vision-language model: {reason}"
            " Give a folder written by save_pretrained, or the id of a model on a hub that this machine reaches."
        ) from error
