"""The name under which attention is registered, for model code that asks which one is in use.

Some models call the registered function and besides ask whether it is "sdpa" or "eager", as for a
mask that is narrowed by hand: they must get the answer that the user's configuration gives.
"""

import torch
from torch import fx

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.spread import packet, place, value_of

aten = torch.ops.aten
mllm = torch.ops.mllm
SHAPED = {
    aten.slice, aten.select, aten.view, aten._unsafe_view, aten.expand, aten.unsqueeze,
    aten.squeeze, aten.clone, aten.alias, aten.detach, aten._to_copy, aten.lift_fresh_copy,
}  # fmt: skip
ADDS = {aten.add, aten.sub, aten.rsub}


class ImplementationName(str):
    """A name of its own in registries, equal also to the name that it stands for."""

    chosen: str | None

    def __new__(cls, name: str, chosen: str | None = None) -> "ImplementationName":
        """``chosen`` is the user's implementation, None where it is left to transformers."""
        made = super().__new__(cls, name)
        made.chosen = chosen
        return made

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or (other is not None and other == self.chosen)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def check_masks(graph: fx.Graph) -> None:
    """No code adds a mask to scores: the one it gets says true and false.

    Raises:
        CaptureError: it expects the numbers of an eager mask, zero and very low ones.

    """
    masks: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        kind, hidden = packet(node), masks.intersection(node.all_input_nodes)
        if kind is mllm.mask or (hidden and kind in SHAPED):
            masks.add(node)
        elif hidden and kind in ADDS and value_of(node).is_floating_point():
            raise CaptureError(
                explain(
                    place(node),
                    expected="a mask of true and false, as torch's own attention takes it",
                    got="its numbers added to scores",
                    remedy="build the model with attn_implementation='sdpa'",
                )
            )
