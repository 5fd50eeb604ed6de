"""Seeded inputs, and two ranks in two threads."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_vlm.algorithms.ranks import Ranks

B, T = 8, 12
GROUPS = ["a", "b", "a", "c", "b", "a", "b", "b"]  # of 3, 4 and 1 samples, mixed


@dataclass
class Draw:
    """Old, current and reference log-probs, advantages, importance weights and mask of one update, [B, T] float64."""

    old: Tensor
    new: Tensor
    ref: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor

    @classmethod
    def make(cls, seed: int = 0, spread: float = 0.7) -> "Draw":
        generator = torch.Generator().manual_seed(seed)
        noise = [torch.randn(B, T, generator=generator, dtype=torch.float64) for _ in range(4)]
        lengths = torch.randint(1, T + 1, (B,), generator=generator)
        mask = (torch.arange(T)[None] < lengths[:, None]).double()
        old = -0.05 - noise[0].abs()
        new = -0.05 - (old + 0.05 + spread * noise[1]).abs()
        signs = torch.tensor([1, -1, 1, -1, 1, -1, 1, -1])[:, None]
        return cls(
            old=old,
            new=new,
            ref=-noise[3].abs(),
            advantages=signs * noise[2].abs() * torch.linspace(0.5, 3, B)[:, None],
            weights=noise[3].exp().clamp(0.1, 2.0),
            mask=mask,
        )


def on_two_ranks(function: Callable[[int, Ranks], Any]) -> list[Any]:
    """`function(rank, ranks)` on both ranks at once, with collectives between them."""
    barrier, slots, results, errors = threading.Barrier(2, timeout=30), [None, None], [None, None], []

    def run(rank: int) -> None:
        def both(values: Tensor) -> list[Tensor]:
            slots[rank] = values.clone()
            barrier.wait()
            shared = list(slots)
            barrier.wait()
            return shared

        try:
            results[rank] = function(rank, Ranks(sum=lambda v: sum(both(v)), gather=lambda v: torch.cat(both(v))))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
