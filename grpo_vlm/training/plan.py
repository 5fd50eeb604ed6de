"""Which prompts belong to which optimizer update, on which rank, and when they are built."""

from torch.utils.data import Dataset

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.data.sampler import rollout_rows
from grpo_vlm.data.workers import Pending, PromptPool


class RolloutPlan(Dataset):
    """Item u is what update u needs: this rank's prompts at the first update of a rollout step, an empty list at the
    others.

    A pure function of the seed and u, so that a resumed run sees the rows that the unbroken one would have seen; what
    is skipped is not built. Rank r takes a contiguous share of whole prompts of each optimizer update, so that an
    update's rows are the same for every number of ranks.
    When a step's prompts are taken, the workers of `pool` begin with those of the next step.
    """

    def __init__(
        self,
        rows: PromptDataset,
        config: Config,
        rollout_steps: int,
        *,
        rank: int,
        world_size: int,
        pool: PromptPool | None = None,
    ):
        self.rows, self.data, self.rollout_steps = rows, config.data, rollout_steps
        self.updates = updates_per_step(config)
        self.update_size = config.worker.actor.global_batch_size
        self.rank, self.world_size = rank, world_size
        self.pool = PromptPool(0) if pool is None else pool
        self._ahead: dict[int, Pending] = {}

    def __len__(self) -> int:
        return self.rollout_steps * self.updates

    def __getitem__(self, update: int) -> list[Prompt]:
        if update >= len(self):
            raise IndexError(update)
        step, within = divmod(update, self.updates)
        if within:
            return []
        self.prefetch(step)
        prompts = self._ahead.pop(step).prompts()
        self.prefetch(step + 1)
        return prompts

    def prefetch(self, step: int) -> None:
        """Lets the workers begin with rollout step `step` (from 0), unless they have or there is none. Does not
        wait; without workers nothing is built before it is needed."""
        if step < self.rollout_steps and step not in self._ahead:
            self._ahead[step] = self.pool.submit(self.rows, self.row_numbers(step))

    @property
    def places(self) -> list[int]:
        """For each prompt of this rank its number among those of the rollout step, over all ranks."""
        share = self.update_size // self.world_size
        firsts = range(self.rank * share, self.data.rollout_batch_size, self.update_size)
        return [first + number for first in firsts for number in range(share)]

    def row_numbers(self, step: int) -> list[int]:
        """Row indices of this rank in rollout step `step` (from 0)."""
        everyone = rollout_rows(
            len(self.rows), self.data.rollout_batch_size, step, shuffle=self.data.shuffle, seed=self.data.seed
        )
        return [everyone[place] for place in self.places]
