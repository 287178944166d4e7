"""Values that no sample is in: along which of their dims they vary.

Beside samples, a value that varies along their dim tells them apart by their place in the batch.
"""

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture import spread_movement
from mllm_compile.passes.capture.spread import (
    NOTHING,
    Lookup,
    Spread,
    after_reduction,
    dim_argument,
    join,
    overlap,
    packet,
    rank_of,
    value_of,
)
from mllm_compile.passes.capture.spread_parts import CUTS

aten = torch.ops.aten
MOVES = {
    kind: spread_movement.RULES[kind]
    for kind in (
        aten.view, aten._unsafe_view, aten.permute, aten.transpose, aten.t, aten.unsqueeze,
        aten.squeeze, aten.expand, aten.repeat, aten.select, aten.slice,
    )
}  # fmt: skip
SAME = {
    aten._to_copy, aten.clone, aten.alias, aten.detach, aten.lift_fresh_copy, aten.bucketize,
}  # fmt: skip
REDUCTIONS = {aten.sum, aten.mean, aten.any, aten.all, aten.amax, aten.amin, aten.count_nonzero}
EQUAL = {
    aten.full, aten.zeros, aten.ones, aten.empty, aten.scalar_tensor, aten.zeros_like,
    aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.new_empty,
}  # fmt: skip


def fixed(node: fx.Node, lookup: Lookup) -> Spread:
    """The spread of a value computed from no batch entry."""
    joined = join([lookup(source) for source in node.all_input_nodes])
    value, kind = value_of(node), packet(node)
    if kind is aten.bernoulli and packet(node.all_input_nodes[0]) is aten.empty_like:
        return lookup(*node.all_input_nodes[0].all_input_nodes)  # dropout: one for each element
    if not isinstance(value, torch.Tensor) or kind in EQUAL:
        return joined
    if kind in MOVES or kind in SAME:
        return _moved(node, lookup)
    if kind in REDUCTIONS:
        left = NOTHING.at(dict(lookup(node.args[0]).varies)).moved(after_reduction(node))
        return replace(joined, varies=left.places)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or kind is aten.where:
        return replace(joined, varies=frozenset(_beside(node, lookup)))
    if kind is aten.embedding:
        index = lookup(node.args[1]).varies
        return replace(joined, varies=index | {(rank_of(node) - 1, (1, value.shape[-1]))})
    if kind is aten.cat:
        return replace(joined, varies=_side_by_side(node, lookup))
    if node.target is operator.getitem and packet(node.all_input_nodes[0]) in CUTS:
        return replace(joined, varies=_part(node, lookup))
    created = not node.all_input_nodes
    varies = {(dim, (1, size)) for dim, size in enumerate(value.shape) if size > 1 or created}
    numbers = kind is aten.arange and _counts(node)
    return replace(joined, varies=frozenset(varies), numbered=numbers)


def _counts(node: fx.Node) -> bool:
    """Whether an arange counts 0, 1, 2, ..."""
    bounds: tuple[Any, ...] = node.args
    return len(bounds) == 1 or bool(bounds[0] == 0 and bounds[2:3] in ((), (1,)))


def _moved(node: fx.Node, lookup: Lookup) -> Spread:
    def varying(argument: Any) -> Spread:
        spread = lookup(argument)
        return NOTHING.at(dict(spread.varies))

    spread = lookup(node.args[0])
    moved = varying(node.args[0]) if packet(node) in SAME else MOVES[packet(node)](node, varying)
    whole = all(place == (1, value_of(node).shape[dim]) for dim, place in moved.places)
    same = moved.part is None and not moved.single and len(moved.places) == 1 and whole
    return replace(spread, varies=moved.places, numbered=spread.numbered and same)


def _side_by_side(node: fx.Node, lookup: Lookup) -> frozenset[tuple[int, tuple[int, int]]]:
    """Of values one behind the other: as they do, and along the dim in which they stand."""
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    dim, shape = int(given) % rank_of(node), value_of(node).shape
    return frozenset(
        {each for each in _beside(node, lookup) if each[0] != dim} | {(dim, (1, shape[dim]))}
    )


def _part(node: fx.Node, lookup: Lookup) -> frozenset[tuple[int, tuple[int, int]]]:
    """Of one of the parts into which a value is cut along a dim: as the whole does."""
    source = node.all_input_nodes[0]
    kind = packet(source)
    dim = dim_argument(source, CUTS[kind])
    others = {place for place in lookup(source.args[0]).varies if place[0] != dim}
    if kind is aten.unbind:
        return frozenset((each - (each > dim), place) for each, place in others)
    cut = {(dim, (1, value_of(node).shape[dim]))}
    return frozenset(others | (cut if len(others) < len(lookup(source.args[0]).varies) else set()))


def _beside(node: fx.Node, lookup: Lookup) -> set[tuple[int, tuple[int, int]]]:
    rank, shape = rank_of(node), value_of(node).shape
    found: dict[int, tuple[int, int]] = {}
    for source in node.all_input_nodes:
        for dim, place in lookup(source).varies:
            new = dim + rank - rank_of(source)
            found[new] = place if found.get(new, place) == place else (1, shape[new])
    return set(found.items())


def told_apart(
    sources: Iterable[fx.Node], places: dict[int, tuple[int, int]], rank: int, lookup: Lookup
) -> bool:
    """Whether a value without samples varies along samples; dims are aligned from the right."""
    return any(
        overlap(places.get(dim + rank - rank_of(source), (1, 0)), place)
        for source in sources
        for dim, place in lookup(source).varies
    )
