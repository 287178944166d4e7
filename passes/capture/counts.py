"""Writing counts into a graph: the nodes that become denominator inputs of the main graph."""

from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.provenance import LABELS
from mllm_compile.passes.capture.tracing import FakeTensorMode

aten = torch.ops.aten


class Counts:
    """Adds nodes with metadata to a functional graph, and remembers which are denominators.

    Denominators are scalars in the loss's dtype, in the order in which the loss asks for them, so
    that programs of one model agree on what each of them counts.
    """

    def __init__(self, graph: fx.Graph, fake_mode: FakeTensorMode, dtype: torch.dtype):
        self.graph, self.fake_mode, self.dtype = graph, fake_mode, dtype
        self.denominators: list[fx.Node] = []
        self._of: dict[fx.Node, fx.Node] = {}
        self._one: fx.Node | None = None

    def call(self, source: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new call at the insertion point of the graph, with the labels of ``source``."""
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.map_arg((args, kwargs), lambda item: item.meta["val"])
        with self.fake_mode, torch.no_grad():
            value = target(*fakes[0], **fakes[1])
        node.meta = {name: source.meta[name] for name in LABELS if name in source.meta}
        node.meta["val"] = value
        return node

    def count(self, source: fx.Node) -> fx.Node:
        """A scalar computed from inputs alone that adds up over microbatches, as a denominator."""
        if source not in self._of:
            self._of[source] = self.call(source, aten._to_copy.default, source, dtype=self.dtype)
            self.denominators.append(self._of[source])
        return self._of[source]

    def number(self, source: fx.Node, value: float) -> fx.Node:
        """A number that this microbatch contributes, as a denominator."""
        device = source.meta["val"].device
        node = self.call(source, aten.full.default, [], value, dtype=self.dtype, device=device)
        self.denominators.append(node)
        return node

    def microbatches(self, source: fx.Node) -> fx.Node:
        """1, which adds up to the number of microbatches; one denominator for all uses."""
        if self._one is None:
            self._one = self.number(source, 1.0)
        return self._one
