"""Which keys a rank of a divided sequence fetches, and its intervals in terms of what it then has.

Keys stay in ascending order of their places in the sequence, so an interval of keys remains one
among those at hand: no kernel needs to know that keys are missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_compile.compiler.split import Split


@dataclass(frozen=True)
class KeyExchange:
    """One rank's part in the exchange for one mask.

    ``sends``: for every rank the places, among the own keys, of those that it needs; none for
    itself. ``counts``: how many keys come from every rank. ``own_order`` and ``fetched_order`` sort
    the own keys, and all that came, one rank behind the other, by their places in the sequence;
    None where they stand so. ``own`` and ``fetched``: int32 [1, queries, n, 2], what the own
    queries see of either.
    """

    sends: tuple[Tensor, ...]
    counts: tuple[int, ...]
    own_order: Tensor | None
    fetched_order: Tensor | None
    own: Tensor
    fetched: Tensor

    def on(self, device: torch.device) -> "KeyExchange":
        """The same with its tensors on a device."""

        def moved(order: Tensor | None) -> Tensor | None:
            return None if order is None else order.to(device, non_blocking=True)

        return KeyExchange(
            tuple(each.to(device, non_blocking=True) for each in self.sends),
            self.counts,
            moved(self.own_order),
            moved(self.fetched_order),
            self.own.to(device, non_blocking=True),
            self.fetched.to(device, non_blocking=True),
        )


def key_exchange(intervals: Tensor, queries: Split, keys: Split, place: int) -> KeyExchange:
    """The exchange of the rank at ``place``.

    Args:
        intervals: int32 [S, n, 2] of all queries, as ``mllm::attention`` takes them.
        queries: how the S queries are divided.
        keys: how the keys are divided, among as many ranks.
        place: of the rank along the axis.

    """
    ranks = range(keys.ranks)
    held = [_positions(keys, rank) for rank in ranks]
    mine, own = held[place], intervals[_positions(queries, place)]
    sends = [
        _among(mine, intervals[_positions(queries, rank)], keys.length)
        if rank != place
        else mine[:0]
        for rank in ranks
    ]
    arriving = [
        theirs[_among(theirs, own, keys.length)] if rank != place else theirs[:0]
        for rank, theirs in enumerate(held)
    ]
    fetched = torch.cat(arriving)
    return KeyExchange(
        tuple(sends),
        tuple(map(len, arriving)),
        _order(mine),
        _order(fetched),
        _translated(own, mine.sort().values),
        _translated(own, fetched.sort().values),
    )


def _positions(split: Split, rank: int) -> Tensor:
    ranges = [torch.arange(start, stop) for start, stop in split.parts[rank]]
    return torch.cat([torch.arange(0), *ranges])


def _order(positions: Tensor) -> Tensor | None:
    """What sorts them; None where they are in order."""
    if bool((positions[1:] > positions[:-1]).all()):
        return None
    return torch.argsort(positions)


def _among(positions: Tensor, bounds: Tensor, length: int) -> Tensor:
    """The places among ``positions`` of keys that any of the rows sees."""
    starts, ends = (
        torch.bincount(bounds[..., side].flatten(), minlength=length + 1) for side in (0, 1)
    )
    seen = (starts - ends).cumsum(0) > 0
    return seen[positions].nonzero().squeeze(1)


def _translated(bounds: Tensor, positions: Tensor) -> Tensor:
    """Intervals of places in the sequence as intervals of ascending ``positions``."""
    return torch.searchsorted(positions, bounds.contiguous(), out_int32=True)[None]


def shared(exchanges: Sequence[KeyExchange], batch: int) -> list[tuple[slice, KeyExchange]]:
    """The samples of a batch that take part in each exchange: all of them, or one each."""
    if len(exchanges) == 1:
        return [(slice(0, batch), exchanges[0])]
    return [(slice(i, i + 1), each) for i, each in enumerate(exchanges)]
