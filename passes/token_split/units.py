"""A sequence cut into units of nearly equal length, and what attention asks of each of them.

A rank of n is given N/n of the N units, so that ranks hold equally many tokens whatever the planner
decides. Unit i starts at token ``i * S // N``; lengths differ by one at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Interval, Split
from mllm_compile.passes.token_split.measure import TILE, Ints, covered

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Units:
    """``first``, ``last`` [masks, n, N]: the half-open ranges of units whose keys a unit needs.

    ``work`` [masks, N]: tiles of a unit, as multiples of a rank's mean, so that 1 is fair.
    """

    first: Ints
    last: Ints
    work: Floats

    @property
    def count(self) -> int:
        """N."""
        return int(self.work.shape[1])


def cut(masks: Sequence[NDArray[np.int32]], count: int, ranks: int) -> Units:
    """The units of a sequence under ``masks``, intervals of keys [S, n, 2] each."""
    slots = max(mask.shape[1] for mask in masks)
    first, last, work = [], [], []
    for mask in masks:
        ranges = _ranges(mask, count)
        empty = np.zeros((slots - len(ranges[0]), count), np.int64)
        first.append(np.concatenate([ranges[0], empty]))
        last.append(np.concatenate([ranges[1], empty]))
        tiles = _work(mask, count)
        work.append(tiles * (ranks / max(tiles.sum(), 1)))
    return Units(np.stack(first), np.stack(last), np.stack(work))


def _ranges(mask: NDArray[np.int32], count: int) -> tuple[Ints, Ints]:
    """First and end [n, count] of the units that the rows of every unit see, slots disjoint."""
    length = len(mask)
    bounds = np.arange(count) * length // count
    starts, ends = mask[..., 0].T.astype(np.int64), mask[..., 1].T.astype(np.int64)
    seen = starts < ends
    starts = np.minimum.reduceat(np.where(seen, starts, length), bounds, axis=1)
    ends = np.maximum.reduceat(np.where(seen, ends, 0), bounds, axis=1)
    first = ((starts + 1) * count - 1) // length
    last = np.where(starts < ends, (ends * count - 1) // length + 1, first)
    for slot in range(1, len(first)):
        # Rows of one unit may see its neighbours in different slots: one range then covers both.
        meet = (first[slot] <= last[slot - 1]) & (first[slot] < last[slot])
        first[slot] = np.where(meet, np.minimum(first[slot - 1], first[slot]), first[slot])
        last[slot] = np.where(meet, np.maximum(last[slot - 1], last[slot]), last[slot])
        last[slot - 1] = np.where(meet, first[slot - 1], last[slot - 1])
    return first, last


def _work(mask: NDArray[np.int32], count: int) -> Floats:
    """Tiles of every unit; the last block of a unit counts by its rows."""
    length = len(mask)
    tile = max(1, min(TILE, length // count))
    bounds = np.arange(count + 1) * length // count
    sizes = np.diff(bounds)
    blocks = -(-sizes // tile)
    before = np.concatenate([[0], np.cumsum(blocks)])
    inside = np.arange(length) - np.repeat(bounds[:-1], sizes)
    groups = np.repeat(before[:-1], sizes) + inside // tile
    rows = mask.astype(np.int64)
    starts = rows[..., 0] // tile
    ends = np.where(rows[..., 0] < rows[..., 1], -(-rows[..., 1] // tile), starts)
    tiles = covered(np.repeat(groups, mask.shape[1]), starts.ravel(), ends.ravel(), int(before[-1]))
    return np.add.reduceat(tiles * (np.bincount(groups) / tile), before[:-1])


def split_of(owner: Ints, ranks: int, length: int) -> Split:
    """The split in which ``owner`` [N] has the units; counts of tokens differ by one at most.

    Where the length does not divide, every rank has some of its units one token longer, those that
    keep the ends of units close to their places.
    """
    count = len(owner)
    size = length // count
    longer = [
        length // ranks + (rank < length % ranks) - size * (count // ranks) for rank in range(ranks)
    ]
    left = np.bincount(owner, minlength=ranks)
    parts: list[list[Interval]] = [[] for _ in range(ranks)]
    start = 0
    for unit, rank in enumerate(owner.tolist()):
        due = (unit + 1) * length > (start + size) * count
        extra = longer[rank] > 0 and (due or longer[rank] == left[rank])
        stop = start + size + extra
        longer[rank] -= extra
        left[rank] -= 1
        part = parts[rank]
        if part and part[-1][1] == start:
            part[-1] = (part[-1][0], stop)
        elif stop > start:
            part.append((start, stop))
        start = stop
    return Split(tuple(map(tuple, parts)))
