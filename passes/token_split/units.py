"""A sequence cut into units of equal length, and what attention asks of each of them.

A rank of n is given N/n of the N units, so that ranks hold equally many tokens whatever the planner
decides. Units are whole tiles where they can be. The rest of the sequence, less than that on every
rank, is taken from its beginning, where queries see least, and divided in order. A rank holds its
piece behind its units, so that they remain whole tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Interval, Split
from mllm_compile.passes.token_split.measure import TILE, Ints, covered

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """``count`` units of ``size`` tokens, and for each of ``ranks`` a piece of the rest, if any."""

    length: int
    size: int
    count: int
    ranks: int

    @property
    def start(self) -> int:
        """Where the units begin: on a border of tiles."""
        grain = min(self.size, TILE)
        return (self.length - self.size * self.count) // grain * grain

    @property
    def bounds(self) -> Ints:
        """Of units and pieces [N + ranks + 1], of the tokens in the order of ``rows``."""
        head, rank = self.size * self.count, np.arange(self.ranks + 1)
        piece = self.length // self.ranks - head // self.ranks
        rest = head + rank * piece + np.minimum(rank, self.length % self.ranks)
        return np.concatenate([np.arange(self.count) * self.size, rest])

    def rows(self, mask: NDArray[np.int32]) -> NDArray[np.int32]:
        """What is seen from the units' tokens, then from the rest."""
        end = self.start + self.size * self.count
        return np.concatenate([mask[self.start : end], mask[: self.start], mask[end:]])

    def split(self, owner: Ints) -> Split:
        """The split in which ``owner`` [N] has the units."""
        parts: list[list[Interval]] = [[] for _ in range(self.ranks)]
        bounds, head = self.bounds.tolist(), self.size * self.count
        for at, rank in enumerate([*owner.tolist(), *range(self.ranks)]):
            first, last = bounds[at : at + 2]
            middle = min(max(first, head + self.start), last) if at >= self.count else last
            for low, high in ((first, middle), (middle, last)):
                moved = self.start if high <= head else -head if high <= head + self.start else 0
                _append(parts[rank], low + moved, high + moved)
        return Split(tuple(map(tuple, parts)))


def _append(part: list[Interval], start: int, stop: int) -> None:
    if part and part[-1][1] == start:
        part[-1] = (part[-1][0], stop)
    elif stop > start:
        part.append((start, stop))


@dataclass(frozen=True)
class Units:
    """``first``, ``last`` [masks, n, N + ranks]: half-open ranges of units whose keys are needed.

    ``work`` [masks, N + ranks]: tiles, as multiples of a rank's mean, so that 1 is fair. Behind the
    N units stand the pieces of the rest. Keys of the rest count as no unit's.
    """

    first: Ints
    last: Ints
    work: Floats
    ranks: int

    @property
    def count(self) -> int:
        """N."""
        return int(self.work.shape[1]) - self.ranks


def units_of(masks: Sequence[NDArray[np.int32]], cut: Cut) -> Units:
    """The units of a sequence under ``masks``, intervals of keys [S, n, 2] each."""
    slots = max(mask.shape[1] for mask in masks)
    first, last, work = [], [], []
    for mask in masks:
        rows = cut.rows(mask)
        ranges = _ranges(rows, cut)
        empty = np.zeros((slots - len(ranges[0]), ranges[0].shape[1]), np.int64)
        first.append(np.concatenate([ranges[0], empty]))
        last.append(np.concatenate([ranges[1], empty]))
        tiles = work_of(rows, cut)
        work.append(tiles * (cut.ranks / max(tiles.sum(), 1)))
    return Units(np.stack(first), np.stack(last), np.stack(work), cut.ranks)


def _ranges(rows: NDArray[np.int32], cut: Cut) -> tuple[Ints, Ints]:
    """First and end [n, N + ranks] of the units that rows of each see, slots disjoint."""
    head, bounds = cut.size * cut.count, cut.bounds[:-1]
    starts, ends = np.clip(rows.T - np.int32(cut.start), 0, head)
    seen = starts < ends
    none = ((0, 0), (0, 1))  # a row behind the last: pieces of the rest may be empty
    starts = np.pad(np.where(seen, starts, head), none, constant_values=head)
    ends = np.pad(np.where(seen, ends, 0), none)
    starts = np.minimum.reduceat(starts, bounds, axis=1)
    ends = np.maximum.reduceat(ends, bounds, axis=1)
    first = (starts // cut.size).astype(np.int64)
    last = np.where(starts < ends, -(-ends // cut.size), first)
    for slot in range(1, len(first)):
        # Rows of one unit may see its neighbours in different slots: one range then covers both.
        meet = (first[slot] <= last[slot - 1]) & (first[slot] < last[slot])
        first[slot] = np.where(meet, np.minimum(first[slot - 1], first[slot]), first[slot])
        last[slot] = np.where(meet, np.maximum(last[slot - 1], last[slot]), last[slot])
        last[slot - 1] = np.where(meet, first[slot - 1], last[slot - 1])
    return first, last


def work_of(rows: NDArray[np.int32], cut: Cut) -> Ints:
    """Tiles of every unit and of every piece of the rest."""
    bounds, tile = cut.bounds, min(TILE, cut.size)
    sizes = np.diff(bounds)
    before = np.concatenate([[0], np.cumsum(-(-sizes // tile))])
    inside = np.arange(len(rows)) - np.repeat(bounds[:-1], sizes)
    groups = np.repeat(before[:-1], sizes) + inside // tile
    starts = rows[..., 0] // np.int32(tile)
    ends = np.where(rows[..., 0] < rows[..., 1], -(-rows[..., 1] // np.int32(tile)), starts)
    tiles = covered(np.repeat(groups, rows.shape[1]), starts.ravel(), ends.ravel(), int(before[-1]))
    work: Ints = np.diff(np.concatenate([[0], np.cumsum(tiles)])[before])
    return work
