"""Values that follow from the configuration and that several rooms need."""

from pathlib import Path

from grpo_vlm.config.schema import Config


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


def sampling_values(config: Config, *, validation: bool) -> dict[str, float]:
    """Values of n, temperature, top_p, top_k and max_tokens in training, or in validation with its overrides."""
    rollout = config.worker.rollout
    values = {
        "n": rollout.n,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_tokens": config.data.max_response_length,
    }
    return values | rollout.val_override_config if validation else values
