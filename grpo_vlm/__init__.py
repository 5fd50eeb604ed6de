"""grpo_vlm: teaches vision-language models with GRPO on one machine.

The public names: `Run` trains; `load_config` and `Config` are the configuration; the four errors are what a user can
mend.
"""

from grpo_vlm.config import Config, load_config
from grpo_vlm.errors import ConfigError, DataError, GRPOVLMError, RewardError, RolloutError
from grpo_vlm.run import Result, Run

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConfigError",
    "DataError",
    "GRPOVLMError",
    "Result",
    "RewardError",
    "RolloutError",
    "Run",
    "load_config",
]
