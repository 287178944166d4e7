"""Name the kernel that each attention of a stage runs, for the machine that lowers it.

What is named follows from mask, head sizes and dtype of a call, which are static: so the lowered
graphs tell which kernels a step runs, and in which tilings (kernels/attention/kernel.py). The
gradient of a named attention names its kernels, too.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.kernels.attention.kernel import BACKWARD, FORWARD, Kernel, chosen
from mllm_compile.kernels.attention.site import Site
from mllm_compile.passes.lower.differentiate import Segments
from mllm_compile.passes.lower.extract import StageGraph
from mllm_compile.passes.lower.special import filled, schema_of

ours = torch.ops.mllm
KERNELS: dict[Any, tuple[str, ...]] = {
    ours.attention.default: FORWARD,
    ours.context_attention.default: FORWARD,
    ours.attention_backward.default: BACKWARD,
    ours.context_attention_backward.default: BACKWARD,
}
"""The Triton kernels that an operator runs."""

CALL = ("q", "k", "v", "intervals", "mask", "bias", "scale", "softcap")


def emit(stage: StageGraph, target: str) -> StageGraph:
    """``StageGraph -> StageGraph`` whose attentions name their kernels on ``target``."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    for node in stage.graph.graph.nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
        if node.target in KERNELS:
            given = {**_given(copied[node]), "kernel": str(kernel_of(node, target))}
            copied[node].args, copied[node].kwargs = tuple(given.values()), {}
    return replace(stage, graph=fx.GraphModule({}, graph))


def kernel_of(node: fx.Node, target: str) -> Kernel:
    """The kernel on ``target`` for an attention, forward or backward."""
    given = _given(node)
    call: Any = fx.map_arg(tuple(map(given.get, CALL)), lambda operand: operand.meta["val"])
    return chosen(target, KERNELS[node.target], *call)


def site_of(node: fx.Node) -> Site:
    """What the kernels of an attention are compiled for, on any target."""
    return kernel_of(node, "cpu").site


def attentions_name_their_kernels(segments: Segments, target: str, at: int) -> None:
    """Every attention of a stage names the kernel that its operands are due on the target."""
    for node in _attentions(segments):
        due, named = str(kernel_of(node, target)), _given(node)["kernel"] or "no kernel"
        if named != due:
            raise PlanError(explain(f"stage {at}: %{node.name}", expected=due, got=named))


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, in the order of the operator's schema."""
    names = [item.name for item in schema_of(node.target)]
    return dict(zip(names, filled(node, node.args, node.kwargs), strict=True))


def _attentions(segments: Segments) -> Iterator[fx.Node]:
    for segment in (segments.forward, segments.input_grad, segments.weight_grad):
        if segment is not None:
            yield from (node for node in segment.graph.graph.nodes if node.target in KERNELS)
