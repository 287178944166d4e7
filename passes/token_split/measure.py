"""What a token split costs, counted exactly: attention tiles and keys received, rank by rank.

``intervals`` are the keys that each query sees: [S, n, 2] int, n per query, half-open, empty where
``start >= end``. A rank computes its queries in the order in which it holds them, in blocks of
``TILE``, against blocks of ``TILE`` keys in the sequence's order; a block of queries touches every
block of keys that one of its queries sees.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from mllm_compile.compiler.split import Interval, Split

Ints = NDArray[np.int64]
TILE = 128


def tiles(intervals: NDArray[np.int32], split: Split | None = None) -> Ints:
    """Tiles that each rank computes [ranks]; without a split, of each block of queries [blocks]."""
    blocks = np.arange(len(intervals)) // TILE
    if split is None:
        return _tiles(intervals, blocks, -(-len(intervals) // TILE))
    orders = [_positions(part) for part in split.parts]
    held = np.concatenate(orders)
    before = np.concatenate([[0], np.cumsum([-(-len(order) // TILE) for order in orders])])
    numbers = [before[rank] + np.arange(len(order)) // TILE for rank, order in enumerate(orders)]
    counts = _tiles(intervals[held], np.concatenate(numbers), int(before[-1]))
    totals: Ints = np.diff(np.concatenate([[0], np.cumsum(counts)])[before])
    return totals


def received(intervals: NDArray[np.int32], split: Split) -> Ints:
    """Keys that each rank needs and does not hold [ranks]."""
    owner: list[int] = []
    own: list[Interval] = []
    for rank, part in enumerate(split.parts):
        owner += [rank] * len(part)
        own += part
    mine = np.array(own, np.int64).reshape(-1, 2)
    ranks = np.repeat(owner, mine[:, 1] - mine[:, 0]).astype(np.int64)
    held = np.concatenate([_positions(part) for part in split.parts])
    needed = intervals[held].astype(np.int64)
    groups = np.repeat(ranks, intervals.shape[1])
    seen = covered(
        np.concatenate([groups, np.array(owner, np.int64)]),
        np.concatenate([needed[..., 0].ravel(), mine[:, 0]]),
        np.concatenate([needed[..., 1].ravel(), mine[:, 1]]),
        split.ranks,
    )
    foreign: Ints = seen - np.array(split.sizes)
    return foreign


def covered(
    groups: Ints, starts: NDArray[np.integer], ends: NDArray[np.integer], count: int
) -> Ints:
    """The length of the union of the half-open intervals of each of ``count`` groups."""
    known = starts < ends
    known[1:] &= (np.diff(groups) != 0) | (np.diff(starts) != 0) | (np.diff(ends) != 0)
    groups, starts, ends = groups[known], starts[known], ends[known]
    if not len(groups):
        return np.zeros(count, np.int64)
    span = int(ends.max()) + 1
    order = np.argsort(groups * span + starts, kind="stable")
    first = (groups * span + starts)[order]
    last = np.maximum.accumulate((groups * span + ends)[order])
    reached = np.concatenate([[0], last[:-1]])
    added = np.maximum(last - np.maximum(first, reached), 0)
    return np.bincount(groups[order], added, count).astype(np.int64)


def _tiles(rows: NDArray[np.int32], blocks: Ints, count: int) -> Ints:
    wide = rows.astype(np.int64)
    starts = wide[..., 0] // TILE
    ends = np.where(wide[..., 0] < wide[..., 1], -(-wide[..., 1] // TILE), starts)
    return covered(np.repeat(blocks, rows.shape[1]), starts.ravel(), ends.ravel(), count)


def _positions(part: Iterable[Interval]) -> Ints:
    pieces = [np.arange(start, stop) for start, stop in part]
    return np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
