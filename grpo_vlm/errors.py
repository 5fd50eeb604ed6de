"""The four faults a user can cause. Each message names the key or row, the value seen and the remedy.

All are ValueErrors, so that notebooks and callers that expect the standard class keep working. train.py turns them
into exit code 2 (RolloutError: 1) without a traceback.
"""


class GRPOVLMError(ValueError):
    """Base of every error whose message is written for the user."""


class ConfigError(GRPOVLMError):
    """A key, a value, a combination of values or a path in the configuration is wrong."""


class DataError(GRPOVLMError):
    """A file, a column, a row or a picture of the data set is wrong."""


class MediaError(DataError):
    """A picture or a video of a row cannot be read or used. `data.on_bad_media` says what becomes of its row."""


class RewardError(GRPOVLMError):
    """The reward function cannot be loaded, raised, or returned something that is not one finite score per sample."""


class RolloutError(GRPOVLMError):
    """The generation engine cannot start, answer or take the weights."""
