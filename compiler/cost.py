"""What every node costs: FLOPs of forward, input gradients and weight gradients, and bytes.

FLOPs are those that torch.utils.flop_counter counts (one multiply-add is two FLOPs; formulas of our
own operators are registered there). The backward is counted operand by operand: one contraction
for each operand that gets a gradient. dW belongs to operands that are forms of parameters, dI to
all others. Bytes that the backward keeps count once, at the first node whose backward keeps them
(so in the stage that must); a view counts as its base, parameters and inputs not at all.
"""

from collections.abc import Mapping

from torch import fx

from mllm_compile.compiler.derivative import edges_of
from mllm_compile.compiler.flow import Flow
from mllm_compile.compiler.graph import Graph, is_element, size_bytes, tensors_of
from mllm_compile.compiler.plan import NodeCost

Value = tuple[fx.Node, int]


def costs(graph: Graph, flow: Flow) -> dict[str, NodeCost]:
    """Cost of every live computing node, by name."""
    saved = saved_bytes(graph, flow)
    found: dict[str, NodeCost] = {}
    for node in graph.nodes:
        if node not in graph.live:
            continue
        if is_element(node):
            found[node.name] = NodeCost(bytes=size_bytes(node))
            continue
        backward = flow.backwards.get(node)
        total, inputs = (backward.flops, backward.input_flops) if backward else (0, 0)
        found[node.name] = NodeCost(
            forward=flow.forwards[node].flops,
            input_grad=inputs,
            weight_grad=total - inputs,
            bytes=size_bytes(node),
            saved_bytes=saved.get(node, 0),
        )
    return found


def saved_bytes(graph: Graph, flow: Flow) -> dict[fx.Node, int]:
    """Bytes that every node's backward keeps, and no earlier node's."""
    bases = _bases(graph, flow)
    kept: set[Value] = set()
    found: dict[fx.Node, int] = {}
    for node in sorted(flow.backwards, key=graph.index.__getitem__):
        backward, sources = flow.backwards[node], edges_of(node)
        values = {bases[sources[edge], 0] for edge in backward.saved_edges}
        values |= {bases[node, element] for element in backward.saved_elements}
        own = [tensors_of(base)[k] for base, k in values - kept if base in graph.live]
        sizes = (tensor.numel() * tensor.element_size() for tensor in own if tensor is not None)
        found[node] = backward.saved_bytes + sum(sizes)
        kept |= values
    return found


def _bases(graph: Graph, flow: Flow) -> Mapping[Value, Value]:
    """The value in whose storage each value lies."""
    bases: dict[Value, Value] = {}
    for node in graph.nodes:
        own = [(node, element) for element in range(len(tensors_of(node)))]
        if node not in graph.live:
            bases.update(zip(own, own, strict=True))
        elif is_element(node):
            source, place = node.args
            bases[node, 0] = bases[source, place]  # type: ignore[index]
        else:
            sources = edges_of(node)
            alias = flow.forwards[node].alias
            for value, edge in zip(own, alias, strict=True):
                bases[value] = value if edge is None else bases[sources[edge], 0]
    return bases
