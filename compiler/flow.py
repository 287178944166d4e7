"""Where gradients flow in a captured program: exactly where autograd would compute them.

A value *requires* a gradient if a trainable parameter lies upstream on a differentiable path: found
forwards. It *needs* one if it also leads to the loss on such a path: found backwards, and
per edge, because one reader of a value may send a gradient back and another not. What single
operators do comes from autograd (compiler/derivative.py); here it is only followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from mllm_compile.compiler.derivative import Backward, Call, backward, edges_of, forward
from mllm_compile.compiler.graph import Graph, is_element, tensors_of

NOTHING = Backward()


@dataclass(frozen=True)
class Flow:
    """``requires``: per node, the ``requires_grad`` flag of each element of its value.

    ``needs``: nodes and placeholders that get a gradient. ``edges``: (source, reader) pairs over
    which it comes. ``backwards``: what the backward of each computing node does.
    """

    requires: Mapping[fx.Node, tuple[bool, ...]]
    needs: frozenset[fx.Node]
    edges: frozenset[tuple[fx.Node, fx.Node]]
    backwards: Mapping[fx.Node, Backward]


def flow(graph: Graph) -> Flow:
    """Follow gradients through the live part of the main graph."""
    requires = required(graph)
    wanted: dict[fx.Node, set[int]] = {}
    edges: set[tuple[fx.Node, fx.Node]] = set()
    backwards: dict[fx.Node, Backward] = {}
    if graph.loss is not None and requires[graph.loss][0]:
        wanted[graph.loss] = {0}
    for node in reversed(graph.nodes):
        elements = wanted.get(node)
        if not elements or node not in graph.live:
            continue
        if is_element(node):
            source, place = node.args
            assert isinstance(source, fx.Node)
            wanted.setdefault(source, set()).add(int(place))  # type: ignore[arg-type]
            edges.add((source, node))
            continue
        backwards[node] = _backward(graph, node, frozenset(elements), requires)
        for source, reached in zip(edges_of(node), backwards[node].edges, strict=True):
            if reached:
                wanted.setdefault(source, set()).add(0)
                edges.add((source, node))
    return Flow(requires, frozenset(wanted), frozenset(edges), backwards)


def required(graph: Graph) -> dict[fx.Node, tuple[bool, ...]]:
    """The ``requires_grad`` flag of every element of every node."""
    requires: dict[fx.Node, tuple[bool, ...]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            item = graph.input_of[node]
            tensor = tensors_of(node)[0]
            differentiable = tensor is None or tensor.is_floating_point() or tensor.is_complex()
            requires[node] = (item.kind == "parameter" and item.trainable and differentiable,)
        elif is_element(node):
            source, place = node.args
            requires[node] = (requires[source][place],)  # type: ignore[index]
        elif node in graph.live and any(requires[source][0] for source in node.all_input_nodes):
            requires[node] = forward(call_of(node, requires)).requires_grad
        else:
            requires[node] = (False,) * len(tensors_of(node))
    return requires


def call_of(node: fx.Node, requires: Mapping[fx.Node, tuple[bool, ...]]) -> Call:
    """The operator call of a node, its arguments with their ``requires_grad`` flags."""
    return Call.of(node, lambda source: requires[source][0])


def _backward(
    graph: Graph,
    node: fx.Node,
    elements: frozenset[int],
    requires: Mapping[fx.Node, tuple[bool, ...]],
) -> Backward:
    weights = frozenset(
        place for place, source in enumerate(edges_of(node)) if source in graph.weights
    )
    return backward(call_of(node, requires), elements, weights)
