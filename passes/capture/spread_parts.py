"""Rows cut out of a value along a carrying dim, and put together again.

Parts that meet must be the same rows; joined, they are the whole only if they are all of it, in
order, and were computed alike (``spread_recipes``). A part of a split by sizes counts as one row,
of as many as there are parts, if numbers of the batch were read on the host.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.spread import (
    NOTHING,
    Lookup,
    Part,
    Recipe,
    Rule,
    Spread,
    dim_argument,
    join,
    packet,
    rank_of,
    ranking,
    value_of,
)

aten = torch.ops.aten


def select(node: fx.Node, lookup: Lookup) -> Spread:
    """One row; along a carrying dim, it is of one sample."""
    index: Any = node.args[2]
    size, dim = _size(node), dim_argument(node)
    return _one(lookup(node.args[0]), dim, range(size)[index], size, keep=False)


def cut(node: fx.Node, lookup: Lookup) -> Spread:
    """A slice."""
    bounds: Any = (*node.args[2:], *[None] * 3)[:3]
    size = _size(node)
    rows = range(size)[slice(*bounds)]
    return _rows(lookup(node.args[0]), dim_argument(node), rows, size)


def item_of(node: fx.Node, lookup: Lookup) -> Spread:
    """getitem: one of several results; of an operator that cuts, one part."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    kind, spread = packet(source), lookup(source)
    if kind not in CUTS or not isinstance(index, int):
        return spread
    spread, dim = lookup(source.args[0]), dim_argument(source, CUTS[kind])
    if kind is aten.unbind:
        return _one(spread, dim, index, _size(source), keep=False)
    if kind is aten.split_with_sizes:
        return _one(spread, dim, index, len(value_of(source)), keep=True)
    size, length = _size(source), value_of(source)[0].shape[dim]
    return _rows(spread, dim, range(size)[index * length : (index + 1) * length], size)


def splits(node: fx.Node) -> bool:
    """Whether this is a part of a split by sizes."""
    if node.target is not operator.getitem:
        return False
    return packet(node.all_input_nodes[0]) is aten.split_with_sizes


def split_rows(node: fx.Node, lookup: Lookup) -> Spread:
    """A part of a split by sizes that the model itself gives: the rows of one or more samples."""
    source, index = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(index, int)
    spread, dim = lookup(source.args[0]), dim_argument(source, CUTS[aten.split_with_sizes])
    outer, samples = spread.place_of(dim)
    size, lengths = _size(source), [int(part.shape[dim]) for part in value_of(source)]
    each = size // samples if samples else 0
    if dim not in spread.dims or outer != 1 or not each or any(n % each for n in lengths):
        return item_of(node, lookup)
    first = sum(lengths[:index]) // each
    if lengths[index] == each:
        return _one(spread, dim, first, samples, keep=True)
    return _rows(spread, dim, range(first, first + lengths[index] // each), samples)


def _size(node: fx.Node) -> int:
    """The size of the dim along which the first argument is cut."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return int(value_of(source).shape[dim_argument(node, CUTS.get(packet(node), 1))])


def _one(spread: Spread, dim: int, index: int, count: int, keep: bool) -> Spread:
    """Row ``index`` of ``count``; ``keep`` says whether the dim stays, with size 1 or as a part."""
    left = spread.moved(lambda d: None if d == dim else d - (d > dim and not keep))
    if dim not in spread.dims:
        return left
    if spread.known and not spread.place_of(dim)[1]:  # computed from counts, as cumulative lengths
        return left
    part = _within(spread, range(index, index + 1), count)
    if not len(part[0]):  # a row that nothing was written into yet
        return NOTHING
    return replace(left, single=spread.single or not spread.known, part=part)


def _rows(spread: Spread, dim: int, rows: range, size: int) -> Spread:
    if dim not in spread.dims or rows == range(size):
        return spread
    if len(rows) == 1:
        return _one(spread, dim, rows[0], size, keep=True)
    if spread.known and not spread.place_of(dim)[1]:
        return spread
    return replace(spread, part=_within(spread, rows, size))


def _within(spread: Spread, rows: range, size: int) -> Part:
    """Which rows of the whole are ``rows`` of a value that may be a part already."""
    if spread.part is None:
        return rows, size
    before, count = spread.part
    if len(before) == size:
        return before[rows.start : rows.stop : rows.step], count
    if count == size:  # as large as the whole, with these rows written so far
        return (rows if set(rows) <= set(before) else range(0)), count
    return spread.part


def together(parts: Sequence[Spread]) -> tuple[bool, Part | None]:
    """Whether parts may be joined in this order, and the part that they are then."""
    if unlike(parts):
        return False, None
    cut = [part.part for part in parts if part.part is not None]
    if len({count for _, count in cut}) > 1:  # of several wholes
        return True, None
    same = len(set(cut)) == 1
    rows = [row for item, _ in cut[: 1 if same else None] for row in item]
    if not rows:
        return True, None
    here, count = range(rows[0], rows[0] + len(rows)), cut[0][1]
    if rows != list(here) and not same:
        return False, None
    return True, None if here == range(count) else (here if not same else cut[0][0], count)


def unlike(parts: Sequence[Spread]) -> bool:
    """Whether different parts of one whole were computed in different ways."""
    found: dict[int, tuple[set[Part], set[Recipe]]] = {}
    for item in parts:
        if item.part is not None:
            rows, recipes = found.setdefault(item.part[1], (set(), set()))
            rows.add(item.part)
            recipes.add(item.recipe)
    return any(len(rows) > 1 and len(recipes) > 1 for rows, recipes in found.values())


def stack(node: fx.Node, lookup: Lookup) -> Spread:
    """Cat and stack: rows beside rows, and single rows become rows again."""
    items: Any = node.args[0]
    stacked = packet(node) is aten.stack
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    new = int(given) % rank_of(node)
    parts = [lookup(item) for item in items]
    joined = join(parts)
    dims = {d + (stacked and d >= new) for part in parts for d in part.dims}
    ordered, part = together(parts)
    mixes = joined.pooled and any(part.rows for part in parts)
    if part is not None and len(items) > 1 and _same(parts):
        return joined.over(dims)
    if any(part.rows and (part.single or not part.dims) for part in parts):
        dims.add(new)
    if mixes or not ordered:
        return ranking(node, joined).over(dims)
    places = dict.fromkeys(dims, (1, 0))
    for item in parts:
        places |= item.moved(lambda d: d + (stacked and d >= new)).places
    if new in dims:
        places[new] = (1, len(items) if stacked else 0)
    return replace(joined.at(places), single=False, part=part)


def _same(parts: Sequence[Spread]) -> bool:
    """Whether all that depends on the batch is of the same sample."""
    return (
        all(part.single or part.known for part in parts)
        and len({p.part for p in parts if p.batch}) == 1
    )


def written(node: fx.Node, lookup: Lookup) -> Spread:
    """select_scatter, slice_scatter: rows written into a value."""
    base, new = lookup(node.args[0]), lookup(node.args[1])
    dim, joined = dim_argument(node, 2), join([base, new])
    one = packet(node) is aten.select_scatter
    rows, size = written_rows(node)
    moved = new.moved(lambda d: d + (one and d >= dim))
    dims = base.dims | moved.dims
    if new.part == (rows, size):
        ordered, part = together([base, new])
        fresh = not base.batch or base.part is not None or rows == range(size)
        if ordered and fresh:
            return replace(joined.over({*dims, dim}), single=False, part=part)
        return ranking(node, joined).over({*dims, dim})
    if dim in base.dims and rows != range(size):
        return ranking(node, joined).over(dims)
    return joined.at({d: (base if d in base.dims else moved).place_of(d) for d in dims})


def written_rows(node: fx.Node) -> Part:
    """Which rows select_scatter and slice_scatter write."""
    size = value_of(node).shape[dim_argument(node, 2)]
    bounds: Any = (*node.args[3:], *[None] * 3)[:3]
    if packet(node) is aten.select_scatter:
        return range(size)[bounds[0] :][:1], size
    return range(size)[slice(*bounds)], size


def moved_rows(node: fx.Node, lookup: Lookup) -> Spread:
    """Of flip and roll: along a carrying dim, samples change their places."""
    spread, rank = lookup(node.args[0]), rank_of(node.args[0])
    position = 1 if packet(node) is aten.flip else 2
    named: Any = node.args[position] if len(node.args) > position else ()
    dims = {int(dim) % rank for dim in named} if named else set(range(rank))
    return ranking(node, spread) if spread.dims & dims else spread


JOINS = {aten.cat, aten.stack, aten.select_scatter, aten.slice_scatter}
"""Operators whose arguments become rows side by side."""

CUTS = {aten.unbind: 1, aten.split: 2, aten.split_with_sizes: 2}
"""Operators with several results, and where they take their dim."""

RULES: dict[Any, Rule] = {
    aten.select: select,
    aten.slice: cut,
    aten.flip: moved_rows,
    aten.roll: moved_rows,
    aten.cat: stack,
    aten.stack: stack,
    aten.select_scatter: written,
    aten.slice_scatter: written,
    # what they cut is told part by part, by getitem
    **dict.fromkeys(CUTS, lambda node, lookup: lookup(node.args[0])),
}
