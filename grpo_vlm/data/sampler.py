"""Which rows a rollout step uses: a pure function of step and seed, so that a resumed run draws exactly the rows of an
unbroken one."""

import torch

from grpo_vlm.errors import DataError


def steps_per_epoch(num_rows: int, prompts_per_step: int) -> int:
    """Rollout steps in one pass over num_rows; the rows that do not fill a step are left out of that epoch (EasyR1's
    drop_last).

    Raises DataError when the data set is smaller than one step.
    """
    if prompts_per_step < 1:
        raise DataError(f"a rollout step needs at least 1 prompt, got {prompts_per_step}")
    if num_rows < prompts_per_step:
        raise DataError(
            f"the training data have {num_rows} usable rows but one rollout step takes {prompts_per_step}; "
            f"lower data.rollout_batch_size to at most {num_rows} or add data"
        )
    return num_rows // prompts_per_step


def rollout_rows(num_rows: int, prompts_per_step: int, step: int, *, shuffle: bool, seed: int) -> list[int]:
    """Row indices of rollout step `step` (0-based, counted over all epochs).

    With shuffle each epoch is a permutation drawn from a generator seeded with seed + epoch; without it rows come in
    file order.
    """
    epoch, position = divmod(step, steps_per_epoch(num_rows, prompts_per_step))
    first = position * prompts_per_step
    if not shuffle:
        return list(range(first, first + prompts_per_step))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed + epoch))
    return order[first : first + prompts_per_step].tolist()
