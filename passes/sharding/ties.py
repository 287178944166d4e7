"""Which points of a graph are the same place of repeated blocks.

Two nodes tie if the paths of their modules differ in indices alone, the modules compute the same
operators on the same shapes, and the nodes stand at the same place among them. Parameters tie if
their names differ in indices alone and their shapes are equal.
"""

import re
from collections.abc import Hashable

from torch import fx

from mllm_compile.compiler.graph import Graph, tensors_of


def ties(graph: Graph) -> dict[str, Hashable]:
    """For every node by name what all nodes that tie with it have in common."""
    owners: dict[str, list[fx.Node]] = {}
    found: dict[str, Hashable] = {}
    for node in graph.nodes:
        if node in graph.input_of:
            item = graph.input_of[node]
            found[node.name] = item.kind, pattern(item.name), _signature(node)
        elif node.op == "call_function":
            owners.setdefault(node.meta.get("owner", ""), []).append(node)
    kinds: dict[Hashable, int] = {}
    for owner, nodes in owners.items():
        own = pattern(owner), tuple(map(_signature, nodes))
        kind = kinds.setdefault(own, len(kinds))
        found.update((node.name, (kind, place)) for place, node in enumerate(nodes))
    return found


def pattern(path: str) -> str:
    """The path with ``*`` for every index."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _signature(node: fx.Node) -> Hashable:
    shapes = tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors_of(node))
    return node.op if node.op == "placeholder" else node.target, shapes
