"""Values of queries, made for one block of queries at a time.

A value is a tensor, [B|1, 1] for all queries or [B|1, sections] with one per section, or it is
``PerQuery``: a function of other values that is put off until a block of queries asks for it. So
what there is for every query of a long sequence passes through the cache, and memory holds none of
it but the result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mllm_compile.kernels.attention.columns import Runs, gathered

BLOCK = 1 << 16
"""Values of a block."""


@dataclass(frozen=True, eq=False, slots=True)
class PerQuery:
    """``function`` of a block of queries and of the values of the arguments there."""

    function: Callable[..., Tensor]
    arguments: "tuple[Value, ...]" = ()


Value = Tensor | PerQuery


def apply(function: Callable[..., Tensor], *values: Value) -> Value:
    """A function, element by element; at once where no value is put off."""
    now = [value for value in values if isinstance(value, Tensor)]
    if len(now) == len(values):
        return function(*now)
    return PerQuery(lambda rows, *found: function(*found), values)


@dataclass(frozen=True)
class Block:
    """Queries ``rows``, and what is known of them."""

    rows: slice
    sections: Runs | None
    _known: dict[int, Tensor] = field(default_factory=dict)

    def of(self, value: Value) -> Tensor:
        """The value of every query of the block [B|1, rows|1]."""
        if isinstance(value, Tensor) and value.shape[1] == 1:
            return value
        if id(value) not in self._known:
            self._known[id(value)] = self._make(value)
        return self._known[id(value)]

    def _make(self, value: Value) -> Tensor:
        if isinstance(value, PerQuery):
            return value.function(self.rows, *map(self.of, value.arguments))
        assert self.sections is not None
        return gathered(value, self._numbers())

    def _numbers(self) -> Tensor:
        assert self.sections is not None
        if id(self.sections) not in self._known:
            self._known[id(self.sections)] = self.sections.over(self.rows)
        return self._known[id(self.sections)]


def blocks(
    batch: int, queries: int, sections: Runs | None, device: torch.device
) -> Iterator[Block]:
    """All queries; on a CPU in blocks that fit its cache."""
    size = queries if device.type != "cpu" else max(BLOCK // batch, 1)
    for start in range(0, queries, size):
        yield Block(slice(start, min(start + size, queries)), sections)
