"""The operators that stand in where a factor is divided that the plain operator needs whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import mllm_compile.kernels.attention.context
import mllm_compile.kernels.collective.divided  # registers the operators
import mllm_compile.kernels.grouped_mm  # noqa: F401
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.exchange import ATTENTION, EXCHANGE, SEQUENCE

aten, ours = torch.ops.aten, torch.ops.mllm

SPECIAL: dict[Any, Callable[..., Any]] = {
    ours.attention.default: ours.context_attention.default,
    aten.embedding.default: ours.divided_embedding.default,
    aten._softmax.default: ours.divided_softmax.default,
    aten._log_softmax.default: ours.divided_log_softmax.default,
    aten.nll_loss_forward.default: ours.divided_nll_loss.default,
    ours.grouped_mm.default: ours.divided_grouped_mm.default,
}


def special_axis(
    node: fx.Node, axes: Sequence[MeshAxis], strategies: Sequence[Strategy]
) -> tuple[MeshAxis, Strategy] | None:
    """Axis and strategy of the operator for a divided factor; None where the plain one runs.

    Raises:
        PlanError: there is no such operator, or the factor is not divided once in equal blocks.
    """
    asked = [at for at, strategy in enumerate(strategies) if strategy.special]
    if not asked:
        return None
    axis = axes[asked[0]]
    subject = f"%{node.name} = {node.target}, divided along {axis.name}"
    if len(asked) > 1 or node.target not in SPECIAL:
        raise PlanError(explain(subject, expected=f"one of {list(map(str, SPECIAL))}, one axis"))
    for place, layout in enumerate(strategies[asked[0]].inputs):
        others = [s.inputs[place] for i, s in enumerate(strategies) if i != asked[0] and s.inputs]
        crossed = any(other.divided and other.dim == layout.dim for other in others)
        equal = (1, axis.size) if strategies[asked[0]].special != EXCHANGE else (1, layout.size)
        if layout.divided and ((layout.outer, layout.size) != equal or crossed):
            expected = f"a dim in {axis.size} equal blocks, not divided otherwise"
            raise PlanError(explain(subject, expected=expected, got=str(layout)))
    return axis, strategies[asked[0]]


def special_call(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], along: tuple[MeshAxis, Strategy]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Operator and arguments that stand in for those of ``node``."""
    target = SPECIAL[node.target]
    if node.target is ATTENTION:
        return target, _exchanging_call(node, args, kwargs, along)
    count = len(schema_of(target)) - 1
    return target, (*filled(node, args, kwargs)[:count], along[0].name)


def _exchanging_call(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], along: tuple[MeshAxis, Strategy]
) -> tuple[Any, ...]:
    """Without masks and bias, which are none; with the splits of queries and keys."""
    names = [item.name for item in schema_of(ATTENTION)]
    named = dict(zip(names, filled(node, args, kwargs), strict=True))
    axis, strategy = along
    named["axis"] = axis.name
    for name, x, layout in zip(("queries", "keys"), node.args, strategy.inputs, strict=False):
        length = x.meta["val"].shape[SEQUENCE]  # type: ignore[union-attr]
        named[name] = str(axis.split(layout.size).times(length // layout.size))
    return tuple(named[item.name] for item in schema_of(SPECIAL[ATTENTION]))


def filled(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """All arguments of a call in the order of the operator's schema, with its defaults."""
    rest = schema_of(node.target)[len(args) :]
    return (*args, *(kwargs.get(item.name, item.default_value) for item in rest))


def schema_of(target: Any) -> Sequence[Any]:
    """The arguments that an operator declares."""
    arguments: Sequence[Any] = target._schema.arguments
    return arguments
