"""Which rectangles of (queries, keys) intervals make an attention on CPU compute.

Queries are taken in blocks of consecutive ones. Of the keys that a block's queries see, those that
all of them see are one rectangle, *full*, computed without a mask, and what lies on its sides are
others; where little is full, all is one rectangle with a mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 128
LEAST_FULL = 256
"""Keys for which a rectangle of its own is cheaper than masking them."""


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Keys first…end-1 of one query block; ``full`` where every query sees every one of them."""

    first: int
    end: int
    full: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Queries first…end-1, and the keys that they see: disjoint rectangles, none if no key."""

    first: int
    end: int
    rectangles: tuple[Rectangle, ...]


def row_blocks(intervals: Tensor) -> Iterator[Rows]:
    """The blocks of intervals [Q, n, 2], which are read on the host."""
    queries = intervals.shape[0]
    again = intervals[-1:].expand(-queries % ROWS, -1, -1)  # changes no extreme
    intervals = torch.cat([intervals, again])
    starts, ends = intervals.view(-1, ROWS, *intervals.shape[1:]).unbind(-1)
    blind = starts >= ends
    limits = (
        starts.masked_fill(blind, 2**31 - 1).amin(1),
        starts.amax(1),
        ends.amin(1),
        ends.masked_fill(blind, 0).amax(1),
    )
    for at, block in enumerate(zip(*(limit.tolist() for limit in limits), strict=True)):
        hulls = [hull for hull in zip(*block, strict=True) if hull[0] < hull[3]]
        yield Rows(at * ROWS, min((at + 1) * ROWS, queries), tuple(_apart(hulls)))


def _apart(hulls: list[tuple[int, ...]]) -> Iterator[Rectangle]:
    """Of (lowest start, highest start, lowest end, highest end), one for each of the intervals.

    Rows that see nothing count for the inner two: start = end leaves nothing full.
    """
    hulls.sort()
    if len(hulls) == 2 and hulls[1][0] < hulls[0][3]:  # keys of both: one rectangle, masked
        yield Rectangle(hulls[0][0], max(hulls[0][3], hulls[1][3]), False)
        return
    for first, first_full, end_full, end in hulls:
        width = end_full - first_full
        if width < LEAST_FULL and width < end - first:
            yield Rectangle(first, end, False)
            continue
        if first < first_full:
            yield Rectangle(first, first_full, False)
        yield Rectangle(first_full, end_full, True)
        if end_full < end:
            yield Rectangle(end_full, end, False)
