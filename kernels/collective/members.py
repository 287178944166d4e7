"""Who takes part in a collective: this rank's place along every mesh axis, and the group there.

A graph names the axis of a collective and nothing else. Place and group come from the context in
which it is traced (places alone, for shapes) or runs (with communicators). The context belongs to
the thread: ranks may be threads of one process.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Shape = Sequence[int]
Reduction = Literal["sum", "max"]


class Communicator(Protocol):
    """The collectives of one group of ranks; every rank of it makes the same calls in one order.

    Lists are in the order of places along the axis. Results never share memory with arguments,
    except that a rank's own part may be handed back as it is. Tensors may have no elements.
    Reductions take the parts in the order of places, so that every rank gets the same bits.
    """

    def all_gather(self, x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
        """The tensors of all ranks; ``shapes`` are theirs."""

    def all_reduce(self, x: Tensor, reduction: Reduction = "sum") -> Tensor:
        """The elementwise sum or maximum over all ranks; shapes are equal."""

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over all ranks of the part that each has for this one."""

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """What every rank has for this one (of ``shapes``); ``parts`` are for each of them."""

    def start_all_to_all(
        self, parts: Sequence[Tensor], shapes: Sequence[Shape]
    ) -> Callable[[], list[Tensor]]:
        """The same, under way until the result is called for."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank along one axis: its place, how many there are, and the group (None in tracing)."""

    place: int
    size: int
    group: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        """The group. RuntimeError while tracing: values do not exist yet."""
        if self.group is None:
            raise RuntimeError("collective: this rank has no group here, only a place for shapes")
        return self.group


class _Current(threading.local):
    axes: Mapping[str, Member] = {}


_current = _Current()


@contextmanager
def members(axes: Mapping[str, Member]) -> Iterator[None]:
    """While open, collectives of this thread over the axis ``name`` are those of ``axes[name]``."""
    before = _current.axes
    _current.axes = axes
    try:
        yield
    finally:
        _current.axes = before


def member(axis: str) -> Member:
    """The own place and group along ``axis``. RuntimeError outside of ``members``."""
    found = _current.axes.get(axis)
    if found is None:
        raise RuntimeError(
            f"collective over axis {axis!r}: expected one of {sorted(_current.axes)} (see members)"
        )
    return found
