"""Unions of the pieces that a query sees."""

from collections.abc import Sequence
from functools import partial, reduce
from itertools import combinations

import torch
from torch import Tensor

from mllm_compile.kernels.attention.per_query import PerQuery, Value, apply

Piece = tuple[Value, Value]
Edges = tuple[Tensor, Tensor]


def fit(pieces: Sequence[Piece], count: int, keys: int) -> Value:
    """Whether the union of more than ``count`` pieces is no more than ``count`` runs of keys."""
    if len(pieces) > count + 1:
        flat = [edge for piece in pieces for edge in _emptied(piece, keys)]
        return apply(lambda *edges: _components(edges) <= count, *flat)
    # One too many: some piece has no keys, or two of them touch.
    if count == 1:
        return _touch(*sorted(pieces, key=lambda piece: isinstance(piece[1], PerQuery)), keys=keys)
    holds = [apply(torch.ge, *piece) for piece in pieces]
    for (start, end), (other, stop) in combinations(pieces, 2):
        first, last = apply(torch.maximum, start, other), apply(torch.minimum, end, stop)
        holds.append(apply(torch.le, first, last))
    return reduce(partial(apply, torch.logical_or), holds)


def _touch(piece: Piece, other: Piece, *, keys: int) -> Value:
    """Whether two pieces are one run of keys, or one of them is empty.

    That is where the second ends behind ``needed``, on which less work is left for every query.
    """
    highest = apply(torch.maximum, piece[0], other[0])
    needed = apply(
        lambda start, end, highest: torch.where(
            start >= end, 0, torch.where(highest <= end, highest, keys + 1)
        ),
        *piece,
        highest,
    )
    return apply(lambda needed, start, end: (needed <= end) | (start >= end), needed, *other)


def joined(pieces: Sequence[Piece], count: int, keys: int) -> list[Value]:
    """``count`` starts and ends by turns: the union of pieces, where it has no more components."""
    if len(pieces) == 1:
        start, end = pieces[0]
        end = apply(torch.maximum, start, end)
        return [start, end] + [end, end] * (count - 1)
    if len(pieces) == count == 2:
        whole = apply(_both, *pieces[0], *pieces[1])
        return [apply(partial(torch.select, dim=0, index=at), whole) for at in range(4)]
    starts, ends = zip(*(_emptied(piece, keys) for piece in pieces), strict=True)
    if count == 1:
        start = reduce(partial(apply, torch.minimum), starts)
        end = reduce(partial(apply, torch.maximum), ends)
        return [apply(torch.minimum, start, end), end]
    flat = [edge for piece in zip(starts, ends, strict=True) for edge in piece]
    whole = apply(lambda *edges: _two(edges, keys), *flat)
    return [apply(partial(torch.select, dim=0, index=at), whole) for at in range(4)]


def _emptied(piece: Piece, keys: int) -> Piece:
    """Pieces without keys become [keys, 0), which changes no extreme."""
    seen = apply(torch.lt, *piece)
    return (
        apply(lambda at, seen: torch.where(seen, at, keys), piece[0], seen),
        apply(lambda at, seen: torch.where(seen, at, 0), piece[1], seen),
    )


def _ascending(edges: Sequence[Tensor]) -> list[Edges]:
    """Starts and ends by turns, as pieces in the order of their starts.

    Neighbours that stand wrong are exchanged, as often as it may take.
    """
    found = list(zip(edges[::2], edges[1::2], strict=True))
    for last in range(len(found) - 1, 0, -1):
        for at in range(last):
            (start, end), (other, stop) = found[at], found[at + 1]
            swap = other < start
            found[at] = torch.where(swap, other, start), torch.where(swap, stop, end)
            found[at + 1] = torch.where(swap, start, other), torch.where(swap, end, stop)
    return found


def _components(edges: Sequence[Tensor]) -> Tensor:
    """How many separate runs of keys a query sees in the union of several pieces."""
    (_, reached), *rest = _ascending(edges)
    count = torch.ones_like(reached)
    for start, end in rest:
        count = count + ((start > reached) & (start < end))
        reached = torch.maximum(reached, end)
    return count


def _both(start: Tensor, end: Tensor, other: Tensor, stop: Tensor) -> Tensor:
    """Two pieces, the lower first, or one and an empty one: starts and ends, stacked."""
    end, stop = torch.maximum(start, end), torch.maximum(other, stop)
    first, last = torch.minimum(start, other), torch.maximum(end, stop)
    ends, begins = torch.minimum(end, stop), torch.maximum(start, other)
    ends = torch.where(begins <= ends, last, ends)
    begins = torch.maximum(begins, ends)
    blind = ends <= first
    first, ends = torch.where(blind, begins, first), torch.where(blind, last, ends)
    return _stacked(first, ends, torch.maximum(begins, ends), last)


def _two(edges: Sequence[Tensor], keys: int) -> Tensor:
    """What follows on the first piece without a gap, and the rest: starts and ends, stacked."""
    (start, end), *others = _ascending(edges)
    rest: Edges = (torch.full_like(start, keys), torch.zeros_like(end))
    for other, stop in others:
        reached = other <= end
        rest = (
            torch.minimum(rest[0], torch.where(reached, keys, other)),
            torch.maximum(rest[1], torch.where(reached, 0, stop)),
        )
        end = torch.where(reached, torch.maximum(end, stop), end)
    behind = torch.maximum(rest[1], end)
    return _stacked(torch.minimum(start, end), end, torch.minimum(rest[0], behind), behind)


def _stacked(*edges: Tensor) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*edges))  # type: ignore[no-untyped-call]
