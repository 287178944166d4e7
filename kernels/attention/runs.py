"""From the key intervals of queries to runs of tiles: what a block-sparse kernel visits.

Terms: ``intervals`` is int32 [B, Q, n, 2]: query i sees the keys of its n half-open intervals, that
are disjoint and lie in [0, keys]; start == end sees none. A tile is ``block_q`` queries by
``block_k`` keys, the last of either shorter; it is *kept* if some query of it sees some key of it,
and *full* if every query sees ``block_k`` keys: the kernel then needs no mask.

All is plain tensor code in O(Q) without a host read. Per query block one run for each interval, its
full tiles in one piece, is exact as long as the rows' j-th intervals overlap from one to the next,
as those that contain their own query do. Where they do not, the tiles of the hole are in the run as
kept ones, which is slower and as right: a kernel masks them.
"""

import torch
from torch import Tensor

FIRST, FIRST_FULL, END_FULL, END = range(4)


def visible(
    intervals: Tensor | None, queries: int, keys: int, causal: bool, device: torch.device
) -> Tensor:
    """Intervals [B|1, Q, n, 2] that say all: every key without ``intervals``, cut to 0…i if causal.

    Query i of a causal call sees no key above i, so there is nothing left of ``causal`` to apply.
    """
    if intervals is None:
        whole = torch.tensor([0, keys], dtype=torch.int32, device=device)
        intervals = whole.expand(1, queries, 1, 2)
    if not causal:
        return intervals.contiguous()
    limit = torch.arange(1, queries + 1, dtype=torch.int32, device=device)
    return intervals.minimum(limit[:, None, None])


def query_runs(intervals: Tensor, block_q: int, block_k: int) -> Tensor:
    """The tiles of every query block: int32 [B, ceil(Q / block_q), n, 4], in key blocks.

    A run is (first, first_full, end_full, end): tiles in [first_full, end_full) are full, the rest
    of [first, end) kept. Runs of one query block are ascending and share no tile.
    """
    lacking = -intervals.shape[1] % block_q
    if lacking:  # the last row again changes no extreme
        again = intervals[:, -1:].expand(-1, lacking, -1, -1)
        intervals = torch.cat([intervals, again], dim=1)
    blocks = intervals.reshape(intervals.shape[0], -1, block_q, *intervals.shape[2:])
    rows = blocks.movedim(2, -1).clone(memory_format=torch.contiguous_format)  # reduced faster
    starts, ends = rows.unbind(-2)
    latest, earliest = starts.amax(-1), ends.amin(-1)
    blind = starts >= ends
    end = _up(ends.masked_fill_(blind, 0).amax(-1), block_k)
    highest = torch.iinfo(torch.int32).max - block_k
    first = (starts.masked_fill_(blind, highest).amin(-1) // block_k).minimum(end)
    first_full = _up(latest, block_k).maximum(first).minimum(end)
    end_full = (earliest // block_k).maximum(first_full).minimum(end)
    runs = torch.stack([first, first_full, end_full, end], -1)
    return runs if runs.shape[2] == 1 else _apart(runs)


def _up(x: Tensor, block: int) -> Tensor:
    return (x + (block - 1)) // block


def _apart(runs: Tensor) -> Tensor:
    """Two runs in ascending order; tiles of both belong to the first."""
    lower, upper = runs.unbind(2)
    swap = (upper[..., :1] < lower[..., :1]) & (upper[..., :1] < upper[..., END:])
    lower, upper = torch.where(swap, upper, lower), torch.where(swap, lower, upper)
    return torch.stack([lower, upper.maximum(lower[..., END:])], 2)


def key_bounds(runs: Tensor, key_blocks: int) -> Tensor:
    """Where the query blocks that visit a key block lie: int32 [B, key_blocks, 2], first and end.

    No query block outside visits it. One inside may still not: whether it does stands in its runs.
    """
    blocks = torch.arange(key_blocks, dtype=torch.int32, device=runs.device)
    blocks = blocks.expand(runs.shape[0], -1).contiguous()
    first, end = runs[..., FIRST], runs[..., END]
    first = first.masked_fill(first >= end, key_blocks).amin(2)
    reached = end.amax(2).cummax(1).values  # by this block or one before it
    needed = first.flip(1).cummin(1).values.flip(1)  # by this block or one after it
    bounds = [
        torch.searchsorted(ordered.contiguous(), blocks, right=True, out_int32=True)
        for ordered in (reached, needed)
    ]
    return torch.stack([bounds[0].minimum(bounds[1]), bounds[1]], -1)
