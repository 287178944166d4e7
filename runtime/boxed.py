"""Call a graph so that each of its inputs can be freed while it runs, right after its last use.

An ordinary call holds all arguments until it returns. For a backward segment these are the saved
activations: freed one by one, their memory is used again while it is warm, and the peak is lower.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch.fx.graph import _BoxedCodeGen

Boxed = Callable[[list[Any]], Sequence[Any]]


def boxed(graph: Callable[..., Any]) -> Boxed:
    """A function of the list of the graph's inputs; it empties the list.

    A graph that something else has compiled is called as it is.
    """
    if not isinstance(graph, fx.GraphModule):
        return lambda inputs: graph(*inputs)
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    copy.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(graph, copy)
