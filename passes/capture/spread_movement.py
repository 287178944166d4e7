"""Where samples go when values are only moved: views, permutations, indexing, joining.

Rules as in ``spread_rules``. Dims of results are counted from 0.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture import spread_parts
from mllm_compile.passes.capture.spread import (
    Lookup,
    Rule,
    Spread,
    dim_argument,
    join,
    packet,
    rank_of,
    ranking,
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
        while old[i : i + 1] == [1] != new[j : j + 1] and old[i + 1 : i + 2] <= new[j : j + 1]:
            left, i = [*left, i], i + 1  # goes with the dim before, unless the next is divided
        while new[j : j + 1] == [1] != old[i : i + 1]:
            right, j = [*right, j], j + 1
        yield left, right


def _within(dims: list[int], shape: list[int], outer: int, size: int) -> dict[int, tuple[int, int]]:
    """Which of ``dims``, together one factor, holds the factor of ``size`` behind ``outer``."""
    for dim in dims:
        if shape[dim] > outer > 1 or (dim == dims[-1] and outer > 1):
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


def like_first(node: fx.Node, lookup: Lookup) -> Spread:
    """The dims of the first argument; depends on all of them."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    return joined.like(lookup(node.args[0]))


def padded(node: fx.Node, lookup: Lookup) -> Spread:
    """Rows that are added along a carrying dim are of no sample."""
    spread, sizes = lookup(node.args[0]), value_of(node).shape
    source = node.args[0]
    assert isinstance(source, fx.Node)
    same = {dim for dim in spread.dims if value_of(source).shape[dim] == sizes[dim]}
    return spread.at({dim: spread.place_of(dim) if dim in same else (1, 0) for dim in spread.dims})


def like_index(node: fx.Node, lookup: Lookup) -> Spread:
    """embedding, gather: rows are looked up; the index says whose they are."""
    embeds = packet(node) is aten.embedding
    table, index = node.args[0], node.args[1 if embeds else 2]
    joined = join([lookup(source) for source in node.all_input_nodes])
    if _picks(lookup(table), {0 if embeds else dim_argument(node)}, [lookup(index)]):
        return ranking(node, joined).like(lookup(table))
    spread = joined.like(lookup(index))
    if not embeds and not spread.dims:
        return joined.like(lookup(table))
    return spread


def index_select(node: fx.Node, lookup: Lookup) -> Spread:
    """Rows along one dim."""
    table, joined = lookup(node.args[0]), like_first(node, lookup)
    if _picks(table, {dim_argument(node)}, [lookup(node.args[2])]):
        return ranking(node, joined)
    return joined


def _picks(table: Spread, dims: set[int], indices: Sequence[Spread]) -> bool:
    """Whether samples in one of these dims are picked by their place alone."""
    samples = any(dim in table.dims and table.place_of(dim)[1] for dim in dims)
    return samples and not any(item.batch or item.numbered for item in indices)


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
    places = dict.fromkeys(dims, (1, 0))
    for position, dim in enumerate(rest):
        if dim in spread.dims:
            new = position if adjacent and dim < start else position + width
            places[new] = spread.place_of(dim)
    if any(_picks(spread, {dim}, [lookup(indices[dim])]) for dim in used):
        return ranking(node, joined).over(places)
    return joined.at(places)


def bags(node: fx.Node, lookup: Lookup) -> Spread:
    """Rows of a table are looked up and summed: a bag is one row of the result."""
    return join([lookup(source) for source in node.all_input_nodes]).over({0})


def into(node: fx.Node, lookup: Lookup) -> Spread:
    """index_put, scatter, index_add: rows written into a tensor."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    base = lookup(node.args[0])
    given: Any = node.args[1]
    put = packet(node) is aten.index_put
    by_dim = dict(enumerate(given)) if put else {dim_argument(node): node.args[2]}
    if any(_picks(base, {dim}, [lookup(item)]) for dim, item in by_dim.items() if item is not None):
        return ranking(node, joined).over(base.dims)
    return joined.like(base) if base.dims else joined.over({0})


RULES: dict[Any, Rule] = {
    **spread_parts.RULES,
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
    aten.constant_pad_nd: padded,
    aten.masked_scatter: like_first,
    aten.view_as_complex: like_first,
    aten.view_as_real: like_first,
    aten.embedding: like_index,
    aten.gather: like_index,
    aten.index_select: index_select,
    aten._embedding_bag: bags,
    aten.index: index,
    aten._unsafe_index: index,
    aten.index_put: into,
    aten.index_add: into,
    aten.scatter: into,
    aten.scatter_add: into,
}
