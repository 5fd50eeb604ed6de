"""Values that follow from the configuration and that several rooms need."""

from pathlib import Path
from typing import Any

from grpo_vlm.config.schema import Config
from grpo_vlm.errors import ConfigError

KEY_VARIABLE = "GRPO_VLM_ROLLOUT_KEY"  # environment variable with the key of the rollout server
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def updates_per_step(config: Config) -> int:
    """Optimizer updates per rollout step: rollout_batch_size / global_batch_size * ppo_epochs."""
    actor = config.worker.actor
    return config.data.rollout_batch_size // actor.global_batch_size * actor.ppo_epochs


def run_folder(config: Config) -> Path:
    """The run folder: trainer.save_checkpoint_path, or checkpoints/PROJECT/EXPERIMENT under the working directory."""
    trainer = config.trainer
    if trainer.save_checkpoint_path is not None:
        return Path(trainer.save_checkpoint_path).expanduser().absolute()
    return Path("checkpoints", trainer.project_name, trainer.experiment_name).absolute()


def tokenizer_path(config: Config) -> str | None:
    """Where the tokenizer and processor come from: tokenizer_path, or model_path when that is null."""
    model = config.worker.actor.model
    return model.tokenizer_path or model.model_path


def dtype_name(value: str) -> str:
    """torch's name of a dtype that the configuration may write in short: bf16 -> bfloat16."""
    return DTYPE_NAMES.get(value, value)


def is_bf16(value: str | None) -> bool:
    """Whether the configuration names bfloat16."""
    return value is not None and dtype_name(value) == "bfloat16"


def read_template(key: str, path: str) -> str:
    """The text of a template file that `key` names. ConfigError when it is no file or not plain UTF-8.

    A byte-order mark is refused: it would become part of the prompt wherever vLLM reads the same file.
    """
    if not Path(path).is_file():
        raise ConfigError(f"{key}: {path!r} is not a file (looked in {Path.cwd()}); give an existing path or null")
    content = Path(path).read_bytes()
    try:
        text = content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{key}: {path}, line {line}: is not UTF-8 ({error.reason}); save it as UTF-8") from None
    if text.startswith("\ufeff"):
        raise ConfigError(f"{key}: {path}, line 1: starts with a byte-order mark; save it as UTF-8 without one")
    return text


def sampling_values(config: Config, *, validation: bool) -> dict[str, Any]:
    """Values of n, temperature, top_p, top_k, min_p, repetition_penalty, max_tokens and stop in training, or in
    validation with its overrides."""
    rollout = config.worker.rollout
    values = {
        "n": rollout.n,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "repetition_penalty": rollout.repetition_penalty,
        "stop": tuple(rollout.stop),
        "max_tokens": config.data.max_response_length,
    }
    return values | rollout.val_override_config if validation else values
