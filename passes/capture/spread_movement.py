"""Where samples go when values are only moved: views, permutations, indexing, joining.

Rules as in ``spread_rules``. Dims of results are counted from 0.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.spread import (
    Lookup,
    Rule,
    Spread,
    dim_argument,
    join,
    mixing,
    rank_of,
    reduced_dims,
    value_of,
)

aten = torch.ops.aten


def view(node: fx.Node, lookup: Lookup) -> Spread:
    """Dims are matched in groups of equal size; within one, samples keep their place in order."""
    source = node.args[0]
    spread = lookup(source)
    assert isinstance(source, fx.Node)
    old, new = list(value_of(source).shape), list(value_of(node).shape)
    if 0 in old:
        return spread.over({0} if spread.dims and new else set())
    places: dict[int, tuple[int, int]] = {}
    for left, right in _groups(old, new):
        first = next((dim for dim in left if dim in spread.dims), None)
        if first is not None:
            outer, size = spread.place_of(first)
            outer *= math.prod(old[dim] for dim in left if dim < first)
            places |= _within(right, new, outer, size)
    return spread.at(places)


def _groups(old: list[int], new: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Neighbouring dims of both shapes that hold the same number of elements."""
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, a, b = [i], [j], old[i], new[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, left, i = a * old[i], [*left, i], i + 1
            else:
                b, right, j = b * new[j], [*right, j], j + 1
        yield left, right


def _within(dims: list[int], shape: list[int], outer: int, size: int) -> dict[int, tuple[int, int]]:
    """Which of ``dims``, together one factor, holds the factor of ``size`` behind ``outer``."""
    for dim in dims:
        if shape[dim] > outer > 1:
            return {dim: (outer, size)}
        if outer > 1:
            outer //= shape[dim]
        elif shape[dim] > 1 or size == 1:
            return {dim: (1, min(size, shape[dim]))}
    return {dims[-1]: (1, size)}


def permute(node: fx.Node, lookup: Lookup) -> Spread:
    """permute, transpose and t, read off the dims they name."""
    spread, rank = lookup(node.args[0]), rank_of(node.args[0])
    order = list(range(rank))
    if node.target is aten.permute.default:
        named: Any = node.args[1]
        order = [int(dim) % rank for dim in named]
    elif rank > 1:
        named = node.args[1:3] if len(node.args) > 2 else (0, 1)
        one, other = (int(dim) % rank for dim in named)
        order[one], order[other] = order[other], order[one]
    return spread.moved(order.index)


def unsqueeze(node: fx.Node, lookup: Lookup) -> Spread:
    """A new dim in front of those behind it."""
    spread, given = lookup(node.args[0]), node.args[1]
    assert isinstance(given, int)
    new = given % rank_of(node)
    return spread.moved(lambda dim: dim + (dim >= new))


def squeeze(node: fx.Node, lookup: Lookup) -> Spread:
    """Dims of size 1 go; a carrying one hands its sample to the next dim that stays."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    named, shape = reduced_dims(node), value_of(source).shape
    rest = [dim for dim in range(len(shape)) if dim not in named or shape[dim] != 1]
    return lookup(source).moved(lambda dim: next((i for i, r in enumerate(rest) if r >= dim), None))


def expand(node: fx.Node, lookup: Lookup) -> Spread:
    """New dims come in front; a repeated carrying dim holds its samples behind the repetition."""
    spread, shift = lookup(node.args[0]), rank_of(node) - rank_of(node.args[0])
    times: Any = node.args[1] if node.target is aten.repeat.default else [1] * rank_of(node)
    places = {dim: spread.place_of(dim) for dim in spread.dims}
    return spread.at(
        {d + shift: (outer * times[d + shift], size) for d, (outer, size) in places.items()}
    )


def row(node: fx.Node, lookup: Lookup) -> Spread:
    """Select and unbind take rows out; along a carrying dim, each is of one sample."""
    spread, dim = lookup(node.args[0]), dim_argument(node)
    left = spread.moved(lambda d: None if d == dim else d - (d > dim))
    return replace(left, single=spread.single or (dim in spread.dims and not spread.known))


def parts(node: fx.Node, lookup: Lookup) -> Spread:
    """Parts of named sizes, along a carrying dim, are taken to be one sample each."""
    spread, dim = lookup(node.args[0]), dim_argument(node, 2)
    if dim in spread.dims:
        left = spread.moved(lambda d: None if d == dim else d)
        return replace(left, single=not spread.known or spread.single)
    return spread


def like_first(node: fx.Node, lookup: Lookup) -> Spread:
    """The dims of the first argument; depends on all of them."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    return joined.like(lookup(node.args[0]))


def like_index(node: fx.Node, lookup: Lookup) -> Spread:
    """embedding, gather: rows are looked up; the index says whose they are."""
    table, index = node.args[0], node.args[1 if node.target is aten.embedding.default else 2]
    joined = join([lookup(source) for source in node.all_input_nodes])
    spread = joined.like(lookup(index))
    if node.target is aten.gather.default and not spread.dims:
        return joined.like(lookup(table))
    return spread


def index(node: fx.Node, lookup: Lookup) -> Spread:
    """Indexed dims become those of the (broadcast) indices, which say whose rows they pick."""
    source, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
    spread = lookup(source)
    joined = join([lookup(item) for item in node.all_input_nodes])
    used = [dim for dim, item in enumerate(indices) if item is not None]
    given = [item for item in indices if item is not None]
    width = max(rank_of(item) for item in given)
    adjacent = used == list(range(used[0], used[-1] + 1))
    start = used[0] if adjacent else 0
    dims = {start + width - rank_of(item) + dim for item in given for dim in lookup(item).dims}
    if not dims and spread.dims & set(used):
        dims = {start}
    rest = [dim for dim in range(rank_of(source)) if dim not in used]
    for position, dim in enumerate(rest):
        if dim in spread.dims:
            dims.add(position if adjacent and dim < start else position + width)
    return joined.over(dims)


def bags(node: fx.Node, lookup: Lookup) -> Spread:
    """Rows of a table are looked up and summed: a bag is one row of the result."""
    return join([lookup(source) for source in node.all_input_nodes]).over({0})


def into(node: fx.Node, lookup: Lookup) -> Spread:
    """index_put, scatter, index_add: rows written into a tensor."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    dims = set(lookup(node.args[0]).dims)
    return joined.over(dims or {0})


def stack(node: fx.Node, lookup: Lookup) -> Spread:
    """Cat and stack: rows beside rows, and single rows become rows again."""
    items: Any = node.args[0]
    stacked = node.target is aten.stack.default
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    new = int(given) % rank_of(node)
    parts = [lookup(item) for item in items]
    joined = join(parts)
    dims = {d + (stacked and d >= new) for part in parts for d in part.dims}
    if any(part.rows and (part.single or not part.dims) for part in parts):
        dims.add(new)
    if joined.pooled and any(part.rows for part in parts):
        return mixing(node, joined).over(dims)
    return replace(joined.over(dims), single=False)


RULES: dict[Any, Rule] = {
    aten.view: view,
    aten._unsafe_view: view,
    aten.reshape: view,
    aten.permute: permute,
    aten.transpose: permute,
    aten.t: permute,
    aten.unsqueeze: unsqueeze,
    aten.squeeze: squeeze,
    aten.expand: expand,
    aten.repeat: expand,
    aten.select: row,
    aten.unbind: row,
    aten.slice: like_first,
    aten.split: like_first,
    aten.split_with_sizes: parts,
    aten.constant_pad_nd: like_first,
    aten.flip: like_first,
    aten.slice_scatter: like_first,
    aten.select_scatter: like_first,
    aten.masked_scatter: like_first,
    aten.view_as_complex: like_first,
    aten.view_as_real: like_first,
    aten.embedding: like_index,
    aten.gather: like_index,
    aten.index_select: like_first,
    aten._embedding_bag: bags,
    aten.index: index,
    aten._unsafe_index: index,
    aten.index_put: into,
    aten.index_add: into,
    aten.scatter: into,
    aten.scatter_add: into,
    aten.cat: stack,
    aten.stack: stack,
}
