"""Decide which tokens of the sequence each context rank of a module holds, where that is "planned".

The masks of the module's attentions in a program's first step decide, those of all microbatches at
once (passes/token_split). Later steps stay exact under the same split; only their balance is
another. The split stands in the request of the plan in place of "planned", written out.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.request import ModuleSpec
from mllm_compile.compiler.split import Split
from mllm_compile.kernels.attention.runs import visible
from mllm_compile.passes.token_split.mask_values import sites
from mllm_compile.passes.token_split.measure import received, tiles
from mllm_compile.passes.token_split.planner import plan_split

Masks = list[tuple[int, NDArray[np.int32]]]
"""(number of attentions, intervals [S, n, 2]) of every different mask."""


def attention(plan: Plan) -> Plan:
    """Plan with stages -> plan whose request names the tokens of every context rank."""
    modules = list(plan.request.modules)
    split_notes: dict[int, tuple[str, ...]] = {}
    for index, spec in enumerate(modules):
        if spec.context_split == "planned":
            own = [node for node in sites(plan.captured) if plan.module_of.get(node.name) == index]
            policy, split_notes[index] = _decide(plan, spec, own)
            modules[index] = replace(spec, context_split=policy)
    request = replace(plan.request, modules=tuple(modules))
    return replace(plan, request=request, split_notes=split_notes)


def _decide(plan: Plan, spec: ModuleSpec, own: list[fx.Node]) -> tuple[str, tuple[str, ...]]:
    """The policy of a module's context axis, and what to say about it."""
    if spec.parallel.context == 1:
        return "contiguous", ()
    length = max((_queries(node) for node in own if _queries(node) == _keys(node)), default=0)
    if not length:
        return "contiguous", ("context: contiguous, no attention of a sequence to itself",)
    own = [node for node in own if _queries(node) == _keys(node) == length]
    masks, unknown = _masks(plan, own, length)
    if unknown:
        return "zigzag", (f"context: zigzag, no split planned for {length} tokens: {unknown}",)
    weights = [count for count, _ in masks]
    split = plan_split([mask for _, mask in masks], weights, spec.parallel.context)
    dense = sum(node.args[4] is not None for node in own)
    return str(split), (_quality(masks, split) + _spared(dense),)


def _masks(plan: Plan, own: list[fx.Node], length: int) -> tuple[Masks, str]:
    """The masks of attentions over ``length`` tokens; or what is not known about them.

    A dense mask is none here: kernels skip tiles by intervals alone, and ranks gather all keys.
    """
    counts = Counter((node.args[3], node.args[6]) for node in own)
    found: dict[bytes, tuple[int, NDArray[np.int32]]] = {}
    for (intervals, causal), count in counts.items():
        known = None
        if isinstance(intervals, fx.Node):
            if intervals.name not in plan.intervals:
                return [], f"no batch at hand shows the masks of {count} attentions"
            known = plan.intervals[intervals.name].cpu()
        seen = visible(known, length, length, bool(causal), torch.device("cpu"))
        for sample in seen.numpy():
            others, _ = found.get(sample.tobytes(), (0, sample))
            found[sample.tobytes()] = others + count, sample
    return list(found.values()), ""


def _quality(masks: Masks, split: Split) -> str:
    """Balance and traffic of a split, for people."""
    balance = max(
        tiles(mask, split).max() * split.ranks / max(tiles(mask).sum(), 1) for _, mask in masks
    )
    gathered = split.length * (split.ranks - 1) / split.ranks
    layers = sum(count for count, _ in masks)
    keys = np.array([count * received(mask, split) for count, mask in masks]) / layers
    shares = keys.sum(0) / gathered
    return (
        f"context: {split.length} tokens split by {len(masks)} masks: "
        f"tiles at most {balance:.3f} of the mean, keys received "
        f"{shares.mean():.3f} of all (worst rank {shares.max():.3f})"
    )


def _spared(dense: int) -> str:
    """What dense masks mean for work and traffic."""
    if not dense:
        return ""
    return f"; {dense} attentions have a dense mask, which spares neither work nor keys"


def _queries(node: fx.Node) -> int:
    return int(_value(node, 0).shape[2])


def _keys(node: fx.Node) -> int:
    return int(_value(node, 1).shape[2])


def _value(node: fx.Node, place: int) -> Tensor:
    argument = node.args[place]
    assert isinstance(argument, fx.Node)
    value: Tensor = argument.meta["val"]
    return value
