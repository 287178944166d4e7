"""Attention along the axis that divides sequences: by gathered keys, needed keys, or heads.

*gather*: every rank has all keys and its own queries. *needed*: it fetches the keys that its
queries see (kernels/attention/context.py), which takes queries and keys divided alike, and no dense
mask. *heads*: it has all queries and keys of some heads, by all-to-alls before and after, where the
axis divides the key heads, or those that a tensor axis leaves to a rank. *auto*: the one of these
two that costs less under the masks at hand; neither keeps keys of other ranks until the backward.
Attention that cannot do as asked gathers.

Sources: all-gather as in Llama 3 (arXiv 2407.21783), heads as in DeepSpeed Ulysses
(arXiv 2309.14509).
"""

from dataclasses import replace

import torch
from torch import fx

from mllm_compile.compiler.layout import Layout, R, S
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.factors import Factors
from mllm_compile.passes.sharding.strategies import Gradients

ATTENTION = torch.ops.mllm.attention.default
EXCHANGE = "exchange"
"""``special`` of attention that fetches its keys itself."""

GROUPS = "g"
"""The factor of key heads in the rule of attention."""

SEQUENCE = 2
"""The dim of queries and keys."""


def exchanging(
    node: fx.Node, factors: Factors | None, axis: MeshAxis, gradients: Gradients
) -> Strategy | None:
    """The strategy in which attention fetches its keys along ``axis``; None if it cannot.

    Its queries are divided by the outer factor of their dim, keys alike where there are as many.
    """
    if node.target is not ATTENTION or axis.name != "context" or factors is None:
        return None
    call = Call.of(node)
    queries, keys = (shape[SEQUENCE] for shape in call.inputs[:2])
    if call["mask"] is not None or call["bias"] is not None or min(queries, keys) < 2:
        return None
    name = next(each for each in factors.inputs[0][SEQUENCE] if factors.sizes[each] > 1)
    rows = S(SEQUENCE, 1, factors.sizes[name])
    columns = rows if queries == keys else S(SEQUENCE, 1, keys)
    whole = (R,) * (len(call.inputs) - 3)
    outputs = (rows,) * len(gradients.results)
    return Strategy(name, (rows, columns, columns, *whole), outputs, EXCHANGE)


def other_ways(
    node: fx.Node,
    factors: Factors | None,
    axis: MeshAxis,
    found: tuple[Strategy, ...],
    gradients: Gradients,
    blocks: int,
) -> tuple[Strategy, ...]:
    """What the request names besides gathering, for attention along the context axis.

    ``found`` are the strategies of its rule. ``blocks``: into so many equal parts, each of them
    divided here, a tensor axis may divide heads.
    """
    if node.target is not ATTENTION or axis.name != "context":
        return ()
    needed = exchanging(node, factors, axis, gradients)
    heads = [
        within_blocks(each, blocks)
        for each in found
        if each.name == GROUPS and each.inputs[0].size % (blocks * axis.size) == 0
    ]
    first = [needed] if needed is not None and axis.exchange in ("needed", "auto") else []
    return (*first, *(heads if axis.exchange in ("heads", "auto") else ()))


def within_blocks(strategy: Strategy, blocks: int) -> Strategy:
    """The strategy in which every one of ``blocks`` equal parts of its factor is divided."""

    def inside(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(
            S(each.dim, each.outer * blocks, each.size // blocks) if each.divided else each
            for each in layouts
        )

    return replace(strategy, inputs=inside(strategy.inputs), outputs=inside(strategy.outputs))


def blocks_joined(strategy: Strategy) -> Strategy:
    """The inverse, for heads: what ``within_blocks`` made the strategy of."""
    blocks = strategy.inputs[0].outer

    def joined(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
        return tuple(
            S(each.dim, each.outer // blocks, each.size * blocks) if each.divided else each
            for each in layouts
        )

    return replace(strategy, inputs=joined(strategy.inputs), outputs=joined(strategy.outputs))


def gathers(
    node: fx.Node, axis: MeshAxis, strategy: Strategy, factors: Factors | None, blocks: int
) -> str:
    """Why attention gathers its keys although the request asks for another way; "" elsewhere."""
    asked = axis.exchange in ("needed", "heads") and axis.name == "context"
    if node.target is not ATTENTION or not asked or strategy.special or strategy.name == GROUPS:
        return ""
    if axis.exchange == "needed":
        return "it has a dense mask or a bias"
    heads = factors.sizes.get(GROUPS, 1) if factors is not None else 1
    ranks = f"{axis.size} ranks" + (f" times tensor {blocks}" if blocks > 1 else "")
    return f"{ranks} do not divide {heads} key heads"
