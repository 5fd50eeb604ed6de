"""Configuration: the schema with EasyR1's keys, reading it, and every check that needs no model.

Imports nothing heavy, so that a wrong key is reported at once.
"""

from grpo_vlm.config.check import check_config, load_and_check
from grpo_vlm.config.load import load_config, to_yaml
from grpo_vlm.config.schema import (
    AlgorithmConfig,
    Config,
    DataConfig,
    TrainerConfig,
    WorkerConfig,
)
from grpo_vlm.config.schema_actor import ActorConfig, ModelConfig, OptimConfig
from grpo_vlm.config.schema_rollout import RewardConfig, RolloutConfig
from grpo_vlm.config.values import (
    dtype_name,
    read_template,
    run_folder,
    sampling_values,
    tokenizer_path,
    updates_per_step,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrainerConfig",
    "WorkerConfig",
    "check_config",
    "dtype_name",
    "load_and_check",
    "load_config",
    "read_template",
    "run_folder",
    "sampling_values",
    "to_yaml",
    "tokenizer_path",
    "updates_per_step",
]
