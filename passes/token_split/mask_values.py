"""What the masks of a captured program allow in the batch at hand.

Intervals of keys follow from batch entries, buffers and constants alone: the part of the graph that
computes them is run, and nothing else of the model.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.graph import ancestors
from mllm_compile.passes.sharding.exchange import ATTENTION


def sites(captured: Captured) -> list[fx.Node]:
    """Every attention of the program."""
    return list(captured.main.graph.find_nodes(op="call_function", target=ATTENTION))


def key_intervals(
    captured: Captured, values: Mapping[tuple[str, str], Tensor]
) -> dict[str, Tensor]:
    """Intervals [B|1, Q, n, 2] by node, of all nodes that attention takes them from.

    ``values`` of inputs by (kind, name). What depends on others, or on values without data, is
    left out.
    """
    graph = captured.main.graph
    known: dict[fx.Node, Tensor] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), captured.inputs, strict=True):
        value = values.get((item.kind, item.name))
        if value is not None and not value.is_meta:
            known[node] = value
    wanted = {node.args[3] for node in sites(captured) if isinstance(node.args[3], fx.Node)}
    needed = ancestors(wanted)
    results: dict[fx.Node, Any] = dict(known)
    with torch.no_grad():
        for node in graph.nodes:
            if node not in needed or node.op != "call_function":
                continue
            if all(source in results for source in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), results.__getitem__)
                results[node] = node.target(*args, **kwargs)
    return {node.name: results[node] for node in wanted if isinstance(results.get(node), Tensor)}
