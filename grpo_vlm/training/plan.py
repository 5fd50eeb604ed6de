"""Which prompts belong to which optimizer update, on which rank."""

from torch.utils.data import Dataset

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.data.sampler import rollout_rows


class RolloutPlan(Dataset):
    """Item u is what update u needs: this rank's prompts at the first update of a rollout step, an empty list at the
    others.

    A pure function of the seed and u, so that a resumed run sees the rows that the unbroken one would have seen.
    Rank r takes a contiguous share of whole prompts of
    each optimizer update, so that an update's rows are the same for every number of ranks.
    """

    def __init__(self, rows: PromptDataset, config: Config, rollout_steps: int, *, rank: int, world_size: int):
        self.rows, self.data, self.rollout_steps = rows, config.data, rollout_steps
        self.updates = updates_per_step(config)
        self.update_size = config.worker.actor.global_batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return self.rollout_steps * self.updates

    def __getitem__(self, update: int) -> list[Prompt]:
        if update >= len(self):
            raise IndexError(update)
        step, within = divmod(update, self.updates)
        return [self.rows[index] for index in self.row_numbers(step)] if within == 0 else []

    def row_numbers(self, step: int) -> list[int]:
        """Row indices of this rank in rollout step `step` (from 0)."""
        everyone = rollout_rows(
            len(self.rows), self.data.rollout_batch_size, step, shuffle=self.data.shuffle, seed=self.data.seed
        )
        share = self.update_size // self.world_size
        mine = []
        for first in range(0, len(everyone), self.update_size):
            start = first + self.rank * share
            mine += everyone[start : start + share]
        return mine
