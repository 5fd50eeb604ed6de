"""Which prompts belong to which optimizer update, on which rank, and when they are built."""

from collections.abc import Sequence

from torch.utils.data import Dataset

from grpo_vlm.config import Config, updates_per_step
from grpo_vlm.data.dataset import PromptDataset
from grpo_vlm.data.rows import Prompt
from grpo_vlm.data.sampler import rollout_rows
from grpo_vlm.data.workers import Pending, PromptPool

SOME = 4


class RolloutPlan(Dataset):
    """Item u is what update u needs: this rank's prompts at the first update of a rollout step, an empty list at the
    others.

    A pure function of the seed and u, so that a resumed run sees the rows that the unbroken one would have seen; what
    is skipped is not built. Rank r takes a contiguous share of whole prompts of each optimizer update, so that an
    update's rows are the same for every number of ranks.
    When a step's prompts are taken, the workers of `pool` begin with those of the next step.

    With online filtering a step takes as many rounds as it needs: all items are empty, and `round` gives the prompts
    of a round by its number over the whole run.
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
        self.filtering = config.algorithm.online_filtering
        self.round_size = config.data.mini_rollout_batch_size or config.data.rollout_batch_size
        self.rank, self.world_size = rank, world_size
        self.pool = PromptPool(0) if pool is None else pool
        self._ahead: dict[int, Pending] = {}

    def __len__(self) -> int:
        return self.rollout_steps * self.updates

    def __getitem__(self, update: int) -> list[Prompt]:
        if update >= len(self):
            raise IndexError(update)
        step, within = divmod(update, self.updates)
        if within or self.filtering:
            return []
        return self._take(step)

    def round(self, number: int) -> tuple[list[int], list[Prompt]]:
        """Row numbers and prompts of this rank in a round of generation under online filtering."""
        return self.row_numbers(number), self._take(number)

    def build(self, rows: Sequence[int]) -> list[Prompt]:
        """The prompts of these rows."""
        return self.pool.prompts(self.rows, rows)

    def some(self) -> list[Prompt]:
        """The first prompts of this rank, a few."""
        return self.build(self.row_numbers(0)[:SOME])

    def _take(self, number: int) -> list[Prompt]:
        self.prefetch(number)
        prompts = self._ahead.pop(number).prompts()
        self.prefetch(number + 1)
        return prompts

    def prefetch(self, number: int) -> None:
        """Lets the workers begin with rollout step or round `number` (from 0), unless they have or there is none.
        Does not wait; without workers nothing is built before it is needed."""
        if (self.filtering or number < self.rollout_steps) and number not in self._ahead:
            self._ahead[number] = self.pool.submit(self.rows, self.row_numbers(number))

    @property
    def places(self) -> list[int]:
        """For each prompt of this rank its number among those of the rollout step, over all ranks."""
        share = self.update_size // self.world_size
        firsts = range(self.rank * share, self.data.rollout_batch_size, self.update_size)
        return [first + number for first in firsts for number in range(share)]

    @property
    def round_places(self) -> list[int]:
        """The same for a round: every rank has a share in one piece."""
        share = self.round_size // self.world_size
        return list(range(self.rank * share, (self.rank + 1) * share))

    def row_numbers(self, number: int) -> list[int]:
        """Row indices of this rank in rollout step or round `number` (from 0)."""
        size = self.round_size if self.filtering else self.data.rollout_batch_size
        everyone = rollout_rows(len(self.rows), size, number, shuffle=self.data.shuffle, seed=self.data.seed)
        return [everyone[place] for place in (self.round_places if self.filtering else self.places)]
