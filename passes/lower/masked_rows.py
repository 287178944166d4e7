"""``masked_scatter`` on the rank that has some of the rows which a mask keeps or not.

The k-th row that is kept comes from the k-th row of the source, so rows are numbered on the whole
mask, which is at hand everywhere; each rank then looks up those of its own rows: the source's row,
or what stood there.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.layout import R
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.passes.lower.local_graph import LocalGraph, Value
from mllm_compile.passes.lower.local_values import divided_in
from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.local_call import Emit, T
from mllm_compile.passes.sharding.rules_index import numbered_dims

aten = torch.ops.aten
MASKED_SCATTER = aten.masked_scatter.default


def divides_rows(node: fx.Node, layouts: Layouts) -> bool:
    """Whether a node writes kept rows into a tensor, in these layouts, of which a rank has some."""
    if node.target is not MASKED_SCATTER:
        return False
    return divided_in(layouts, range(numbered_dims(Call.of(node)) or 0))


def masked_rows(
    emit: Emit[T],
    part: Callable[[T, str], T],
    operands: Sequence[T],
    shapes: Sequence[tuple[int, ...]],
    rows: tuple[int, ...],
) -> T:
    """Emit what a rank computes.

    Args:
        emit: calls an operator.
        part: takes this rank's part of a whole tensor [*rows]; the name is for people.
        operands: x [*this rank's rows, *row], the mask, whole along rows, and the source.
        shapes: those of the operands.
        rows: the sizes of the numbered dims, whole.

    """

    def call(target: Any, *args: Any) -> T:
        return emit(target, args, {})

    x, mask, source = operands
    row = shapes[0][len(rows) :]
    kept = call(aten.expand.default, mask, [*rows, *row])
    for _ in row:
        kept = call(aten.select.int, kept, len(rows), 0)
    count = prod(shapes[2]) // prod(row)
    order = call(aten.cumsum.default, call(aten.reshape.default, kept, [-1]), 0)
    order = call(aten.clamp.default, call(aten.sub.Tensor, order, 1), 0, count - 1)
    order = part(call(aten.reshape.default, order, list(rows)), "row_numbers")
    table = call(aten.reshape.default, source, [count, prod(row)])
    found = call(aten.reshape.default, call(aten.embedding.default, table, order), list(shapes[0]))
    kept = part(kept, "kept_rows")
    for _ in row:
        kept = call(aten.unsqueeze.default, kept, -1)
    return call(aten.where.self, kept, found, x)


def masked_rows_call(
    local: LocalGraph, node: fx.Node, operands: Sequence[fx.Node], layouts: Layouts
) -> fx.Node:
    """The call in a rank's graph; ``layouts`` are those of the tensor that is written to."""
    rows = Call.of(node).inputs[0][: numbered_dims(Call.of(node))]
    own = row_layouts(layouts, len(rows))

    def emit(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        return local.call(target, args, kwargs, {**node.meta, "of": node.name}, node.name)

    def part(whole: fx.Node, name: str) -> fx.Node:
        value = Value(f"{node.name}_{name}", rows, False, whole.meta)
        value.forms[(R,) * len(own)] = whole
        return local.form(value, own, node.meta)

    shapes = [tuple(operand.meta["val"].shape) for operand in operands]
    return masked_rows(emit, part, operands, shapes, rows)


def row_layouts(layouts: Layouts, rows: int) -> Layouts:
    """Of what has the numbered dims alone, ``rows`` of them."""
    return tuple(x if x.divided and x.dim < rows else R for x in layouts)
