"""What a node calls on local values: its operator, with local sizes where arguments are sizes."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import fx

from mllm_compile.passes.sharding.factors import Shape
from mllm_compile.passes.sharding.rules import name_of
from mllm_compile.passes.sharding.rules_dims import dims_of
from mllm_compile.passes.sharding.values import shapes

aten = torch.ops.aten
T = TypeVar("T")
Emit = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], T]
"""Calls an operator, or puts the call into a graph."""

_SIZE = {"aten::expand": "size", "aten::new_zeros": "size", "aten::new_ones": "size"}
_SIZE |= {"aten::new_empty": "size", "aten::new_full": "size"}


def local_call(
    emit: Emit[T],
    node: fx.Node,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[Shape],
    results: Sequence[Shape],
) -> T:
    """Emit the operator of ``node`` for local arguments.

    ``args`` and ``kwargs`` are the node's, with local values in place of nodes. ``inputs`` and
    ``results`` are the local shapes, in the order of its rule. Views become reshapes, since a
    conversion may have changed the strides; a mean over parts becomes their sum over the whole
    count. Special operators (``Strategy.special``) are not handled here.
    """
    assert callable(node.target)
    name, arguments = name_of(node), tuple(args)
    if name in ("aten::view", "aten::_unsafe_view"):
        return emit(aten.reshape.default, (arguments[0], list(results[0])), {})
    if name == "aten::mean":
        return _mean(emit, node, arguments, dict(kwargs), inputs[0])
    if name in _SIZE:
        arguments = _replaced(node, arguments, _SIZE[name], list(results[0]))
    elif name == "aten::convolution":
        arguments = _replaced(node, arguments, "groups", inputs[0][1] // inputs[1][1])
    return emit(node.target, arguments, dict(kwargs))


def _replaced(node: fx.Node, args: tuple[Any, ...], name: str, value: Any) -> tuple[Any, ...]:
    schema: Any = getattr(node.target, "_schema", None)
    place = [argument.name for argument in schema.arguments].index(name)
    return (*args[:place], value, *args[place + 1 :])


def _mean(
    emit: Emit[T], node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], local: Shape
) -> T:
    (whole,), _ = shapes(node)
    dim = args[1] if len(args) > 1 else None
    dims = sorted(dims_of(dim, len(whole)))
    count = prod(whole[d] for d in dims)
    if count == prod(local[d] for d in dims):
        assert callable(node.target)
        return emit(node.target, args, kwargs)
    keep = args[2] if len(args) > 2 else False
    total = emit(aten.sum.dim_IntList, (args[0], dims, keep), kwargs)
    return emit(aten.div.Tensor, (total, count), {})
