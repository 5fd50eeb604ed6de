"""Sums over the ranks for statistics that a whole batch or a whole update is needed for.

The algorithms import no communication library: the caller hands them these two functions, and each rank calls them
equally often.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def _alone(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class Ranks:
    """The two collectives; the defaults are those of a single process.

    sum: adds a small tensor over the ranks and returns the total to each.
    gather: concatenates a tensor of the same shape on every rank along its first dimension.
    """

    sum: Callable[[Tensor], Tensor] = _alone
    gather: Callable[[Tensor], Tensor] = _alone


ALONE = Ranks()
