"""The local arithmetic of a divided dim: cut parts out of a whole tensor and join them again.

A dim of a whole tensor is seen as [outer, size, unit]; every rank holds some intervals of the
``size`` elements, one behind the other, so its own dim is [outer, held, unit].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.split import Split


@dataclass(frozen=True)
class Division:
    """A layout ``S`` with its split; ``unit`` is stated because an empty part does not show it."""

    layout: Layout
    split: Split
    unit: int

    @property
    def dim(self) -> int:
        """The divided dim."""
        return self.layout.dim

    def length(self, place: int | None = None) -> int:
        """Elements of the dim on the rank at ``place``, or in the whole tensor."""
        held = self.split.length if place is None else self.split.sizes[place]
        return self.layout.outer * held * self.unit

    def shape(self, like: Sequence[int], place: int | None = None) -> list[int]:
        """``like`` with the dim as it is at ``place``, or in the whole tensor."""
        return [*like[: self.dim], self.length(place), *like[self.dim + 1 :]]

    def cut(self, whole: Tensor, place: int) -> Tensor:
        """The part of the rank at ``place``: a new contiguous tensor."""
        part = whole.new_empty(self.shape(whole.shape, place))
        for own, there in self._pieces(part, whole, place):
            own.copy_(there)
        return part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks: new and contiguous."""
        whole = parts[0].new_empty(self.shape(parts[0].shape))
        for place, part in enumerate(parts):
            self._put(part, whole, place)
        return whole

    def pad(self, part: Tensor, place: int) -> Tensor:
        """The whole tensor that is zero where the rank at ``place`` holds nothing."""
        whole = part.new_zeros(self.shape(part.shape))
        self._put(part, whole, place)
        return whole

    def _put(self, part: Tensor, whole: Tensor, place: int) -> None:
        for own, there in self._pieces(part, whole, place):
            there.copy_(own)

    def _pieces(self, part: Tensor, whole: Tensor, place: int) -> list[tuple[Tensor, Tensor]]:
        """Views of the part and of the whole, interval by interval."""
        mine = self._middle(part, self.split.sizes[place])
        all_of_it = self._middle(whole, self.split.length)
        pieces, start = [], 0
        for first, last in self.split.parts[place]:
            length = last - first
            own = mine.narrow(self.dim + 1, start, length)
            pieces.append((own, all_of_it.narrow(self.dim + 1, first, length)))
            start += length
        return pieces

    def _middle(self, x: Tensor, held: int) -> Tensor:
        """``x`` with the dim as [outer, held, unit]."""
        middle = [self.layout.outer, held, self.unit]
        return x.reshape([*x.shape[: self.dim], *middle, *x.shape[self.dim + 1 :]])

    def positions(self, place: int) -> list[int]:
        """Places in the whole dim of the elements at ``place``, in the order it holds them."""
        layout, unit = self.layout, self.unit
        return [
            (block * layout.size + element) * unit + offset
            for block in range(layout.outer)
            for first, last in self.split.parts[place]
            for element in range(first, last)
            for offset in range(unit)
        ]


@lru_cache(maxsize=1024)
def exchange(
    have: Division, want: Division, place: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """The all-to-all between two divisions of one dim, for the rank at ``place``.

    Returns for every rank the places within the own part of what it gets; how many elements come
    from every rank; and the order that brings those, one behind the other, into the wanted part.
    """
    ranks = range(have.split.ranks)
    owner = {at: rank for rank in ranks for at in want.positions(rank)}
    own = have.positions(place)
    sends = tuple(tuple(i for i, at in enumerate(own) if owner[at] == rank) for rank in ranks)
    arriving = [[at for at in have.positions(rank) if owner[at] == place] for rank in ranks]
    found = {at: i for i, at in enumerate(at for part in arriving for at in part)}
    order = tuple(found[at] for at in want.positions(place))
    return sends, tuple(map(len, arriving)), order


def pick(x: Tensor, dim: int, places: Sequence[int]) -> Tensor:
    """The elements of ``dim`` at ``places``: a new contiguous tensor."""
    return x.index_select(dim, torch.tensor(places, dtype=torch.int64, device=x.device))
