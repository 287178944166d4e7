"""Cut a stage's joint graph into forward, input-gradient and weight-gradient segments.

Forward keeps what the outputs need. The input-gradient segment (dI) keeps what the gradients sent
upstream need, the weight-gradient segment (dW) the rest. What a later segment reads of an earlier
one becomes a live value ``s:name``; views of inputs are made again instead of kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from mllm_compile.compiler.program import Segment
from mllm_compile.passes.lower.extract import StageGraph
from mllm_compile.passes.lower.joint import Joint, joint_graph
from mllm_compile.passes.lower.tidy import closure, is_getitem, is_view, tidy


@dataclass(frozen=True)
class Segments:
    """The three segments of a stage; those that would compute nothing are None.

    ``joint`` is the graph that was cut; None where no gradient flows.
    """

    forward: Segment
    input_grad: Segment | None = None
    weight_grad: Segment | None = None
    joint: fx.Graph | None = None


def differentiate(stage: StageGraph) -> Segments:
    """``StageGraph -> Segments``; where no gradient flows the forward alone, as it stands."""
    if not (stage.trainable or stage.upstream) or not stage.downstream:
        graph = fx.Graph()
        graph.output(graph.graph_copy(stage.graph.graph, {}))
        tidy(graph)
        return Segments(_segment(graph, stage.inputs, stage.outputs))
    joint = joint_graph(stage)
    upstream = {f"d{n}": node for n, node in joint.gradients.items() if n.startswith("%")}
    weights = {f"g:{n[2:]}": node for n, node in joint.gradients.items() if n.startswith("p:")}
    forward = _with_parts(joint.graph, closure(joint.outputs.values()))
    input_grad = _with_parts(joint.graph, closure(upstream.values()) - forward)
    weight_grad = closure(weights.values()) - forward - input_grad
    cutter = _Cutter(joint, stage.loss)
    results = {*upstream.values(), *weights.values()}
    saved = cutter.name_reads(forward, input_grad | weight_grad, results)
    passed = cutter.name_reads(input_grad, weight_grad, set(weights.values()))
    return Segments(
        cutter.build(forward, {**joint.outputs, **saved}),
        cutter.build(input_grad, {**upstream, **passed}) if upstream else None,
        cutter.build(weight_grad, weights) if weights else None,
        joint.graph,
    )


def _with_parts(graph: fx.Graph, nodes: set[fx.Node]) -> set[fx.Node]:
    """``nodes``, and every result of those that have several: tuples stay within a segment."""
    return nodes | {n for n in graph.nodes if is_getitem(n) and n.args[0] in nodes}


class _Cutter:
    """Names the values that cross between segments, and makes the segments' graphs."""

    def __init__(self, joint: Joint, loss: str | None) -> None:
        self.graph = joint.graph
        self.constant = {node for name, node in joint.tangents.items() if name == loss}
        self.names = {node: name for name, node in joint.inputs.items()}
        self.names |= {node: f"d{name}" for name, node in joint.tangents.items()}
        for name, node in joint.outputs.items():
            self.names.setdefault(node, name)

    def name_reads(
        self, earlier: set[fx.Node], later: set[fx.Node], results: set[fx.Node]
    ) -> dict[str, fx.Node]:
        """Values of ``earlier`` that ``later`` computes with, or that are themselves results."""
        pending = [argument for node in later for argument in node.all_input_nodes]
        pending.extend(results)
        found: set[fx.Node] = set()
        while pending:
            node = pending.pop()
            if node not in earlier or node in found or node.op == "placeholder":
                continue
            if self._remade(node):
                pending.extend(node.all_input_nodes)
            else:
                found.add(node)
        kept = [node for node in self.graph.nodes if node in found]
        for node in kept:
            self.names.setdefault(node, f"s:{node.name}")
        return {self.names[node]: node for node in kept}

    def build(self, nodes: set[fx.Node], outputs: Mapping[str, fx.Node]) -> Segment:
        """One segment: ``nodes`` are computed, everything else that they read is an input."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        inputs: list[str] = []
        inside = self._with_inputs(nodes, set(outputs.values()))
        for node in self.graph.nodes:
            if node not in inside:
                continue
            if node in self.constant:
                copied[node] = _one(graph, node)
            elif node.op == "placeholder" or not (node in nodes or self._remade(node)):
                copied[node] = graph.placeholder(node.name)
                copied[node].meta = dict(node.meta)
                inputs.append(self.names[node])
            else:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output(tuple(copied[node] for node in outputs.values()))
        return _segment(graph, tuple(inputs), tuple(outputs))

    def _remade(self, node: fx.Node) -> bool:
        """Views of inputs cost nothing and would only keep a second name alive."""
        return is_view(node) and all(
            source.op == "placeholder" or self._remade(source) for source in node.all_input_nodes
        )

    def _with_inputs(self, nodes: set[fx.Node], results: set[fx.Node]) -> set[fx.Node]:
        inside = set(nodes)
        pending = [argument for node in nodes for argument in node.all_input_nodes]
        pending.extend(results)
        while pending:
            node = pending.pop()
            if node not in inside:
                inside.add(node)
                if self._remade(node):
                    pending.extend(node.all_input_nodes)
        return inside


def _one(graph: fx.Graph, tangent: fx.Node) -> fx.Node:
    """The gradient of the loss by itself; it keeps its name."""
    val = tangent.meta["val"]
    options = {"dtype": val.dtype, "device": val.device}
    full = torch.ops.aten.full.default
    made = graph.create_node("call_function", full, (list(val.shape), 1.0), options, tangent.name)
    made.meta = {"val": val}
    return made


def _segment(graph: fx.Graph, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Segment:
    graph.lint()
    return Segment(fx.GraphModule({}, graph), inputs, outputs)
