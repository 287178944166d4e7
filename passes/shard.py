"""Decide how every module runs on the axes of its mesh: a layout for every value it touches.

Axes are decided one after the other, the outer one first, each by one integer program over the
module's dataflow (passes/sharding/program.py) that knows what the axes before it took. Expert and
context have little freedom (passes/sharding/policy.py): tensor divides what they left. Data lanes
are no layout: a lane is a program of its own.

Source: strategies with conversion costs as an integer program are those of Alpa (arXiv 2201.12023),
here on the four layouts of compiler/layout.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.mesh import Mesh, MeshAxis
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Layouts, Sharding, Strategy
from mllm_compile.passes.sharding.choices import Choices, Setting
from mllm_compile.passes.sharding.dataflow import Dataflow, dataflow
from mllm_compile.passes.sharding.needed import needed_shares
from mllm_compile.passes.sharding.notes import notes
from mllm_compile.passes.sharding.policy import factor_classes
from mllm_compile.passes.sharding.program import solve
from mllm_compile.passes.sharding.refine import refined
from mllm_compile.passes.sharding.ties import ties
from mllm_compile.passes.sharding.values import source

Taken = Mapping[str, Strategy]
"""The strategy of every point of a dataflow on one axis."""


def shard(plan: Plan) -> Plan:
    """Plan with stages -> plan with ``shardings``, one per module of the request.

    Parameters keep the layouts that other programs of the same model gave them.
    """
    axes = axes_of(plan)
    if not any(axes):
        return replace(plan, shardings=tuple(Sharding() for _ in axes))
    graph = Graph(plan.captured)
    classes = factor_classes(plan, graph, refined(plan.captured.main))
    same = ties(graph)
    for module, own in enumerate(axes):
        flow = dataflow(plan, graph, module)
        setting = None
        if own:
            needed = _needed(plan, flow, own)
            setting = Setting(plan, graph, flow, classes, same, own, own[0], needed=needed)
        taken = _decide(setting, own, fixed_parameters(plan, axes, module)) if setting else []
        sharding = _sharding(flow, own, taken)
        if setting is not None:
            own_notes = (*plan.split_notes.get(module, ()), *notes(setting, sharding))
            sharding = replace(sharding, notes=own_notes)
        plan = replace(plan, shardings=(*plan.shardings, sharding))
    return plan


def axes_of(plan: Plan) -> list[tuple[MeshAxis, ...]]:
    """The axes of every module over which its values may be divided."""
    return [Mesh.of(module, 0).axes for module in plan.request.modules]


def fixed_parameters(
    plan: Plan, axes: list[tuple[MeshAxis, ...]], module: int
) -> dict[str, Layouts | None]:
    """Parameters of a module that are not free, by FQN, with their layouts; None: whole.

    All modules that read a parameter hold it alike; where their axes differ, whole.
    """
    readers: dict[str, dict[int, None]] = {}
    for (_, name, _), stage in plan.placement.items():
        readers.setdefault(name, {})[plan.stages[stage].module] = None
    given = {**plan.given_layouts, **plan.parameter_layouts}
    fixed: dict[str, Layouts | None] = {}
    for name, modules in readers.items():
        known = [other for other in (module, *modules) if (other, name) in given]
        if any(axes[other] != axes[module] for other in modules):
            fixed[name] = given.get((module, name))
        elif known:
            fixed[name] = given[known[0], name]
    return fixed


def _needed(plan: Plan, flow: Dataflow, axes: tuple[MeshAxis, ...]) -> dict[str, float]:
    """What attentions of a module fetch along its context axis, if it has one."""
    axis = next((axis for axis in axes if axis.name == "context"), None)
    if axis is None:
        return {}
    return needed_shares((point.node for point in flow.of("node")), axis, plan.intervals)


def _decide(
    setting: Setting, axes: tuple[MeshAxis, ...], fixed: Mapping[str, Layouts | None]
) -> list[Taken]:
    """The strategies of all points on every axis."""
    taken: list[Taken] = []
    for place, axis in enumerate(axes):
        own: dict[str, Layout | None] = {
            name: None if layouts is None else layouts[place] for name, layouts in fixed.items()
        }
        earlier = tuple(zip(axes, taken, strict=False))
        choices = Choices(replace(setting, axis=axis, earlier=earlier, fixed=own))
        taken.append(solve(choices.all(), setting.flow.edges, choices))
    return taken


def _sharding(flow: Dataflow, axes: tuple[MeshAxis, ...], taken: list[Taken]) -> Sharding:
    """What was taken, by what it is about."""
    strategies: dict[str, tuple[Strategy, ...]] = {}
    layouts: dict[str, Layouts] = {}
    sent: dict[str, Layouts] = {}
    for point in flow.points.values() if axes else ():
        own = tuple(each[point.name] for each in taken)
        if point.kind == "node":
            strategies[point.name] = own
        elif point.kind in ("parameter", "received"):
            layouts[point.name] = tuple(each.outputs[0] for each in own)
        elif point.kind == "leaving":
            sent[point.node.name] = tuple(each.outputs[0] for each in own)
    for element in flow.elements if axes else ():
        producer, output = source(element)
        strategies[element.name] = tuple(
            _element(each, output) for each in strategies[producer.name]
        )
    layouts |= {
        edge.source[1:]: sent[edge.source[1:]]
        for edge in flow.edges
        if axes and edge.source.startswith(">")
    }
    return Sharding(axes, strategies, layouts, sent)


def _element(producer: Strategy, output: int) -> Strategy:
    """An element of a tuple, taken as it was made."""
    layout = producer.outputs[output]
    return Strategy(producer.name, (layout,), (layout,))
