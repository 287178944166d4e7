"""Whether two traces are the same computation.

What a trace computes from constants alone counts by its value, whatever way led to it; everything
else by its operators and arguments. Keys that operators of ours get anew in every trace do not
count.
"""

import hashlib
import operator
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.tracing import is_mutable


def fingerprint(graph: fx.GraphModule) -> list[str]:
    """One line for every node of a raw graph that does not depend on constants alone."""
    return _Fingerprint(graph).lines


class _Fingerprint:
    def __init__(self, graph: fx.GraphModule):
        self.graph = graph
        self.values: dict[fx.Node, Any] = {}
        self.names: dict[fx.Node, str] = {}
        self.lines: list[str] = []
        with torch.no_grad():
            for node in graph.graph.nodes:
                self._visit(node)

    def _visit(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.values[node] = operator.attrgetter(str(node.target))(self.graph).detach().clone()
            return
        known = all(source in self.values for source in node.all_input_nodes)
        if node.op == "call_function" and known and not _random(node):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
            self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            return
        if is_mutable(node):  # a constant that is written to with something else is none any more
            for source in node.all_input_nodes:
                self.values.pop(source, None)
                self.names.setdefault(source, f"written {len(self.lines)}")
        self.names[node] = f"node {len(self.lines)}"
        self.lines.append(f"{node.op} {node.target} {self._arguments(node)}")

    def _arguments(self, node: fx.Node) -> str:
        if getattr(node.target, "namespace", "") == "mllm":
            return str([self._label(source) for source in node.all_input_nodes])
        labelled = fx.map_arg((node.args, node.kwargs), lambda source: self._label(source))
        return str(labelled)

    def _label(self, node: fx.Node) -> Any:
        if node in self.names:
            return self.names[node]
        value = self.values[node]
        if not isinstance(value, torch.Tensor):
            return str(value)
        data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"


def _random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
