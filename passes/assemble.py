"""Stages and boundaries that follow once every placed node has a stage.

A free node is computed in every stage that reads it (outputs: in the stage of the loss); all other
values that a later stage reads cross one boundary straight to it, however many stages lie between.
A gradient comes back over a boundary iff one of the target's own nodes returns one.
"""

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.stage import Boundary, Stage


def first_stages(request: Request) -> tuple[int, ...]:
    """Index of the first stage of every module, and the number of all stages at the end."""
    firsts = [0]
    for module in request.modules:
        firsts.append(firsts[-1] + module.parallel.pipeline)
    return tuple(firsts)


def stages_of(graph: Graph, plan: Plan, stage_of: Mapping[fx.Node, int]) -> tuple[Stage, ...]:
    """The stages of the request, in order, with their nodes and parameters."""
    nodes: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.placed:
        nodes[stage_of[node]].append(node)
    readers = replicas(graph, plan, stage_of)
    firsts = first_stages(plan.request)
    stages = []
    for module, spec in enumerate(plan.request.modules):
        for position in range(spec.parallel.pipeline):
            index = firsts[module] + position
            read = {name for node in nodes[index] for name in graph.parameters_read(node)}
            stages.append(
                Stage(
                    index=index,
                    module=module,
                    position=position,
                    ranks=Mesh.of(spec, position).ranks,
                    nodes=tuple(node.name for node in nodes[index]),
                    replicated=tuple(n.name for n in graph.nodes if index in readers.get(n, ())),
                    parameters=tuple(name for name in graph.parameters if name in read),
                )
            )
    return tuple(stages)


def replicas(
    graph: Graph, plan: Plan, stage_of: Mapping[fx.Node, int]
) -> dict[fx.Node, frozenset[int]]:
    """The stages that compute each free node."""
    last = first_stages(plan.request)[-1] - 1
    loss_stage = stage_of.get(graph.loss, last) if graph.loss is not None else last
    results = {node for node in graph.outputs if node is not None}
    found: dict[fx.Node, frozenset[int]] = {}
    for node in reversed(graph.nodes):
        if node in graph.free:
            own = {stage_of[user] for user in node.users if user in stage_of}
            own |= {stage for user in node.users for stage in found.get(user, ())}
            found[node] = frozenset(own | ({loss_stage} if node in results else set()))
    return found


def boundaries_of(
    graph: Graph, plan: Plan, stage_of: Mapping[fx.Node, int]
) -> tuple[Boundary, ...]:
    """One boundary for every pair of stages between which a value crosses."""
    crossing: dict[tuple[int, int], dict[str, bool]] = defaultdict(dict)
    for node in graph.placed:
        for user in node.users:
            if stage_of.get(user, stage_of[node]) != stage_of[node]:
                values = crossing[stage_of[node], stage_of[user]]
                gradient = (node.name, user.name) in plan.grad_edges
                values[node.name] = values.get(node.name, False) or gradient
    return tuple(
        Boundary(source, target, tuple(values), tuple(name for name in values if values[name]))
        for (source, target), values in sorted(crossing.items())
    )
