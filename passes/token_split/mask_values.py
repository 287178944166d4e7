"""What the masks of a captured program allow in the batches at hand.

Intervals of keys follow from batch entries, buffers and constants alone: the part of the graph that
computes them is run, and nothing else of the model.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.graph import ancestors
from mllm_compile.passes.sharding.exchange import ATTENTION

SAMPLES = 16
"""As many masks of one kind as a split is planned by."""


def sites(captured: Captured) -> list[fx.Node]:
    """Every attention of the program."""
    return list(captured.main.graph.find_nodes(op="call_function", target=ATTENTION))


def key_intervals(
    batches: Sequence[tuple[Captured, Mapping[tuple[str, str], Tensor]]],
) -> dict[str, Tensor]:
    """Intervals [samples, Q, n, 2] by node, of all nodes that attention takes them from.

    ``batches``: one program, and values of its inputs by (kind, name). What depends on others, or
    on values without data, is left out, as are samples after the first ``SAMPLES``.
    """
    each = [_intervals(captured, values) for captured, values in batches[:SAMPLES]]
    names = set.intersection(*map(set, each)) if each else set()
    return {name: torch.cat([made[name] for made in each])[:SAMPLES] for name in sorted(names)}


def _intervals(captured: Captured, values: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
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
