"""Where gradients flow in a captured program: exactly where autograd would compute them.

A value *requires* a gradient if a trainable parameter lies upstream on a differentiable path: found
forwards. It *needs* one if it also leads to the loss on such a path: found backwards, and
per edge, because one reader of a value may send a gradient back and another not. What single
operators do comes from autograd (compiler/derivative.py); here it is only followed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from mllm_compile.compiler.derivative import (
    Backward,
    Call,
    Forward,
    backward,
    edges_of,
    forward,
)
from mllm_compile.compiler.graph import Graph, is_element, tensors_of


@dataclass(frozen=True)
class Required:
    """``flags``: per node, the ``requires_grad`` flag of each element of its value.

    ``calls`` and ``forwards``: what every live computing node calls, and what its forward does.
    """

    flags: Mapping[fx.Node, tuple[bool, ...]]
    calls: Mapping[fx.Node, Call]
    forwards: Mapping[fx.Node, Forward]


@dataclass(frozen=True)
class Flow:
    """``needs``: nodes and placeholders that get a gradient.

    ``edges``: (source, reader) pairs over which it comes. ``forwards`` and ``backwards``: what
    every computing node does, as far as it does.
    """

    needs: frozenset[fx.Node]
    edges: frozenset[tuple[fx.Node, fx.Node]]
    forwards: Mapping[fx.Node, Forward]
    backwards: Mapping[fx.Node, Backward]


def flow(graph: Graph) -> Flow:
    """Follow gradients through the live part of the main graph."""
    required = follow_forwards(graph)
    wanted: dict[fx.Node, set[int]] = {}
    edges: set[tuple[fx.Node, fx.Node]] = set()
    backwards: dict[fx.Node, Backward] = {}
    if graph.loss is not None and required.flags[graph.loss][0]:
        wanted[graph.loss] = {0}
    for node in reversed(graph.nodes):
        elements = wanted.get(node)
        if not elements or node not in graph.live:
            continue
        if is_element(node):
            source, place = _element(node)
            wanted.setdefault(source, set()).add(place)
            edges.add((source, node))
            continue
        sources = edges_of(node)
        weights = frozenset(k for k, source in enumerate(sources) if source in graph.weights)
        backwards[node] = backward(required.calls[node], frozenset(elements), weights)
        for source, reached in zip(sources, backwards[node].edges, strict=True):
            if reached:
                wanted.setdefault(source, set()).add(0)
                edges.add((source, node))
    return Flow(frozenset(wanted), frozenset(edges), required.forwards, backwards)


def follow_forwards(graph: Graph) -> Required:
    """Which values require a gradient, following the operators from parameters on."""
    flags: dict[fx.Node, tuple[bool, ...]] = {}
    calls: dict[fx.Node, Call] = {}
    forwards: dict[fx.Node, Forward] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            flags[node] = (_trains(graph, node),)
        elif is_element(node):
            source, place = _element(node)
            flags[node] = (flags[source][place],)
        elif node in graph.live:
            calls[node] = Call.of(node, lambda source: flags[source][0])
            forwards[node] = forward(calls[node])
            flags[node] = forwards[node].requires_grad
        else:
            flags[node] = (False,)
    return Required(flags, calls, forwards)


def _trains(graph: Graph, placeholder: fx.Node) -> bool:
    item = graph.input_of[placeholder]
    tensor = tensors_of(placeholder)[0]
    differentiable = tensor is None or tensor.is_floating_point() or tensor.is_complex()
    return item.kind == "parameter" and item.trainable and differentiable


def _element(node: fx.Node) -> tuple[fx.Node, int]:
    """The tuple that an element is taken from, and its place there."""
    source, place = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(place, int)
    return source, place
