"""The functional graph cut in two: the prologue, of inputs alone, and the main graph.

The prologue computes guards, hoisted results, the intervals of masks and denominators; what main
needs of these becomes an input of main. Both graphs keep only what their results depend on.
"""

import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

from mllm_compile.compiler.captured import Input
from mllm_compile.passes.capture.functionalize import Functional
from mllm_compile.passes.capture.provenance import LABELS

ALWAYS = ("parameter", "buffer", "batch")


@dataclass(frozen=True)
class Halves:
    """Both graphs, with what their placeholders stand for and the names of prologue results."""

    main: fx.GraphModule
    prologue: fx.GraphModule
    inputs: tuple[Input, ...]
    prologue_inputs: tuple[Input, ...]
    guard_nodes: tuple[str, ...]
    guard_inputs: tuple[tuple[str, ...], ...]
    results: tuple[str, ...]


def split(
    found: Functional,
    outputs: Sequence[fx.Node],
    guards: Sequence[fx.Node],
    denominators: Sequence[fx.Node],
) -> Halves:
    """Main returns ``outputs``; the prologue returns guards, then all that it hands to main."""
    whole, placeholders = found.graph, found.placeholders
    live = ancestors(outputs, stop=denominators)
    intervals = [node for node in live if _are_intervals(node, placeholders)]
    live = ancestors(outputs, stop=[*denominators, *intervals])
    hoisted = [node for node in live if _is_hoisted_result(node)]
    results = {
        **_named("hoisted", hoisted, whole.graph),
        **_named("intervals", intervals, whole.graph),
        **{node: Input("denominator", f"denominator_{i}") for i, node in enumerate(denominators)},
    }
    early = [*guards, *results]
    prologue, prologue_inputs, copies = _subgraph(found, early, {}, always=())
    assert not any(item.kind == "parameter" for item in prologue_inputs)
    main, inputs, _ = _subgraph(found, outputs, results, always=ALWAYS)
    return Halves(
        main,
        prologue,
        inputs,
        prologue_inputs,
        tuple(copies[node].name for node in guards),
        tuple(
            tuple(
                dict.fromkeys(
                    placeholders[node].name for node in ancestors([guard]) if node in placeholders
                )
            )
            for guard in guards
        ),
        tuple(item.name for item in results.values()),
    )


def _named(name: str, nodes: Collection[fx.Node], graph: fx.Graph) -> dict[fx.Node, Input]:
    """Hoisted inputs of main in the place of nodes, numbered in the order of the graph."""
    ordered = (node for node in graph.nodes if node in nodes)
    return {node: Input("hoisted", f"{name}_{i}") for i, node in enumerate(ordered)}


def ancestors(targets: Iterable[fx.Node], stop: Iterable[fx.Node] = ()) -> dict[fx.Node, None]:
    """All nodes that ``targets`` are computed from, themselves included, not through ``stop``."""
    seen: dict[fx.Node, None] = {}
    border, pending = set(stop), list(targets)
    while pending:
        node = pending.pop()
        if node not in seen:
            seen[node] = None
            if node not in border:
                pending.extend(node.all_input_nodes)
    return seen


def _is_hoisted_result(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is torch.ops.mllm.hoisted.default


def _are_intervals(node: fx.Node, placeholders: Mapping[fx.Node, Input]) -> bool:
    """Whether they follow from inputs alone; then the host knows them before a device does."""
    return node.target is torch.ops.mllm.mask_intervals.default and all(
        placeholders[each].kind != "parameter" for each in ancestors([node]) if each in placeholders
    )


def _subgraph(
    found: Functional,
    targets: Sequence[fx.Node],
    given: Mapping[fx.Node, Input],
    always: tuple[str, ...],
) -> tuple[fx.GraphModule, tuple[Input, ...], dict[fx.Node, fx.Node]]:
    """Copy what ``targets`` need; nodes of ``given`` become placeholders behind the others."""
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Input]()
    needed = ancestors(targets, stop=given)
    for node, item in found.placeholders.items():
        if node in needed or item.kind in always:
            copies[node] = _placeholder(graph, item, node)
            inputs.append(item)
    for node, item in given.items():
        if node in needed:
            copies[node] = _placeholder(graph, item, node)
            inputs.append(item)
    for node in found.graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
            copies[node].meta = _labels(node)
    graph.output(tuple(copies[node] for node in targets))
    return _LazyGraphModule(found.graph, graph), tuple(inputs), copies


def _placeholder(graph: fx.Graph, item: Input, source: fx.Node) -> fx.Node:
    name = re.sub(r"\W", "_", f"{item.kind}_{item.name}" if item.kind in ALWAYS else item.name)
    node = graph.placeholder(name)
    node.meta = _labels(source)
    return node


def _labels(node: fx.Node) -> dict[str, object]:
    return {name: node.meta[name] for name in ("val", *LABELS) if name in node.meta}
