"""Put the graphs of a stage on the device of a rank.

Programs are captured on the host, so tensors that they make (ranges, constants, the gradient of the
loss) name its device. Inputs come to a rank's device on their own (runtime/executor.py).
"""

from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from mllm_compile.compiler.program import Segment
from mllm_compile.passes.lower.differentiate import Segments


def on_device(segments: Segments, device: torch.device) -> Segments:
    """``Segments`` whose graphs make all tensors on ``device``; without the joint graph."""
    return Segments(
        _moved(segments.forward, device),
        segments.input_grad and _moved(segments.input_grad, device),
        segments.weight_grad and _moved(segments.weight_grad, device),
    )


def _moved(segment: Segment, device: torch.device) -> Segment:
    named: set[torch.device] = set()

    def place(value: Any) -> Any:
        if not isinstance(value, torch.device):
            return value
        named.add(value)
        return device

    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in segment.graph.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        copied[node].args = map_aggregate(copied[node].args, place)
        copied[node].kwargs = map_aggregate(copied[node].kwargs, place)
    if named <= {device}:  # as on the host: the graph stands there already
        return segment
    return replace(segment, graph=torch.fx.GraphModule({}, graph))
