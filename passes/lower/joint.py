"""The joint forward and backward graph of a stage, by AOTAutograd.

Its placeholders are the stage's inputs and one tangent for each output that carries gradient; its
results are the outputs and the gradients of the wanted inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses import FakeTensorMode

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.passes.lower.extract import StageGraph
from mllm_compile.passes.lower.tidy import is_view, tidy

aten = torch.ops.aten


@dataclass(frozen=True)
class Joint:
    """Nodes of the joint graph by the live name of what they are."""

    graph: fx.Graph
    inputs: Mapping[str, fx.Node]
    tangents: Mapping[str, fx.Node]
    outputs: Mapping[str, fx.Node]
    gradients: Mapping[str, fx.Node]


def joint_graph(stage: StageGraph) -> Joint:
    """``StageGraph -> Joint``; gradients only of ``trainable`` and ``upstream`` inputs."""
    wanted = {*stage.trainable, *stage.upstream}
    function = _without_aliases(stage)
    specs = _specs(stage)
    with torch.enable_grad(), FakeTensorMode():
        arguments = tuple(
            torch.empty_strided(
                spec.shape, spec.stride, dtype=spec.dtype, device=device
            ).requires_grad_(name in wanted)
            for name, (spec, device) in zip(stage.inputs, specs, strict=True)
        )
        module = aot_export_joint_simple(function, arguments, trace_joint=True)
    graph = fx_graph_cse(module.graph)  # type: ignore[attr-defined]
    tidy(graph)
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    results = next(node for node in reversed(graph.nodes) if node.op == "output").args[0]
    gradients = dict(zip(stage.inputs, results[len(stage.outputs) :], strict=True))
    lost = [name for name in stage.upstream if gradients[name] is None]
    if lost:
        raise PlanError(
            explain(f"gradient of {lost[0]}", expected="a path from the stage's outputs")
        )
    return Joint(
        graph=graph,
        inputs=dict(zip(stage.inputs, nodes, strict=False)),
        tangents=dict(zip(stage.downstream, nodes[len(stage.inputs) :], strict=True)),
        outputs=dict(zip(stage.outputs, results, strict=False)),
        gradients={n: g for n, g in gradients.items() if n in wanted and g is not None},
    )


def _specs(stage: StageGraph) -> list[tuple[TensorSpec, torch.device]]:
    """What the inputs look like at run time; received values are dense."""
    vals = [node.meta["val"] for node in stage.graph.graph.nodes if node.op == "placeholder"]
    return [
        (TensorSpec.dense(val) if name.startswith("%") else TensorSpec.of(val), val.device)
        for name, val in zip(stage.inputs, vals, strict=True)
    ]


def _without_aliases(stage: StageGraph) -> fx.GraphModule:
    """The stage's function with outputs that share no storage, and gradient only where it flows."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in stage.graph.graph.nodes:
        if node.op != "output":
            copied[node] = graph.node_copy(node, copied.__getitem__)
    results = next(n for n in reversed(stage.graph.graph.nodes) if n.op == "output").args[0]
    values: list[fx.Node] = []
    for name, result in zip(stage.outputs, results, strict=True):
        value = copied[result]
        carries = name in stage.downstream
        if not carries:
            value = graph.call_function(aten.detach.default, (value,))
        if not carries or is_view(result) or result.op == "placeholder" or value in values:
            value = graph.call_function(aten.clone.default, (value,))
        values.append(value)
    graph.output(tuple(values))
    return fx.GraphModule({}, graph)
