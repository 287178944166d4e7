"""The laws of a sharded plan. A law raises PlanError with what breaks it; its docstring is the law.

Strategies are derived here anew, from the factors of the operators alone.
"""

from collections.abc import Iterator, Sequence

from torch import fx

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.layout import Layout, P, R, S, V
from mllm_compile.compiler.mesh import Mesh, MeshAxis
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.invariants import require_none
from mllm_compile.passes.sharding.exchange import (
    ATTENTION,
    EXCHANGE,
    GROUPS,
    blocks_joined,
    exchanging,
)
from mllm_compile.passes.sharding.factors import Dims, Factors
from mllm_compile.passes.sharding.refine import refined
from mllm_compile.passes.sharding.strategies import Gradients
from mllm_compile.passes.sharding.values import shape_of, source


def modules_are_sharded_along_their_axes(plan: Plan) -> None:
    """Every module of the request is sharded along the axes of its mesh that have several ranks."""
    expected = [Mesh.of(module, 0).axes for module in plan.request.modules]
    found = [sharding.axes for sharding in plan.shardings]
    if expected != found:
        raise PlanError(explain("axes of the modules", expected=str(expected), got=str(found)))


def sharded_nodes_have_strategies(plan: Plan) -> None:
    """Every placed node of a sharded module has one strategy an axis; replicas have none."""
    broken = []
    for module, sharding in enumerate(plan.shardings):
        own = {n for stage in plan.stages if stage.module == module for n in stage.nodes}
        own = own if sharding.axes else set()
        broken += sorted(own ^ sharding.strategies.keys())
        broken += [
            name for name, each in sharding.strategies.items() if len(each) != len(sharding.axes)
        ]
    require_none(broken, "one strategy an axis for every placed node of the module, and no other")


def strategies_follow_rules(plan: Plan) -> None:
    """A strategy divides one factor of its operator, passes partial sums on, or runs whole."""
    factors = refined(plan.captured.main).factors
    require_none(
        (
            f"%{node.name} on {axis.name}: {_described(strategy)}"
            for node, axis, strategy in _strategies(plan)
            if not is_element(node) and not _derived(node, axis, strategy, factors.get(node), plan)
        ),
        "the layouts that the operator's rule gives",
    )


def elements_stand_as_made(plan: Plan) -> None:
    """An element of a tuple has the layout in which the tuple's operator made it."""
    graph = Graph(plan.captured)
    broken = []
    for sharding in plan.shardings:
        for name, own in sharding.strategies.items():
            if is_element(graph.by_name[name]):
                producer, output = source(graph.by_name[name])
                made = [(each.outputs[output],) for each in sharding.strategies[producer.name]]
                if made != [each.inputs for each in own] or made != [each.outputs for each in own]:
                    broken.append(f"%{name}")
    require_none(broken, "the layout of the tuple's element")


def boundaries_are_whole_or_divided(plan: Plan) -> None:
    """What enters or leaves a stage is named, and is R or S; parameters may be V."""
    graph = Graph(plan.captured)
    broken = []
    for module, sharding in enumerate(plan.shardings):
        stages = {stage.index for stage in plan.stages if stage.module == module}
        entering = {v for b in plan.boundaries if b.target in stages for v in b.values}
        leaving = {v for b in plan.boundaries if b.source in stages for v in b.values}
        read = {p for stage in plan.stages if stage.module == module for p in stage.parameters}
        held = {graph.parameters[name].name for name in read}
        if not sharding.axes:
            entering, leaving, held = set(), set(), set()
        broken += sorted((entering | held) ^ sharding.layouts.keys())
        broken += sorted(leaving ^ sharding.sent.keys())
        named = [*sharding.layouts.items(), *((f"{n} (sent)", v) for n, v in sharding.sent.items())]
        for name, layouts in named:
            legal = "RSV" if name in held else "RS"
            if len(layouts) != len(sharding.axes) or any(x.kind not in legal for x in layouts):
                broken.append(f"%{name}: {' '.join(map(str, layouts))}")
    require_none(broken, "one layout an axis, R or S (parameters: or V), for all that crosses")


def stages_of_a_module_agree(plan: Plan) -> None:
    """A value that a stage sends to one of its own module arrives as it was sent."""
    broken = []
    for boundary in plan.boundaries:
        module = plan.stages[boundary.source].module
        if module == plan.stages[boundary.target].module and plan.shardings[module].axes:
            sharding = plan.shardings[module]
            broken += [v for v in boundary.values if sharding.layouts[v] != sharding.sent[v]]
    require_none(broken, "one layout on both sides")


def partial_gradients_are_gradients(plan: Plan) -> None:
    """V, a value whose gradient is a partial sum, stands only where a gradient flows."""
    broken = []
    for node, axis, strategy in _strategies(plan):
        gradients = Gradients.of(node, plan)
        ends = zip(strategy.inputs, gradients.inputs, strict=True)
        if any(layout == V and not flows for layout, flows in ends):
            broken.append(f"an argument of %{node.name} on {axis.name}")
        if V in strategy.outputs and node.name not in plan.needs_grad:
            broken.append(f"%{node.name} on {axis.name}")
    for sharding in plan.shardings:
        for name, layouts in sharding.layouts.items():
            if V in layouts and name not in plan.needs_grad:
                broken.append(f"%{name}")
    require_none(broken, "a gradient")


def sizes_divide(plan: Plan) -> None:
    """A division fits its tensor, and axes divide evenly (context alone: the outermost may not)."""
    graph, factors = Graph(plan.captured), refined(plan.captured.main).factors
    broken = []
    for sharding in plan.shardings:
        for name, own in sharding.strategies.items():
            node = graph.by_name[name]
            sizes = factors[node].sizes if node in factors else {}
            for factor in {each.name for each in own} & sizes.keys():
                pairs = zip(sharding.axes, own, strict=True)
                axes = [axis for axis, each in pairs if each.name == factor]
                if not _even(sizes[factor], axes):
                    broken.append(f"%{name}: {factor} of {sizes[factor]}")
        for name, layouts in (*sharding.layouts.items(), *sharding.sent.items()):
            shape = shape_of(source(graph.by_name[name]))
            if not _fits(shape, layouts, sharding.axes):
                broken.append(f"%{name} {shape}: {' '.join(map(str, layouts))}")
    require_none(broken, "sizes that the axes divide")


def specials_are_divided_once(plan: Plan) -> None:
    """An operator of its own for a divided factor divides it along one axis alone."""
    require_none(
        (
            f"%{name}"
            for sharding in plan.shardings
            for name, own in sharding.strategies.items()
            if sum(bool(each.special) for each in own) > 1
        ),
        "one axis on which the operator is special",
    )


def parameters_are_held_alike(plan: Plan) -> None:
    """Modules that read one parameter hold it in the same layouts, or whole."""
    held: dict[str, dict[int, tuple[Layout, ...]]] = {}
    for (module, name), layouts in plan.parameter_layouts.items():
        held.setdefault(name, {})[module] = layouts
    readers = {
        name: {stage.module for stage in plan.stages if name in stage.parameters} for name in held
    }
    broken = []
    for name, found in held.items():
        axes = {plan.shardings[module].axes for module in readers[name]}
        divided = any(layout.divided for layouts in found.values() for layout in layouts)
        if (len(axes) > 1 and divided) or (len(axes) == 1 and len(set(found.values())) > 1):
            broken.append(name)
    require_none(broken, "equal layouts in all modules that read it")


def _strategies(plan: Plan) -> Iterator[tuple[fx.Node, MeshAxis, Strategy]]:
    nodes = Graph(plan.captured).by_name
    for sharding in plan.shardings:
        for name, own in sharding.strategies.items():
            for axis, strategy in zip(sharding.axes, own, strict=True):
                yield nodes[name], axis, strategy


def _described(strategy: Strategy) -> str:
    ins, outs = (" ".join(map(str, each)) for each in (strategy.inputs, strategy.outputs))
    return f"{strategy.name}: {ins} -> {outs}"


def _derived(
    node: fx.Node, axis: MeshAxis, strategy: Strategy, factors: Factors | None, plan: Plan
) -> bool:
    """Whether the rule gives these layouts."""
    flows = Gradients.of(node, plan)
    inputs, outputs = strategy.inputs, strategy.outputs
    if (len(inputs), len(outputs)) != (len(flows.inputs), len(flows.results)):
        return False
    if strategy.special == EXCHANGE:
        return strategy == exchanging(node, factors, axis, flows)
    if factors is not None and strategy.name in factors.sizes:
        if node.target is ATTENTION and (axis.name, strategy.name) == ("context", GROUPS):
            strategy = blocks_joined(strategy)  # heads of the blocks that a tensor axis leaves
        return _divides(axis, strategy, factors, flows)
    whole = all(layout in (R, V) for layout in (*inputs, *outputs))
    uniform = all(
        layout == V or not flow
        for layout, flow in zip((*inputs, *outputs), (*flows.inputs, *flows.results), strict=True)
    )
    if whole:
        return V not in (*inputs, *outputs) or uniform
    partial = frozenset(place for place, layout in enumerate(inputs) if layout == P)
    others = (place for place in range(len(inputs)) if place not in partial)
    return (
        factors is not None
        and partial in factors.linear
        and set(outputs) == {P}
        and all(inputs[place] == (V if flows.inputs[place] else R) for place in others)
    )


def _divides(axis: MeshAxis, strategy: Strategy, factors: Factors, flows: Gradients) -> bool:
    """Whether one factor is divided in every tensor that has it, and nothing else is."""
    name = strategy.name
    size = factors.sizes[name] if axis.name == "context" else axis.size
    special = name if name in factors.special else ""
    if name in factors.whole or strategy.special != special:
        return False

    def divided(dims: Dims) -> Layout | None:
        place = factors.place(dims, name)
        return None if place is None else S(*place, size)

    results = [divided(dims) for dims in factors.results]
    summed = all(layout is None for layout in results)
    for place, dims in enumerate(factors.inputs):
        absent = V if flows.inputs[place] else R
        added = P if summed and place in factors.additive else absent
        if strategy.inputs[place] != (divided(dims) or added):
            return False
    return list(strategy.outputs) == [layout or P for layout in results]


def _even(length: int, axes: Sequence[MeshAxis]) -> bool:
    """Whether axes, the outer one first, divide a factor of ``length`` elements."""
    lengths = {length}
    for place, axis in enumerate(axes):
        if any(each % axis.size for each in lengths) and (place or axis.name != "context"):
            return False
        lengths = {part for each in lengths for part in axis.split(each).sizes}
    return True


def _fits(shape: Sequence[int], layouts: Sequence[Layout], axes: Sequence[MeshAxis]) -> bool:
    """Whether a tensor can be held so."""
    places: dict[tuple[int, int], list[tuple[MeshAxis, Layout]]] = {}
    for axis, layout in zip(axes, layouts, strict=True):
        if layout.divided:
            places.setdefault((layout.dim, layout.outer), []).append((axis, layout))
    for (dim, outer), pairs in places.items():
        if dim >= len(shape) or any(shape[dim] % (outer * layout.size) for _, layout in pairs):
            return False
        tokens = [layout.size for axis, layout in pairs if axis.name == "context"]
        sizes = [layout.size == axis.size or axis.name == "context" for axis, layout in pairs]
        length = tokens[0] if tokens else shape[dim] // outer
        if not all(sizes) or not _even(length, [axis for axis, _ in pairs]):
            return False
    return True


SHARD = (
    modules_are_sharded_along_their_axes,
    sharded_nodes_have_strategies,
    strategies_follow_rules,
    elements_stand_as_made,
    boundaries_are_whole_or_divided,
    stages_of_a_module_agree,
    partial_gradients_are_gradients,
    sizes_divide,
    specials_are_divided_once,
    parameters_are_held_alike,
)
