"""What stands for a node of a stage on one rank: its calls, with marks in place of values.

The same functions that localize emits calls through say here what must have been emitted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import fx

from mllm_compile.compiler.graph import tensors_of
from mllm_compile.compiler.layout import R
from mllm_compile.compiler.sharding import Layouts, Sharding, Strategy
from mllm_compile.passes.lower.local_values import LocalRank
from mllm_compile.passes.lower.masked_rows import divides_rows, masked_rows, row_layouts
from mllm_compile.passes.lower.special import filled, schema_of, special_axis, special_call
from mllm_compile.passes.sharding.call import Call as OperatorCall
from mllm_compile.passes.sharding.exchange import ATTENTION, SEQUENCE
from mllm_compile.passes.sharding.local_call import local_call
from mllm_compile.passes.sharding.rules_index import numbered_dims

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
INTERVALS = object()
"""Stands for the intervals of keys that the queries at hand see."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The tensor argument at this place, in these layouts."""

    place: int
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class Made:
    """The result of an earlier call for the same node."""

    place: int


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank has of an earlier result, which is whole: its shape and its layouts."""

    place: int
    shape: tuple[int, ...]
    layouts: Layouts


def calls(node: fx.Node, rank: LocalRank, sharding: Sharding) -> list[Call]:
    """The calls of a node, in order."""
    own = sharding.strategies.get(node.name, (Strategy("whole", (), ()),) * len(rank.axes))
    operands: list[Operand] = []
    shapes: list[tuple[int, ...]] = []
    places = count()

    def operand(source: fx.Node) -> Operand:
        place = next(places)
        layouts = tuple(each.inputs[place] if each.inputs else R for each in own)
        shapes.append(rank.shape(tuple(source.meta["val"].shape), layouts))
        operands.append(Operand(place, layouts))
        return operands[-1]

    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)  # type: ignore[arg-type]
    along = special_axis(node, rank.axes, own)
    if along is not None:
        return [(*special_call(node, args, kwargs, along), {})]
    if divides_rows(node, operands[0].layouts if operands else ()):
        return _masked_rows(node, operands, shapes)
    if node.target is ATTENTION:
        args, kwargs = _attention(node, args, kwargs, operands[0].layouts)
    results = [
        ()
        if tensor is None
        else rank.shape(
            tuple(tensor.shape),
            tuple(each.outputs[place] if each.outputs else R for each in own),
        )
        for place, tensor in enumerate(tensors_of(node))
    ]
    made: list[Call] = []

    def emit(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Made:
        made.append((target, args, kwargs))
        return Made(len(made) - 1)

    local_call(emit, node, args, kwargs, shapes, results)
    return made


def _attention(
    node: fx.Node, args: Any, kwargs: Any, queries: Layouts
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments; intervals for queries that are divided, instead of ``causal``."""
    names = [item.name for item in schema_of(ATTENTION)]
    named = dict(zip(names, filled(node, args, kwargs), strict=True))
    if named["causal"] and any(each.divided and each.dim == SEQUENCE for each in queries):
        named |= {"intervals": INTERVALS, "causal": False}
    return tuple(named.values()), {}


def _masked_rows(
    node: fx.Node, operands: list[Operand], shapes: list[tuple[int, ...]]
) -> list[Call]:
    call = OperatorCall.of(node)
    rows = call.inputs[0][: numbered_dims(call)]
    own = row_layouts(operands[0].layouts, len(rows))
    made: list[Call] = []

    def emit(target: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        made.append((target, args, dict(kwargs)))
        return Made(len(made) - 1)

    marks: list[Any] = list(operands)
    masked_rows(emit, lambda whole, _: Part(whole.place, rows, own), marks, shapes, rows)
    return made
