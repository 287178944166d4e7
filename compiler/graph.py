"""Read-only queries over the main graph of a captured program.

Terms. A *batch value* differs from microbatch to microbatch. A *free* node has no parameter
upstream, draws no random numbers and reads no buffer that the program updates: it is computed from
inputs alone and may be computed anew anywhere. A *weight* node has parameters upstream but no batch
value: it is a form of its parameters (a transposed or cast weight) and belongs to its first reader.
A *site* is one place at which a parameter is read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from operator import getitem

import torch
from torch import fx

from mllm_compile.compiler.captured import Captured, Input
from mllm_compile.compiler.plan import Site

PER_MICROBATCH = ("batch", "hoisted", "denominator")


def tensors_of(node: fx.Node) -> tuple[torch.Tensor | None, ...]:
    """The elements of a node's value: one tensor, or those of a tuple; None for anything else."""
    value = node.meta.get("val")
    elements = value if isinstance(value, tuple | list) else (value,)
    return tuple(item if isinstance(item, torch.Tensor) else None for item in elements)


def size_bytes(node: fx.Node) -> int:
    """Bytes of a node's value, as if it were contiguous."""
    tensors = (item for item in tensors_of(node) if item is not None)
    return sum(item.numel() * item.element_size() for item in tensors)


def is_element(node: fx.Node) -> bool:
    """Whether the node takes one element out of another node's tuple."""
    return node.op == "call_function" and node.target is getitem


def draws(node: fx.Node) -> bool:
    """Whether the node draws random numbers, so that computing it twice gives two results."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags


def descendants(seeds: Iterable[fx.Node]) -> set[fx.Node]:
    """The seeds and every node that depends on one of them."""
    return _closure(seeds, lambda node: node.users)


def ancestors(seeds: Iterable[fx.Node]) -> set[fx.Node]:
    """The seeds and every node that one of them depends on."""
    return _closure(seeds, lambda node: node.all_input_nodes)


def _closure(seeds: Iterable[fx.Node], step) -> set[fx.Node]:  # type: ignore[no-untyped-def]
    seen = set(seeds)
    stack = list(seen)
    while stack:
        for node in step(stack.pop()):
            if node not in seen:
                seen.add(node)
                stack.append(node)
    return seen


class Graph:
    """The main graph of ``captured`` with its inputs; everything is computed once, when asked."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        graph = captured.main.graph
        self.nodes: tuple[fx.Node, ...] = tuple(graph.nodes)
        self.index = {node: place for place, node in enumerate(self.nodes)}
        self.by_name = {node.name: node for node in self.nodes}
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.input_of: dict[fx.Node, Input] = dict(zip(placeholders, captured.inputs, strict=True))
        self.output = self.nodes[-1]

    @cached_property
    def outputs(self) -> tuple[fx.Node | None, ...]:
        """What main returns: the model's outputs (loss first), then the buffer updates."""
        results = self.output.args[0]
        flat = results if isinstance(results, tuple | list) else (results,)
        return tuple(item if isinstance(item, fx.Node) else None for item in flat)

    @property
    def loss(self) -> fx.Node | None:
        """The node that computes the scalar loss."""
        return self.outputs[0] if self.outputs else None

    @cached_property
    def live(self) -> frozenset[fx.Node]:
        """Computing nodes on which an output or a buffer update depends."""
        used = ancestors(node for node in self.outputs if node is not None)
        return frozenset(node for node in used if node.op not in ("placeholder", "output"))

    @cached_property
    def parameters(self) -> dict[str, fx.Node]:
        """Placeholder of every parameter, by name."""
        return {item.name: node for node, item in self.input_of.items() if item.kind == "parameter"}

    @cached_property
    def free(self) -> frozenset[fx.Node]:
        """Live nodes that are computed from inputs alone, without parameters."""
        updated = set(self.captured.updates)
        owned = [
            node
            for node, item in self.input_of.items()
            if item.kind == "parameter" or (item.kind == "buffer" and item.name in updated)
        ]
        owned += [node for node in self.live if draws(node)]
        return self.live - descendants(owned)

    @cached_property
    def weights(self) -> frozenset[fx.Node]:
        """Parameters, and live nodes that are computed from parameters but no batch value."""
        varying = descendants(
            [node for node, item in self.input_of.items() if item.kind in PER_MICROBATCH]
            + [node for node in self.live if draws(node)]
        )
        parametric = descendants(self.parameters.values())
        known = self.live | self.input_of.keys()
        return frozenset((parametric - varying) & known)

    @cached_property
    def placed(self) -> tuple[fx.Node, ...]:
        """Live nodes that belong to exactly one stage (all but the free ones), in graph order."""
        return tuple(node for node in self.nodes if node in self.live and node not in self.free)

    @cached_property
    def reader(self) -> dict[fx.Node, fx.Node]:
        """Where every live node belongs: a weight node to its first reader, others to themselves.

        A weight node that only feeds an output reads its parameters itself.
        """
        found: dict[fx.Node, fx.Node] = {}
        for node in reversed(self.nodes):
            if node in self.live:
                users = [found[user] for user in node.users if user in self.live]
                follows = node in self.weights and users
                found[node] = min(users, key=self.index.__getitem__) if follows else node
        return found

    @cached_property
    def sites(self) -> dict[Site, fx.Node]:
        """Every site at which a parameter is read, with the placed node that reads it there."""
        found: dict[Site, fx.Node] = {}
        for name, placeholder in self.parameters.items():
            readers = {self.reader[user] for user in placeholder.users if user in self.live}
            occurrence: Counter[str] = Counter()
            for node in sorted(readers, key=self.index.__getitem__):
                owner = node.meta.get("owner", "")
                found[owner, name, occurrence[owner]] = node
                occurrence[owner] += 1
        return found

    @cached_property
    def operations(self) -> dict[Site, fx.Node]:
        """Every placed node that reads no parameter, by owner, operator and occurrence."""
        found: dict[Site, fx.Node] = {}
        occurrence: Counter[tuple[str, str]] = Counter()
        reading = set(self.sites.values())
        for node in self.placed:
            if node not in reading:
                what = node.meta.get("owner", ""), str(node.target)
                found[*what, occurrence[what]] = node
                occurrence[what] += 1
        return found

    def parameters_read(self, node: fx.Node) -> Iterator[str]:
        """Names of the parameters that the node itself takes as arguments."""
        for source in node.all_input_nodes:
            item = self.input_of.get(source)
            if item is not None and item.kind == "parameter":
                yield item.name
