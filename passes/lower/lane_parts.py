"""Which part of a boundary value each data lane has, where two modules have unequally many lanes.

A lane's value is what its program computes from its samples; the values of one module's lanes, one
behind the other along the dim that carries samples, are those of the other module's. That dim is
the only one in which lanes may differ and both modules have the same number of rows. A lane without
the value (no image among its samples) has no rows of it.

What depends on no sample at all may be the same on every lane: then each lane has all of it.

Assumed: where the analysis of samples (passes/capture/spread.py) does not know how many rows each
sample has, rows are packed, not padded to the longest sample of a lane. Padding would show in their
number, unless neither data size divides the other and the sums happen to agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NoReturn

import torch
from torch import fx

from mllm_compile.compiler.captured import Input
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.capture.spread import Spread
from mllm_compile.passes.capture.spread_rules import spreads

REMEDY = "pad all samples of a microbatch alike, or give both modules the same data size"


@dataclass(frozen=True, slots=True)
class LaneValue:
    """A value of the program that one lane runs."""

    plan: Plan
    name: str

    @property
    def node(self) -> fx.Node:
        """The node that makes it."""
        return _nodes(self.plan.captured.main)[self.name]

    @property
    def tensor(self) -> torch.Tensor:
        """The fake tensor of the whole lane."""
        value = self.node.meta["val"]
        assert isinstance(value, torch.Tensor)
        return value

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape on this lane."""
        return tuple(self.tensor.shape)

    @property
    def spread(self) -> Spread:
        """How samples are spread over it."""
        captured = self.plan.captured
        return _spreads(captured.main, captured.inputs)[self.node]


@dataclass(frozen=True, slots=True)
class Part:
    """``dim`` of a lane's value, seen as [outer, rows]: its rows begin at ``offset`` of ``total``.

    As :meth:`mllm_compile.compiler.holding.Holding.within` takes it.
    """

    dim: int
    outer: int
    rows: int
    offset: int
    total: int


Parts = tuple[Sequence[Part | None], Sequence[Part | None]]


def lane_parts(sources: Sequence[LaneValue], targets: Sequence[LaneValue], flows: bool) -> Parts:
    """The part of every lane on both sides, in order of lanes; None where it has all of the value.

    Args:
        sources: the lanes that compute the value.
        targets: the lanes that read it.
        flows: whether its gradient flows back.

    Raises:
        PlanError: the lanes of both sides do not make up the same value, or it cannot be told.
    """
    every = [*sources, *targets]
    shapes = {value.shape for value in every}
    if len(sources) == len(targets) == len(shapes) == 1:  # the samples of all other lanes lack it
        return [None], [None]
    richest = max(every, key=lambda value: prod(value.shape))
    dims = _dims_of_rows(sources, targets)
    if not dims and not richest.spread.batch and len(shapes) == 1:
        if flows:
            _refuse(richest, "no gradient of a value that is the same on all lanes", "one")
        return [None] * len(sources), [None] * len(targets)
    dims, outer = _carrying(richest, dims)
    if not dims:
        got = " -> ".join(str([list(value.shape) for value in side]) for side in (sources, targets))
        _refuse(richest, "lanes that differ only in rows, as many on both sides", got)
    _check_rows_per_sample(every)
    return _parts(sources, min(dims), outer), _parts(targets, min(dims), outer)


def _dims_of_rows(sources: Sequence[LaneValue], targets: Sequence[LaneValue]) -> set[int]:
    """The dims along which both sides have equally many rows, and lanes differ in nothing else."""
    before, after = ([value.shape for value in side] for side in (sources, targets))
    first, every = before[0], [*before, *after]
    if any(len(shape) != len(first) for shape in every):
        return set()
    return {
        dim
        for dim in range(len(first))
        if sum(shape[dim] for shape in before) == sum(shape[dim] for shape in after)
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in every}) == 1
    }


def _carrying(richest: LaneValue, dims: set[int]) -> tuple[set[int], int]:
    """Those of ``dims`` that carry samples, and what lies outside of the samples in them.

    The lane with most rows tells: among the rows of a single sample, dims look alike. Several dims
    are left only where the lanes of both sides are the same, and then any of them will do.
    """
    spread = richest.spread
    if spread.pooled or spread.mixed:
        got = f"one that {spread.mixed} mixes" if spread.mixed else "one that is reduced over them"
        _refuse(richest, "a value whose rows each belong to one sample", got)
    dims = dims & spread.dims if spread.batch and spread.dims else dims
    return dims, spread.place_of(min(dims))[0] if dims and spread.batch else 1


def _check_rows_per_sample(values: Sequence[LaneValue]) -> None:
    """Where samples are a factor of a dim, all lanes have equally many rows for each of them."""
    found = set()
    for value in values:
        for dim, (outer, size) in value.spread.places if len(value.spread.dims) == 1 else ():
            found |= {value.shape[dim] // (outer * size)} if size else set()
    if len(found) > 1:
        got = " and ".join(map(str, sorted(found)))
        _refuse(values[0], "equally many rows for every sample", got)


def _parts(side: Sequence[LaneValue], dim: int, outer: int) -> list[Part | None]:
    rows = [value.shape[dim] // outer for value in side]
    return [Part(dim, outer, n, sum(rows[:i]), sum(rows)) for i, n in enumerate(rows)]


def _refuse(value: LaneValue, expected: str, got: str) -> NoReturn:
    where = (
        f"%{value.name} ({value.node.meta.get('where', '')}) between modules of unequal data sizes"
    )
    raise PlanError(explain(where, expected=expected, got=got, remedy=REMEDY))


@lru_cache(maxsize=1024)
def _nodes(main: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in main.graph.nodes}


@lru_cache(maxsize=1024)
def _spreads(main: fx.GraphModule, inputs: tuple[Input, ...]) -> dict[fx.Node, Spread]:
    placeholders = main.graph.find_nodes(op="placeholder")
    return spreads(main.graph.nodes, dict(zip(placeholders, inputs, strict=True)))
