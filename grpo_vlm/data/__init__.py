"""Data: rows of a file, folder or hub data set become Prompts, checked before training starts."""

from grpo_vlm.data.dataset import DataReport, PromptDataset
from grpo_vlm.data.rows import Prompt, PromptBuilder
from grpo_vlm.data.sampler import rollout_rows, steps_per_epoch

__all__ = ["DataReport", "Prompt", "PromptBuilder", "PromptDataset", "rollout_rows", "steps_per_epoch"]
