"""Decide in which order one module's nodes stand, and between which of them it may be cut.

A *unit* is what stays together: a node with the elements taken from its tuple, the weight nodes it
reads first, and the glue that sinks to it. Units keep the order of the graph, but that a module
which is called twice, side by side, does both calls part by part. Sites whose stage is given pin
their units; every unit then has a lowest and a highest stage, which grow along the dataflow, so
that ordering by them first keeps the order topological and makes the pins monotone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph, is_element, size_bytes
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.modules import bound_modules

Floats = npt.NDArray[np.float64]


class Unit(NamedTuple):
    """Nodes that stay together, and the stages of the module (from 0) that may run them."""

    nodes: tuple[fx.Node, ...]
    lowest: int
    highest: int


@dataclass(frozen=True)
class Chain:
    """The units of one module in order, to be cut into ``stages`` consecutive parts.

    ``work[i]`` are the FLOPs of unit i: F, dI, dW. ``crossing[p]`` are the bytes that cross a cut
    before unit p, forward and backward. Cut c must lie in ``windows[c]``, ends included.
    """

    name: str
    units: tuple[Unit, ...]
    stages: int
    work: Floats = field(repr=False)
    crossing: Floats = field(repr=False)
    pinned: bool

    @property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """Where every cut may lie: all that must be before it is, nothing that must not."""
        windows = []
        for cut in range(self.stages - 1):
            before = [place for place, unit in enumerate(self.units) if unit.highest <= cut]
            after = [place for place, unit in enumerate(self.units) if unit.lowest > cut]
            low = before[-1] + 1 if before else 0
            windows.append((low, after[0] if after else len(self.units)))
        return tuple(windows)


def chain(
    graph: Graph,
    plan: Plan,
    module: int,
    pins: Mapping[fx.Node, int],
    wishes: Mapping[fx.Node, int],
) -> Chain:
    """Order the nodes of one module.

    ``pins`` gives the stage (from 0) of nodes that read sites, ``wishes`` that of others, which
    they get as far as the pins allow.
    """
    own = [node for node in graph.placed if plan.module_of[node.name] == module]
    spec = plan.request.modules[module]
    order = _Order(graph, plan, own, pins, spec.parallel.pipeline, spec.name)
    order.follow(wishes)
    units = order.units()
    return Chain(
        name=spec.name,
        units=units,
        stages=spec.parallel.pipeline,
        work=np.array([_work(plan, unit) for unit in units], float).reshape(-1, 3),
        crossing=_crossing(graph, plan, units),
        pinned=any(node in pins for node in own),
    )


class _Order:
    """Groups of nodes (by leader), their place, and the stages that may run them."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        own: list[fx.Node],
        pins: Mapping[fx.Node, int],
        stages: int,
        name: str,
    ) -> None:
        self.graph, self.name = graph, name
        inside = set(own)
        joined = _with_bias(graph, own)
        self.leader: dict[fx.Node, fx.Node] = {}
        self.members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in own:
            reader = graph.reader[node]
            self.leader[node] = joined.get(reader, reader) if reader in inside else node
        for node in own:
            if is_element(node):
                self.leader[node] = self.leader[node.all_input_nodes[0]]
            self.members[self.leader[node]].append(node)
        self.pins = {self.leader[node]: pins[node] for node in own if node in pins}
        self.leaders = sorted(self.members, key=graph.index.__getitem__)
        self.sinking = self._sinking(bound_modules(graph, plan.request))
        self.place = self._places()
        self.lowest, self.highest = self._bounds(stages)

    def units(self) -> tuple[Unit, ...]:
        """Groups in order; those that must stay together become one unit."""

        def bounds(node: fx.Node) -> tuple[int, int, tuple[int, int]]:
            return self.lowest[node], self.highest[node], self.place[node]

        ordered = sorted(self.leaders, key=lambda node: (*bounds(node), self.graph.index[node]))
        return tuple(
            Unit(tuple(member for node in group for member in self.members[node]), lowest, highest)
            for (lowest, highest, _), group in groupby(ordered, bounds)
        )

    def _readers(self, leader: fx.Node) -> set[fx.Node]:
        return self._around(leader, (u for n in self.members[leader] for u in n.users))

    def _sources(self, leader: fx.Node) -> set[fx.Node]:
        return self._around(leader, (s for n in self.members[leader] for s in n.all_input_nodes))

    def _around(self, leader: fx.Node, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        return {self.leader[node] for node in nodes if node in self.leader} - {leader}

    def _sinking(self, bound: Mapping[fx.Node, int | None]) -> set[fx.Node]:
        """Glue and weight nodes that lead to a bound node.

        What leads to outputs alone has nowhere to sink: it may be cut like any other nodes.
        """
        leads: set[fx.Node] = set()
        for node in reversed(self.leaders):
            if bound[node] is not None or self._readers(node) & leads:
                leads.add(node)
        return {node for node in leads if bound[node] is None}

    def _places(self) -> dict[fx.Node, tuple[int, int]]:
        """(turn, own place in the graph); what sinks takes the place of its first reader.

        A node's turn comes after its inputs, at the first read of the parameters that it reads: a
        module that is called twice, side by side, so does each part of both calls in one place.
        """
        index = self.graph.index
        turns: dict[fx.Node, int] = {}
        first: dict[str, int] = {}
        for node in self.leaders:
            read = [p for member in self.members[node] for p in self.graph.parameters_read(member)]
            for parameter in read:
                first.setdefault(parameter, index[node])
            before = [turns[source] for source in self._sources(node)]
            reads = [first[parameter] for parameter in read]
            turns[node] = max([*before, *reads], default=index[node])
        place: dict[fx.Node, tuple[int, int]] = {}
        for node in reversed(self.leaders):
            readers = self._readers(node) if node in self.sinking else ()
            own = turns[node], index[node]
            place[node] = min((place[reader] for reader in readers), default=own)
        return place

    def _bounds(self, stages: int) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
        lowest: dict[fx.Node, int] = {}
        highest: dict[fx.Node, int] = {}
        for node in self.leaders:
            sources = [lowest[source] for source in self._sources(node)]
            lowest[node] = max(sources, default=0)
            if node in self.pins:
                self._check(node, lowest[node], self.pins[node])
                lowest[node] = self.pins[node]
        for node in reversed(self.leaders):
            readers = self._readers(node)
            if readers and node in self.sinking and node not in self.pins:
                lowest[node] = max(lowest[node], min(lowest[reader] for reader in readers))
            limit = min((highest[reader] for reader in readers), default=stages - 1)
            highest[node] = self.pins.get(node, limit)
        return lowest, highest

    def follow(self, wishes: Mapping[fx.Node, int]) -> None:
        """Narrow the bounds to what is wished, within those that pins leave."""
        for node in self.leaders:
            lowest = max(self.lowest[n] for n in (node, *self._sources(node)))
            wish = min(wishes.get(node, lowest), self.highest[node])
            self.lowest[node] = max(lowest, wish)
        for node in reversed(self.leaders):
            highest = min(self.highest[n] for n in (node, *self._readers(node)))
            wish = max(wishes.get(node, highest), self.lowest[node])
            self.highest[node] = min(highest, wish)

    def _check(self, node: fx.Node, lowest: int, pin: int) -> None:
        if lowest > pin:
            raise RequestError(
                explain(
                    f"{self.name}: %{node.name} ({node.meta.get('owner', '')})",
                    expected=f"inputs from its own stage {pin} of the module, or earlier ones",
                    got=f"some from stage {lowest}",
                    remedy="another program of the same model fixed these stages; "
                    "plan this program first, or give the module pipeline = 1",
                )
            )


def _with_bias(graph: Graph, own: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For every product to which its module adds a bias, and the views between: the addition.

    Whether torch takes one operator for both depends on shapes, which other programs do not share.
    """
    reading = set(graph.sites.values())
    found: dict[fx.Node, fx.Node] = {}
    for node in own:
        if node.target is torch.ops.aten.add.Tensor and any(graph.parameters_read(node)):
            found |= dict.fromkeys(_product(graph, node, reading), node)
    return found


def _product(graph: Graph, addition: fx.Node, reading: Collection[fx.Node]) -> list[fx.Node]:
    found: list[fx.Node] = []
    while not found or found[-1] not in reading:
        node = found[-1] if found else addition
        sources = [source for source in node.all_input_nodes if source not in graph.weights]
        if len(sources) != 1 or sources[0].meta.get("owner") != addition.meta.get("owner"):
            return []
        found += sources
    return found


def _work(plan: Plan, unit: Unit) -> tuple[int, int, int]:
    costs = [plan.costs[node.name] for node in unit.nodes]
    return (
        sum(cost.forward for cost in costs),
        sum(cost.input_grad for cost in costs),
        sum(cost.weight_grad for cost in costs),
    )


def _crossing(graph: Graph, plan: Plan, units: tuple[Unit, ...]) -> Floats:
    """Bytes over a cut before every unit: of values read on both sides of where they are made.

    A value of another module counts between its first and its last reader: a cut there makes it
    cross twice. So does a parameter, which would stand on both sides. One byte per value lets one
    value win over several of the same size.
    """
    place = {node: index for index, unit in enumerate(units) for node in unit.nodes}
    change = np.zeros(len(units) + 1)
    placed = set(graph.placed)
    for node in dict.fromkeys(source for reader in place for source in reader.all_input_nodes):
        parameter = node in graph.input_of and graph.input_of[node].kind == "parameter"
        readers = [place[user] for user in node.users if user in place]
        is_tuple = any(is_element(user) for user in node.users)
        if readers and not is_tuple and (node in placed or parameter):
            backward = any((node.name, user.name) in plan.grad_edges for user in node.users)
            size = size_bytes(node) * (2 if backward else 1) + 1
            change[place.get(node, min(readers))] += size
            change[max(readers)] -= size
    return np.concatenate([[0.0], np.cumsum(change)[:-1]])
