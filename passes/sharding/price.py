"""What work and conversions cost, in seconds, on a nominal machine.

The figures are those of one accelerator of 2023 and its neighbours in one box; decisions depend on
their ratios alone. Floating values count two bytes an element whatever their dtype, so that a run
that verifies in float64 verifies the plan that trains in bfloat16.
"""

from functools import lru_cache
from math import prod

import torch
from torch import fx

from mllm_compile.compiler.graph import tensors_of
from mllm_compile.compiler.layout import Layout, P, R, adjoint
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.plan import NodeCost
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.conversions import collective
from mllm_compile.passes.sharding.exchange import EXCHANGE
from mllm_compile.passes.sharding.values import Value, operands

FLOPS_PER_SECOND = 400e12
MEMORY_BANDWIDTH = 3e12
LINK_BANDWIDTH = 400e9
CROSSING_BANDWIDTH = 50e9
"""Of a rank's way to the ranks of other modules, which may stand in other boxes."""

LATENCY = 10e-6
FLOAT_BYTES = 2
STATE_BYTES = 32
"""Read and written by an optimizer step per element: gradient, master copy, two moments."""

FREE = 1e-9
"""Of a conversion without traffic: fewer conversions win ties."""

BUCKETED = 1e-6
"""Of one more parameter in the sum of gradients over an axis at the end of a step."""

Decided = tuple[tuple[MeshAxis, Strategy], ...]
"""The strategies of one node on several axes."""


def size_of(value: Value) -> int:
    """Nominal bytes of a value, whole."""
    tensor = tensors_of(value[0])[value[1]]
    if tensor is None:
        return 0
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() * (FLOAT_BYTES if floating else tensor.element_size())


@lru_cache(maxsize=4096)
def share(layout: Layout, axis: MeshAxis) -> float:
    """The part of a value that the fullest rank of an axis holds."""
    if not layout.divided or not layout.size:
        return 1.0
    return max(axis.split(layout.size).sizes) / layout.size


def share_of(strategy: Strategy, axis: MeshAxis) -> float:
    """The part of a node's work that the busiest rank of an axis does."""
    divided = [each for each in (*strategy.inputs, *strategy.outputs) if each.divided]
    return max((share(layout, axis) for layout in divided), default=1.0)


def conversion(have: Layout, want: Layout, size: float, axis: MeshAxis, gradient: bool) -> float:
    """Seconds of a conversion of ``size`` bytes, with its adjoint where a gradient flows."""
    if have == want:
        return 0.0
    back = _one_way(*adjoint(have, want), size, axis) if gradient else 0.0
    return _one_way(have, want, size, axis) + back


def _one_way(have: Layout, want: Layout, size: float, axis: MeshAxis) -> float:
    """Ring collectives; what is made anew is also written to memory and read again."""
    held, made = size * share(have, axis), size * share(want, axis)
    passed = (axis.size - 1) / axis.size
    kind = collective(have, want)
    if kind:
        rounds = {"all-reduce": 2 * size, "all-to-all": held}.get(kind, size)
        return LATENCY + passed * rounds / LINK_BANDWIDTH + 2 * made / MEMORY_BANDWIDTH
    if want.divided or want == P:
        return FREE + 2 * made / MEMORY_BANDWIDTH
    return FREE


def work(node: fx.Node, cost: NodeCost, decided: Decided, gradient: bool, needed: float) -> float:
    """Seconds of a node, forward and backward, under its strategies on several axes.

    Contractions take their FLOPs, everything else its traffic; views take nothing. ``needed``: of
    the keys that other ranks hold, the part that attention fetches where it fetches them itself.
    """
    if cost.total:
        part = prod(share_of(strategy, axis) for axis, strategy in decided)
        fetched = sum(
            _fetched(node, axis, each, decided, needed) for axis, each in decided if each.special
        )
        times = 3 if gradient else 1  # the backward fetches again and returns gradients
        return cost.total * part / FLOPS_PER_SECOND + fetched * times
    if is_view(node):
        return 0.0
    traffic = 0.0
    for place, value in enumerate(operands(node)):
        held = prod(share(strategy.inputs[place], axis) for axis, strategy in decided)
        traffic += size_of(value) * held
    for place in range(len(tensors_of(node))):
        held = prod(share(strategy.outputs[place], axis) for axis, strategy in decided)
        traffic += size_of((node, place)) * held
    seconds = traffic * (3 if gradient else 1) / MEMORY_BANDWIDTH
    return seconds + sum(3 * LATENCY for _, strategy in decided if _normalizes(strategy))


def _fetched(
    node: fx.Node, axis: MeshAxis, strategy: Strategy, decided: Decided, needed: float
) -> float:
    """Seconds in which attention gets at the keys that it needs, in one direction."""
    if strategy.special != EXCHANGE:
        return 0.0
    size = 0.0
    for place in (1, 2):
        inner = (each.inputs[place] for other, each in decided if other != axis)
        shares = zip(inner, (other for other, _ in decided if other != axis), strict=True)
        size += size_of(operands(node)[place]) * prod(share(x, other) for x, other in shares)
    return LATENCY + needed * size * (axis.size - 1) / axis.size / LINK_BANDWIDTH


def _normalizes(strategy: Strategy) -> bool:
    """Whether the operator exchanges a maximum and sums along the dim that it normalizes."""
    return bool(strategy.special) and any(layout.divided for layout in strategy.outputs)


def is_view(node: fx.Node) -> bool:
    """Whether the node's value lies in the storage of its argument."""
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def arrival(value: Value, layout: Layout, axis: MeshAxis, held: float) -> float:
    """Seconds in which a value from another module arrives; ``held`` as in :func:`state`."""
    return size_of(value) * held * share(layout, axis) / CROSSING_BANDWIDTH


def state(value: Value, layout: Layout, axis: MeshAxis, held: float, steps: int) -> float:
    """Seconds, per microbatch, of what a step does with a parameter in a layout.

    ``held``: the part that axes decided before leave on a rank; a step has ``steps`` microbatches.
    """
    elements = size_of(value) / FLOAT_BYTES * held
    seconds = elements * share(layout, axis) * STATE_BYTES / MEMORY_BANDWIDTH
    if layout.kind == "V":
        seconds += BUCKETED + _one_way(P, R, elements * FLOAT_BYTES, axis) - LATENCY
    return seconds / steps
