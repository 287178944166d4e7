"""What every point of a module's dataflow may choose along one axis, and what that costs.

Parameters choose among whole and the layouts that readers want; values that leave a stage also
among those in which they are made. Values from other modules arrive whole or divided in any way: a
part for each rank, gathered there, may be cheaper than a copy for each. Boundaries are R or S.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from torch import fx

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.layout import Layout, R, V
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding import price
from mllm_compile.passes.sharding.dataflow import Dataflow, Edge, Point
from mllm_compile.passes.sharding.exchange import other_ways
from mllm_compile.passes.sharding.policy import FactorClasses
from mllm_compile.passes.sharding.program import Choice
from mllm_compile.passes.sharding.strategies import Gradients, layouts, strategies
from mllm_compile.passes.sharding.values import shape_of

GATHERED_WEIGHT = 10.0
"""Seconds: a value computed from parameters alone is divided once, never gathered."""


@dataclass(frozen=True)
class Setting:
    """What is known before ``axis`` of ``axes`` is decided: the module, the graph, those before.

    ``fixed``: layouts of parameters that are not free any more, by FQN; None for any that is whole.
    ``needed``: what attentions fetch that fetch keys themselves (passes/sharding/needed.py).
    """

    plan: Plan
    graph: Graph
    flow: Dataflow
    classes: FactorClasses
    ties: Mapping[str, Hashable]
    axes: tuple[MeshAxis, ...]
    axis: MeshAxis
    earlier: tuple[tuple[MeshAxis, Mapping[str, Strategy]], ...] = ()
    fixed: Mapping[str, Layout | None] = field(default_factory=dict)
    needed: Mapping[str, float] = field(default_factory=dict)

    @property
    def blocks(self) -> int:
        """Into how many equal parts the tensor axis may divide heads."""
        return next((axis.size for axis in self.axes if axis.name == "tensor"), 1)

    def decided(self, point: str) -> price.Decided:
        """The strategies of a point on the axes decided before."""
        return tuple((axis, taken[point]) for axis, taken in self.earlier)

    def held(self, point: str, output: int) -> float:
        """The part of a result that the axes decided before leave on a rank."""
        taken = self.decided(point)
        return prod(price.share(each.outputs[output], axis) for axis, each in taken)


class Choices:
    """The choices of every point, found from the readers back to the sources."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.readers: dict[str, list[Edge]] = {}
        for edge in setting.flow.edges:
            self.readers.setdefault(edge.source, []).append(edge)
        self.options: dict[str, tuple[Strategy, ...]] = {}

    def all(self) -> dict[str, Choice]:
        """The choices by point."""
        flow = self.setting.flow
        for point in flow.of("result"):
            self.options[point.name] = (Strategy("result", (R,), ()),)
        for point in flow.of("node"):
            self.options[point.name] = self._of_node(point)
        for point in reversed(flow.of("node")):
            if point.node in self.setting.graph.weights:
                self._keep_accepted(point)
        for point in flow.of("leaving", "received", "parameter", "whole"):
            self.options[point.name] = self._of_input(point)
        return {
            name: Choice(own, self._tie(flow.points[name])) for name, own in self.options.items()
        }

    def _tie(self, point: Point) -> Hashable:
        """Points tie if their nodes do, ran alike on the axes decided before, and fetch as much."""
        earlier = tuple(strategy for _, strategy in self.setting.decided(point.name))
        needed = self.setting.needed.get(point.node.name)
        return point.kind, self.setting.ties[point.node.name], earlier, needed

    def conversion(self, point: str, output: int, have: Layout, want: Layout) -> float:
        """Seconds for having a result of a point, made in one layout, in another."""
        edges = [edge for edge in self.readers[point] if edge.output == output]
        gradient = any(edge.gradient for edge in edges)
        node = self.setting.flow.points[point].node
        value = (node, output) if node.name == point else self.setting.flow.points[point].value
        size = price.size_of(value) * self.setting.held(point, output)
        seconds = price.conversion(have, want, size, self.setting.axis, gradient)
        if have.kind in "SP" and node in self.setting.graph.weights:
            seconds += GATHERED_WEIGHT
        return seconds

    def _of_node(self, point: Point) -> tuple[Strategy, ...]:
        """The strategies of a node that the axis allows; where it must divide, only those."""
        setting, node = self.setting, point.node
        factors = setting.classes.refinement.factors.get(node)
        gradients = Gradients.of(node, setting.plan)
        found = strategies(factors, setting.axis, gradients, setting.decided(node.name))
        plain = factors.sizes if factors is not None else {}
        kept = tuple(
            each
            for each in found
            if each.name not in plain or setting.classes.allowed(setting.axis.name, node, each.name)
        )
        other = other_ways(node, factors, setting.axis, found, gradients, setting.blocks)
        if other:  # gathered keys would be kept until the backward, of every layer
            return other
        divided = tuple(each for each in kept if each.name in plain)
        return divided if divided and self._must_split(node) else kept

    def _must_split(self, node: fx.Node) -> bool:
        """Whether a node that an axis can divide may not run whole, however cheap that were."""
        if node in self.setting.graph.weights:
            return False
        plan, axis = self.setting.plan, self.setting.axis.name
        if axis == "expert":
            return node in self.setting.classes.stacks
        differentiated = axis == "context" and node.name in plan.needs_grad
        return differentiated or plan.costs[node.name].total > 0

    def _wanted(self, point: str, output: int = 0) -> list[dict[Layout, None]]:
        """For every reader of a result the layouts that it may want, in order."""
        return [
            dict.fromkeys(each.inputs[edge.input] for each in self.options[edge.reader])
            for edge in self.readers.get(point, ())
            if edge.output == output and edge.reader in self.options
        ]

    def _keep_accepted(self, point: Point) -> None:
        """A form of parameters is divided only as all of its readers take it."""

        def accepted(option: Strategy) -> bool:
            return all(
                layout in (R, V) or all(layout in want for want in self._wanted(point.name, place))
                for place, layout in enumerate(option.outputs)
            )

        self.options[point.name] = tuple(filter(accepted, self.options[point.name]))

    def _of_input(self, point: Point) -> tuple[Strategy, ...]:
        if point.kind == "whole":
            return (_made(R),)
        if point.kind == "parameter":
            return tuple(map(_made, self._of_parameter(point)))
        legal = self._legal(point)
        if point.kind == "received":
            return (_made(R), *(_made(layout) for layout in legal if layout.divided))
        wanted = dict.fromkeys(layout for want in self._wanted(point.name) for layout in want)
        producer, output = point.value
        wanted |= dict.fromkeys(each.outputs[output] for each in self.options[producer.name])
        kept = [R, *(layout for layout in wanted if layout.divided and layout in legal)]
        return tuple(Strategy("leaves", (layout,), (layout,)) for layout in kept)

    def _legal(self, point: Point) -> tuple[Layout, ...]:
        """The layouts in which a stage may hold a value."""
        setting = self.setting
        outer = [(axis, each.outputs[0]) for axis, each in setting.decided(point.name)]
        parts = setting.classes.refinement.parts(point.value)
        trained = point.node.name in setting.plan.needs_grad
        return layouts(parts, setting.axis, trained, outer)

    def _of_parameter(self, point: Point) -> Sequence[Layout]:
        setting = self.setting
        legal = self._legal(point)
        name = setting.graph.input_of[point.node].name
        fixed = setting.fixed.get(name, setting.axis)
        if isinstance(fixed, Layout):
            return [fixed]
        whole = [layout for layout in legal if not layout.divided]
        if fixed is None:  # modules with other axes read it too: all their gradients are summed
            return [layout for layout in whole if layout.kind == "V"] or whole
        if setting.axis.name == "context":
            return whole
        wants = self._wanted(point.name)
        divided = [each for each in legal if each.divided and all(each in want for want in wants)]
        return divided if divided and self._must_divide(point) else [*whole, *divided]

    def _must_divide(self, point: Point) -> bool:
        """Matrices on the tensor axis; stacks of matrices that experts read on theirs."""
        setting = self.setting
        if setting.axis.name == "tensor":
            return sum(size > 1 for size in shape_of(point.value)) > 1
        return self._feeds_stack(point.node)

    def _feeds_stack(self, node: fx.Node) -> bool:
        stacks, weights = self.setting.classes.stacks, self.setting.graph.weights
        return any(
            user in stacks or (user in weights and self._feeds_stack(user)) for user in node.users
        )

    def work(self, point: str, option: Strategy) -> float:
        """Seconds for running a point so."""
        setting, kind = self.setting, self.setting.flow.points[point].kind
        node = setting.flow.points[point].node
        if kind == "node":
            decided = (*setting.decided(point), (setting.axis, option))
            gradient = node.name in setting.plan.needs_grad
            needed = setting.needed.get(node.name, 0.0)
            return price.work(node, setting.plan.costs[node.name], decided, gradient, needed)
        if kind not in ("received", "parameter"):  # readers have no result of their own
            return 0.0
        held = setting.held(point, 0)
        if kind == "received":
            return price.arrival((node, 0), option.outputs[0], setting.axis, held)
        steps = setting.plan.request.microbatches
        return price.state((node, 0), option.outputs[0], setting.axis, held, steps)


def _made(layout: Layout) -> Strategy:
    """An input of a stage in one layout."""
    return Strategy("held", (), (layout,))
