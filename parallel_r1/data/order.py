"""The order in which problems are visited: pure functions of (seed, position), so that nothing has to be saved.

Position p counts the problems a run has drawn so far, over all ranks. Resuming, and running on another number of ranks,
is asking for the same positions again.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from parallel_r1.types import Problem

T = TypeVar("T")


@lru_cache(maxsize=16)
def epoch_order(n: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """A permutation of range(n) for one pass over the data."""
    return tuple(shuffled(range(n), f"{seed}/{epoch}"))


def shuffled(items: Sequence[T], seed: str) -> list[T]:
    """The items in a seeded order. By sorted keys: Python promises `random()`, not `shuffle`, to stay the same."""
    rng = random.Random(seed)
    keys = [rng.random() for _ in items]
    return [items[i] for i in sorted(range(len(items)), key=keys.__getitem__)]


def index_at(position: int, n: int, seed: int | str) -> int:
    """The index in range(n) that an endless, reshuffled walk visits at `position`: each epoch shows everything once."""
    epoch, step = divmod(position, n)
    return epoch_order(n, seed, epoch)[step]


def share(items: Sequence[T], rank: int, world_size: int) -> list[T]:
    """What one rank works on: item j of rank r is item j * world_size + r of all. Shares differ by one item at most.

    Strided, so that a rank knows the global index of its items without knowing how many the others have.
    """
    return list(items[rank::world_size])


def hold_out(problems: Sequence[Problem], size: int, seed: int) -> list[Problem]:
    """`size` problems chosen by a hash of (seed, id), which the order of the file does not change."""

    def key(problem: Problem) -> bytes:
        return hashlib.blake2b(f"hold-out/{seed}/{problem.id}".encode(), digest_size=8).digest()

    return sorted(problems, key=key)[:size]


def mixed_counts(position: int, weights: Sequence[float]) -> list[int]:
    """How many of the first `position` draws each part of a mixture has given; weights are positive and sum to 1.

    The m-th draw of part k (m from 0) happens at the time (m + 1/2) / weight_k, and draws are ordered by time. So
    counts never fall as position grows, and stay within `parts` draws of position * weight.
    """
    parts = range(len(weights))
    # A lower bound that is close to the answer keeps this O(parts^2) at any position.
    counts = [max(0, math.floor(weights[k] * (position - len(weights))) - 1) for k in parts]
    for _ in range(position - sum(counts)):
        k = min(parts, key=lambda k: ((counts[k] + 0.5) / weights[k], k))
        counts[k] += 1
    return counts
