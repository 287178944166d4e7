"""Operators whose result has the default dtype of the moment say which dtype they mean.

``1 - integers`` and ``full(shape, 0.5)`` are floats of torch's default dtype. A program runs under
whatever default its process has, so the dtype of the trace is written into the graph: as the
``dtype`` argument where the operator has one, by converting its operands where it has not.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def pin_dtypes(graph: fx.GraphModule) -> None:
    """Rewrite, in place, every operator that made a float out of no float."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and _takes_default_dtype(node):
            _pin(node, node.meta["val"].dtype)
    graph.graph.lint()
    graph.recompile()


def _takes_default_dtype(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return False
    if getattr(node.target, "namespace", "") not in ("aten", "prims") or _argument(node, "dtype"):
        return False
    operands = [operand.meta.get("val") for operand in node.all_input_nodes]
    tensors = [operand for operand in operands if isinstance(operand, torch.Tensor)]
    return len(tensors) == len(operands) and not any(map(_has_dtype_to_give, tensors))


def _has_dtype_to_give(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _argument(node: fx.Node, name: str) -> Any:
    """The value of a named argument, however it was passed; None if it was not."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return None


def _pin(node: fx.Node, dtype: torch.dtype) -> None:
    schema = node.target._schema  # type: ignore[union-attr]
    if any(argument.name == "dtype" for argument in schema.arguments):
        node.update_kwarg("dtype", dtype)
        return
    if node.target is aten.where.Scalar:
        condition, *choices = node.args
        made = [
            _before(node, aten.scalar_tensor.default, choice, dtype=dtype) for choice in choices
        ]
        node.target = aten.where.self
        node.args = (condition, *made)
        return
    choosing = node.target in (aten.where.ScalarSelf, aten.where.ScalarOther)
    for operand in node.all_input_nodes:
        if choosing and operand is node.args[0]:
            continue  # the condition
        node.replace_input_with(operand, _before(node, aten._to_copy.default, operand, dtype=dtype))


def _before(node: fx.Node, target: Callable[..., Any], operand: Any, dtype: torch.dtype) -> fx.Node:
    """``target(operand, dtype)`` in front of ``node``, owned like it."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, (operand,), {"dtype": dtype})
    value = operand.meta["val"] if isinstance(operand, fx.Node) else torch.tensor(operand)
    made.meta = {**node.meta, "val": node.meta["val"].new_empty(value.shape, dtype=dtype)}
    return made
