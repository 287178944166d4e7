"""Arithmetic on sets of indices, kept as intervals in an order: what ranks hold and send.

*Indices* are an ordered list of intervals along one dim, each index at most once; position i means
the i-th index of the list. A *region* has such a list for every dim and stands for their product.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.split import Interval

Indices = tuple[Interval, ...]
Region = tuple[Indices, ...]


def interval(start: int, stop: int) -> Indices:
    """The indices from start up to stop, stop excluded."""
    return ((start, stop),) if start < stop else ()


def length(indices: Indices) -> int:
    """How many indices there are."""
    return sum(stop - start for start, stop in indices)


def shape(region: Region) -> tuple[int, ...]:
    """Length along every dim."""
    return tuple(map(length, region))


def size(region: Region) -> int:
    """How many elements there are."""
    return prod(shape(region))


def merged(intervals: Iterable[Interval]) -> Indices:
    """The same indices in the same order in as few intervals as possible."""
    made: list[Interval] = []
    for start, stop in intervals:
        if made and made[-1][1] == start:
            made[-1] = (made[-1][0], stop)
        elif start < stop:
            made.append((start, stop))
    return tuple(made)


def take(indices: Indices, positions: Indices) -> Indices:
    """The indices at these positions, in the order of the positions."""
    starts = _starts(indices)
    if any(start < 0 or stop > starts[-1] for start, stop in positions):
        expected = f"positions within {starts[-1]}"
        raise PlanError(explain("region", expected=expected, got=text((positions,))))
    return merged(_taken(indices, starts, positions))


def _taken(indices: Indices, starts: Sequence[int], positions: Indices) -> Iterator[Interval]:
    for start, stop in positions:
        at = bisect_right(starts, start) - 1
        while start < stop:
            first, end = indices[at][0] + start - starts[at], min(stop, starts[at + 1])
            yield first, first + end - start
            start, at = end, at + 1


def locate(indices: Indices, wanted: Indices) -> Indices:
    """Where these indices stand: the inverse of ``take``, for indices that are all there."""
    order = sorted(range(len(indices)), key=indices.__getitem__)
    back = _starts(tuple(indices[at] for at in order))
    forth = _starts(indices)
    firsts = [indices[at][0] for at in order]
    positions = tuple((forth[at], forth[at + 1]) for at in order)  # in the order of the indices
    ranks = []
    for start, stop in wanted:
        at = max(bisect_right(firsts, start) - 1, 0)
        first = back[at] + start - firsts[at]
        ranks.append((first, first + stop - start))
    return take(positions, tuple(ranks))


def _starts(indices: Indices) -> list[int]:
    """The position of the first index of every interval; at the end, the number of indices."""
    starts = [0]
    for start, stop in indices:
        starts.append(starts[-1] + stop - start)
    return starts


def cells(regions: Sequence[Region], needed: int) -> Iterator[tuple[int, Region]]:
    """The coarsest cells of which all regions are unions: bits of the regions a cell lies in, cell.

    Bit i stands for the i-th region. Only cells in at least one region of the set ``needed``.
    """
    made: list[tuple[int, Region]] = [((1 << len(regions)) - 1, ())]
    for dim in range(len(regions[0]) if regions else 0):
        parts = _parts([region[dim] for region in regions])
        made = [
            (bits & more, (*cell, part))
            for bits, cell in made
            for more, part in parts
            if bits & more & needed
        ]
    return (item for item in made if item[0] & needed)


def _parts(sets: Sequence[Indices]) -> list[tuple[int, Indices]]:
    """Their union by which of the sets an index lies in: bits of these, ascending indices."""
    events = sorted(
        (edge, 1 << bit) for bit, indices in enumerate(sets) for ends in indices for edge in ends
    )
    found: dict[int, list[Interval]] = {}
    inside = last = 0
    for edge, bit in events:
        if inside and edge > last:
            found.setdefault(inside, []).append((last, edge))
        inside, last = inside ^ bit, edge
    return [(bits, merged(intervals)) for bits, intervals in found.items()]


def text(region: Region) -> str:
    """Like ``[0:4,8:12][0:64]``: intervals by dim."""
    return "".join(f"[{','.join(f'{a}:{b}' for a, b in dim)}]" for dim in region)
