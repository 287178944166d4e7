"""The keys and values that a rank gets from others, and their gradients on the way back."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mllm_compile.kernels.attention.key_exchange import KeyExchange, shared
from mllm_compile.kernels.collective.members import Member

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


class Fetch:
    """The keys and values of other ranks on their way here, and their gradients on the way back."""

    def __init__(self, k: Tensor, v: Tensor, exchanges: Sequence[KeyExchange], me: Member) -> None:
        self.me, self.size = me, k.shape[-1]
        self.groups = shared(exchanges, k.shape[0])
        self.k, self.v = k, v
        parts = [self._packed(rank) for rank in range(me.size)]
        shapes = [[sum(map(prod, self._arriving(rank)))] for rank in range(me.size)]
        self._wait = me.communicator.start_all_to_all(parts, shapes)

    def _packed(self, rank: int) -> Tensor:
        rows = [
            torch.cat([x[at].index_select(2, each.sends[rank]) for x in (self.k, self.v)], -1)
            for at, each in self.groups
        ]
        return _flat(rows)

    def _shape(self, at: slice, keys: int) -> list[int]:
        batch, heads, _, size = self.k[at].shape
        return [batch, heads, keys, size + self.v.shape[-1]]

    def _arriving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, each.counts[rank]) for at, each in self.groups]

    def _leaving(self, rank: int) -> list[list[int]]:
        return [self._shape(at, len(each.sends[rank])) for at, each in self.groups]

    def fetched(self) -> list[Pair]:
        """By group of samples: the keys and values that came, in the order of the sequence."""
        by_rank = [_cut(part, self._arriving(rank)) for rank, part in enumerate(self._wait())]
        found = []
        for place, (_, each) in enumerate(self.groups):
            both = _sorted(torch.cat([parts[place] for parts in by_rank], 2), each.fetched_order)
            found.append((both[..., : self.size], both[..., self.size :]))
        return found

    def own(self) -> list[Pair]:
        """By group: the keys and values at hand, in the order of the sequence."""
        return [
            (_sorted(self.k[at], each.own_order), _sorted(self.v[at], each.own_order))
            for at, each in self.groups
        ]

    def returned(self, own: Sequence[Pair], fetched: Sequence[Pair]) -> Pair:
        """Gradients of the own keys and values: of those at hand, and what other ranks made.

        Both are given in the accumulation dtype, in which they are summed; they travel in that of
        the keys.
        """
        back: list[list[Tensor]] = [[] for _ in range(self.me.size)]
        for (_, each), grads in zip(self.groups, fetched, strict=True):
            made = _unsorted(torch.cat(grads, -1).to(self.k.dtype), each.fetched_order)
            for rank, part in enumerate(torch.split(made, list(each.counts), 2)):
                back[rank].append(part)
        leaving = [self._leaving(rank) for rank in range(self.me.size)]
        parts = self.me.communicator.all_to_all(
            list(map(_flat, back)), [[sum(map(prod, each))] for each in leaving]
        )
        totals = [
            (_unsorted(grad_k, each.own_order), _unsorted(grad_v, each.own_order))
            for (_, each), (grad_k, grad_v) in zip(self.groups, own, strict=True)
        ]
        for rank, part in enumerate(parts):
            pieces = _cut(part, leaving[rank])
            for pair, (_, each), piece in zip(totals, self.groups, pieces, strict=True):
                sizes = [self.size, piece.shape[-1] - self.size]
                for total, more in zip(pair, torch.split(piece, sizes, -1), strict=True):
                    total.index_add_(2, each.sends[rank], more.to(total.dtype))
        grads_k, grads_v = zip(*totals, strict=True)
        return joined(grads_k), joined(grads_v)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Their elements, one tensor behind the other."""
    return joined([part.reshape(-1) for part in parts])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts of a batch, or of a flat tensor, one behind the other; one part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _cut(part: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes that stand one behind the other in a flat one."""
    flat = torch.split(part, list(map(prod, shapes)))
    return [piece.view(tuple(shape)) for piece, shape in zip(flat, shapes, strict=True)]


def _sorted(x: Tensor, order: Tensor | None) -> Tensor:
    """The keys of ``x`` in the order of the sequence; ``x`` itself where they stand so."""
    return x if order is None else x.index_select(2, order)


def _unsorted(x: Tensor, order: Tensor | None) -> Tensor:
    """What ``_sorted`` made ``x`` of."""
    return x if order is None else torch.empty_like(x).index_copy_(2, order, x)
