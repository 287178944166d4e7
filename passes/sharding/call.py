"""What a rule may look at: one operator call, its arguments by name and the shapes around it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.graph import tensors_of
from mllm_compile.passes.sharding.factors import Shape
from mllm_compile.passes.sharding.values import operands, shapes


@dataclass(frozen=True)
class Call:
    """``inputs`` and ``results`` are shapes, in the order of the rule.

    ``arguments``: every argument of the operator's schema by name, defaults filled in.
    """

    node: fx.Node
    inputs: tuple[Shape, ...]
    results: tuple[Shape, ...]
    arguments: Mapping[str, Any]

    @staticmethod
    def of(node: fx.Node) -> "Call":
        """The call that a computing node makes."""
        return Call(node, *shapes(node), _arguments(node))

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def floating(self) -> bool:
        """Whether all results may be partial sums of real or complex numbers."""
        return all(t is None or _continuous(t) for t in tensors_of(self.node))

    def continuous(self, index: int) -> bool:
        """The same of one tensor argument."""
        node, place = operands(self.node)[index]
        tensor = tensors_of(node)[place]
        return tensor is not None and _continuous(tensor)


def _continuous(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _arguments(node: fx.Node) -> dict[str, Any]:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    found = {}
    for place, argument in enumerate(schema.arguments):
        if place < len(node.args):
            found[argument.name] = node.args[place]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        else:
            found[argument.name] = argument.default_value if argument.has_default_value() else None
    return found
