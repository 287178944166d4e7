"""Where values meet element by element: which rows may, and which are those of other samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from mllm_compile.passes.capture.spread import (
    Lookup,
    Spread,
    clash,
    join,
    mixing,
    packet,
    rank_of,
    ranking,
    value_of,
)
from mllm_compile.passes.capture.spread_fixed import told_apart

aten = torch.ops.aten


def pointwise(node: fx.Node, lookup: Lookup) -> Spread:
    """Broadcasting: dims are aligned from the right. Rows with a pooled value mix."""
    sources = node.all_input_nodes
    rank = max(map(rank_of, sources), default=0)
    parts = [lookup(source) for source in sources]
    joined = join(parts)
    places: dict[int, tuple[int, int]] = {}
    for source, part in zip(sources, parts, strict=True):
        for dim in part.dims:
            new, (outer, size) = dim + rank - rank_of(source), part.place_of(dim)
            if new in places and places[new][0] != outer:  # one dim, in different orders
                return mixing(node, joined).over(places)
            places[new] = (outer, max(size, places.get(new, (outer, size))[1]))
    beside_rows = sources[:1] if packet(node) is aten.bucketize else sources
    if told_apart(beside_rows, places, rank, lookup):
        return ranking(node, joined.at(places))
    if packet(node) is aten.add and not places and _adds(parts):
        return replace(joined.over(set()), single=False, pooled=True, part=None)
    pooled = any(part.pooled for part in parts)
    rows = any(part.batch and not part.pooled for part in parts)
    if pooled and rows and not _scales(node, lookup):
        return mixing(node, joined).over(places)
    if beside(node, lookup) or (
        joined.single and any(part.dims and not part.single for part in parts)
    ):
        return mixing(node, joined).over(places)
    return replace(joined.at(places), pooled=pooled and not rows)


def _adds(parts: Sequence[Spread]) -> bool:
    """Whether rows of several samples are summed, one by one."""
    return all(part.pooled or part.single for part in parts if part.batch) and (
        clash(parts) or (any(part.pooled for part in parts) and any(part.single for part in parts))
    )


def beside(node: fx.Node, lookup: Lookup) -> bool:
    """Whether different parts meet, a part and a whole, or every pair of two values' samples."""
    parts = [lookup(source) for source in node.all_input_nodes]
    samples = [
        part
        for source, part in zip(node.all_input_nodes, parts, strict=True)
        if part.dims and value_of(source).is_floating_point()
    ]
    located = [part for part in samples if all(size for _, (_, size) in part.places)]
    located = [part for part in located if len(part.places) == len(part.dims)]
    cut = any(part.part is not None for part in parts)
    return (
        clash(parts)
        or (cut and any(part.part is None for part in samples))
        or any(not one.dims & other.dims for one in located for other in located)
    )


def _scales(node: fx.Node, lookup: Lookup) -> bool:
    """Rows times or divided by a scalar of inputs alone: that scalar can be made global."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or len(node.args) < 2:
        return False
    return scaling_factor(node, lookup) is not None


def scaling_factor(node: fx.Node, lookup: Lookup) -> fx.Node | None:
    """The pooled scalar of inputs alone by which a product or quotient scales its rows."""
    last = node.args[1]
    candidates = [last] if node.target is aten.div.Tensor else [last, node.args[0]]
    for factor in candidates:
        if isinstance(factor, fx.Node) and value_of(factor).dim() == 0:
            spread = lookup(factor)
            if spread.pooled and spread.known and not spread.mixed:
                return factor
    return None
