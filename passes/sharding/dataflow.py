"""Who reads what in the stages of one module: the edges along which layouts have to meet.

Points of the dataflow, by name:

* a placed node of the module, but for those that take an element out of a tuple: these are seen
  through, their readers read the tuple's producer;
* an input of a stage, by the name of its node: a parameter, a value received from another module,
  or (whole, on every rank) a buffer, a batch entry or a replicated node;
* ``>name``: a value that leaves its stage; later stages of the same module read it from there;
* ``=k``: output number k of the program.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import fx

from mllm_compile.compiler.derivative import edges_of
from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.layout import R
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Layouts, Sharding
from mllm_compile.passes.sharding.values import Value, source

Kind = Literal["node", "parameter", "received", "whole", "leaving", "result"]


@dataclass(frozen=True, slots=True)
class Point:
    """A place of the dataflow, and the value that it makes or hands on."""

    kind: Kind
    name: str
    node: fx.Node

    @property
    def value(self) -> Value:
        """The value of every point but a node, which may make several."""
        return source(self.node)


@dataclass(frozen=True, slots=True)
class Edge:
    """Point ``reader`` takes result ``output`` of point ``source`` as its tensor ``input``.

    ``gradient`` tells whether one comes back.
    """

    source: str
    output: int
    reader: str
    input: int
    gradient: bool


@dataclass(frozen=True)
class Dataflow:
    """The points of one module by name, in graph order, and all edges between them.

    ``elements`` are the module's nodes that take an element out of a tuple.
    """

    points: Mapping[str, Point]
    edges: tuple[Edge, ...]
    elements: tuple[fx.Node, ...]

    def of(self, *kinds: Kind) -> tuple[Point, ...]:
        """The points of some kinds."""
        return tuple(point for point in self.points.values() if point.kind in kinds)


def produced(sharding: Sharding, edge: Edge) -> Layouts:
    """The layouts in which the source of an edge holds the value."""
    if edge.source in sharding.strategies:
        return tuple(each.outputs[edge.output] for each in sharding.strategies[edge.source])
    if edge.source.startswith(">"):
        return sharding.sent[edge.source[1:]]
    return sharding.layouts.get(edge.source, sharding.whole)


def wanted(sharding: Sharding, edge: Edge) -> Layouts:
    """The layouts in which the reader of an edge takes the value."""
    if edge.reader in sharding.strategies:
        return tuple(each.inputs[edge.input] for each in sharding.strategies[edge.reader])
    if edge.reader.startswith(">"):
        return sharding.sent[edge.reader[1:]]
    return (R,) * len(sharding.axes)


def dataflow(plan: Plan, graph: Graph, module: int) -> Dataflow:
    """The dataflow of a module of a partitioned plan."""
    return _Module(plan, graph, module).dataflow()


class _Module:
    def __init__(self, plan: Plan, graph: Graph, module: int) -> None:
        self.plan, self.graph = plan, graph
        self.stage_of = {name: stage.index for stage in plan.stages for name in stage.nodes}
        self.own = {stage.index for stage in plan.stages if stage.module == module}
        self.points: dict[str, Point] = {}
        self.edges: list[Edge] = []
        self.elements: list[fx.Node] = []

    def dataflow(self) -> Dataflow:
        leaving = {v for b in self.plan.boundaries if b.source in self.own for v in b.values}
        for node in self.graph.placed:
            if self.stage_of[node.name] not in self.own:
                continue
            if is_element(node):
                self.elements.append(node)
            else:
                for place, argument in enumerate(edges_of(node)):
                    gradient = (argument.name, node.name) in self.plan.grad_edges
                    self.read(argument, node, node.name, place, gradient)
                self.add("node", node.name, node)
            if node.name in leaving:
                self.end("leaving", f">{node.name}", node)
        for place, result in enumerate(self.graph.outputs):
            if result is not None and self.stage_of.get(result.name) in self.own:
                self.end("result", f"={place}", result)
        return Dataflow(self.points, tuple(self.edges), tuple(self.elements))

    def end(self, kind: Kind, name: str, node: fx.Node) -> None:
        """A point that reads a value in the stage that makes it."""
        self.read(node, node, name, 0, node.name in self.plan.needs_grad)
        self.add(kind, name, node)

    def add(self, kind: Kind, name: str, node: fx.Node) -> str:
        self.points.setdefault(name, Point(kind, name, node))
        return name

    def read(
        self, argument: fx.Node, node: fx.Node, reader: str, place: int, gradient: bool
    ) -> None:
        """``node``, which makes or is ``reader``, reads an argument."""
        point, output = self.source(argument, self.stage_of[node.name])
        self.edges.append(Edge(point, output, reader, place, gradient))

    def source(self, argument: fx.Node, stage: int) -> tuple[str, int]:
        """The point and the result from which a node in ``stage`` takes an argument."""
        if argument in self.graph.input_of:
            parameter = self.graph.input_of[argument].kind == "parameter"
            return self.add("parameter" if parameter else "whole", argument.name, argument), 0
        home = self.stage_of.get(argument.name)
        if home is None:
            return self.add("whole", argument.name, argument), 0
        if home == stage:
            producer, output = source(argument)
            return producer.name, output
        if home in self.own:
            return f">{argument.name}", 0
        return self.add("received", argument.name, argument), 0
