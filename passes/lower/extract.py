"""Cut one stage out of the captured graph: a plain function from named values to named values.

Placeholders are what the stage reads: parameters, buffers, batch entries, values of earlier stages.
Outputs are what later stages read, the program's own outputs and new buffer values. Replicated
nodes are copied in. Names are those of compiler/program.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from mllm_compile.compiler.captured import Captured, Input
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.stage import Stage


@dataclass(frozen=True)
class StageGraph:
    """One stage as a graph, before differentiation.

    ``trainable`` are the parameters (``p:``) whose gradient the stage computes, ``upstream`` the
    received values (``%``) whose gradient it sends back, ``downstream`` the outputs whose gradient
    it gets: from later stages, or the constant 1 for ``loss``.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    trainable: tuple[str, ...]
    upstream: tuple[str, ...]
    downstream: tuple[str, ...]
    loss: str | None


def input_name(item: Input) -> str:
    """The live name of a main placeholder."""
    prefix = {"parameter": "p:", "buffer": "b:"}.get(item.kind, f"x:{item.kind}:")
    return prefix + item.name


def extract(plan: Plan, stage: Stage) -> StageGraph:
    """``plan, stage -> StageGraph``; a stage without nodes gives a graph without outputs."""
    described = _described_inputs(plan.captured)
    outputs = _outputs(plan, stage)
    own = {*stage.nodes, *stage.replicated}
    graph, inputs = _copy(plan.captured.main.graph, outputs, own, described)
    trainable = {input_name(item) for item in described.values() if item.trainable}
    received = {f"%{v}" for b in plan.boundaries if b.target == stage.index for v in b.gradients}
    sent = {f"%{v}" for b in plan.boundaries if b.source == stage.index for v in b.gradients}
    result = _results(plan.captured)[0]
    loss = f"%{result.name}" if outputs.get(f"%{result.name}") is result else None
    if loss is not None and _stage_of_result(plan, result) != stage.index:
        loss = None
    if loss is not None and result.name in plan.needs_grad:
        sent.add(loss)
    return StageGraph(
        graph=fx.GraphModule({}, graph),
        inputs=inputs,
        outputs=tuple(outputs),
        trainable=tuple(name for name in inputs if name in trainable),
        upstream=tuple(name for name in inputs if name in received),
        downstream=tuple(name for name in outputs if name in sent),
        loss=loss,
    )


def _copy(
    source: fx.Graph, outputs: dict[str, fx.Node], own: set[str], described: dict[fx.Node, Input]
) -> tuple[fx.Graph, tuple[str, ...]]:
    """The stage's own nodes; everything else that they read becomes a placeholder."""
    keep = _needed(outputs.values(), own)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[str] = []
    for node in source.nodes:
        if node not in keep:
            continue
        if node.name in own:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        else:
            copied[node] = graph.placeholder(node.name)
            copied[node].meta = dict(node.meta)
            inputs.append(input_name(described[node]) if node in described else f"%{node.name}")
    graph.output(tuple(copied[node] for node in outputs.values()))
    return graph, tuple(inputs)


def _described_inputs(captured: Captured) -> dict[fx.Node, Input]:
    placeholders = [node for node in captured.main.graph.nodes if node.op == "placeholder"]
    return dict(zip(placeholders, captured.inputs, strict=True))


def _results(captured: Captured) -> list[fx.Node]:
    output = next(node for node in reversed(captured.main.graph.nodes) if node.op == "output")
    return list(output.args[0])


def _outputs(plan: Plan, stage: Stage) -> dict[str, fx.Node]:
    """Name -> node of everything that leaves the stage: sent values in graph order come first."""
    captured = plan.captured
    sent = {value for b in plan.boundaries if b.source == stage.index for value in b.values}
    outputs = {f"%{n.name}": n for n in captured.main.graph.nodes if n.name in sent}
    results = _results(captured)
    for node in results[: captured.num_outputs]:
        if _stage_of_result(plan, node) == stage.index:
            outputs[f"%{node.name}"] = node
    for fqn, node in zip(captured.updates, results[captured.num_outputs :], strict=True):
        if _stage_of_result(plan, node) == stage.index:
            outputs[f"u:{fqn}"] = node
    return outputs


def _stage_of_result(plan: Plan, node: fx.Node) -> int:
    """The stage that owns a program output; an input-only one belongs to its last replica."""
    for stage in plan.stages:
        if node.name in stage.nodes:
            return stage.index
    if node.op == "placeholder":
        return plan.stages[-1].index
    replicas = [stage.index for stage in plan.stages if node.name in stage.replicated]
    if not replicas:
        raise PlanError(explain(f"output {node.name}", expected="a stage that computes it"))
    return replicas[-1]


def _needed(outputs: Iterable[fx.Node], own: set[str]) -> set[fx.Node]:
    """The nodes that the outputs reach inside the stage, and the values that it must be given."""
    keep: set[fx.Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node in keep:
            continue
        keep.add(node)
        if node.name in own:
            pending.extend(node.all_input_nodes)
    return keep
