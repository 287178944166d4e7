"""Small rewrites that change no value, and the questions about nodes that lowering asks."""

from collections.abc import Iterable

import torch
from torch import fx

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Whether the node's result may share storage with an argument (a placeholder is its own)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def is_getitem(node: fx.Node) -> bool:
    """Whether the node takes one result of an operator that has several."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def closure(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and everything upstream of them."""
    found: set[fx.Node] = set()
    pending = list(roots)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def tidy(graph: fx.Graph) -> None:
    """Rewrite in place: under no_grad ``detach(x)`` is ``x``, and ``t(t(x))`` is ``x`` anywhere.

    So is a conversion between R and V, which differ in their gradients alone.

    A view becomes a reshape: some operators lay their results out otherwise than their fakes said,
    and where both are possible they are the same.
    """
    for node in list(graph.nodes):
        if node.target is aten.view.default:
            node.target = aten.reshape.default
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.t.default and node.args[0].target is aten.t.default:
            node.replace_all_uses_with(node.args[0].args[0])
        elif _is_copy(node) and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _is_copy(node: fx.Node) -> bool:
    """Whether the node converts between layouts in which a value is the same."""
    return str(node.target) == "mllm.convert.default" and {*node.args[1:3]} <= {"R", "V"}
