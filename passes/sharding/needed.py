"""What attention fetches where ranks fetch the keys that they need: told by masks, where known.

A causal mask needs no batch to be known; of others the batches at hand show what they allow.
"""

from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import Tensor, fx

from mllm_compile.compiler.graph import tensors_of
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.kernels.attention.runs import visible
from mllm_compile.passes.sharding.exchange import ATTENTION, SEQUENCE
from mllm_compile.passes.token_split.measure import received

UNKNOWN = 0.5
"""Between 1 of a causal sequence and 0.1 to 0.25 of packed documents under a planned split."""


def needed_shares(
    nodes: Iterable[fx.Node], axis: MeshAxis, intervals: Mapping[str, Tensor]
) -> dict[str, float]:
    """By attention: of the keys that other ranks hold, the part that the busiest rank fetches.

    ``intervals`` of the batches at hand by the name of the node that holds them.
    """
    known: dict[Hashable, float] = {}
    found = {}
    for node in nodes:
        if node.target is not ATTENTION:
            continue
        queries, keys = (
            tensors_of(each)[0].shape[SEQUENCE]  # type: ignore[arg-type, union-attr]
            for each in node.args[:2]
        )
        mask, causal = node.args[3], bool(node.args[6])
        key = mask, causal, queries, keys
        if key not in known:
            shown = intervals.get(mask.name) if isinstance(mask, fx.Node) else None
            blank = queries != keys or (shown is None and mask is not None)
            known[key] = UNKNOWN if blank else _share(shown, causal, keys, axis)
        found[node.name] = known[key]
    return found


def _share(intervals: Tensor | None, causal: bool, length: int, axis: MeshAxis) -> float:
    host = torch.device("cpu")
    shown = None if intervals is None else intervals.to(host)
    seen = visible(shown, length, length, causal, host)
    split = axis.split(length)
    fetched = sum(received(sample, split) for sample in seen.numpy())
    others = len(seen) * length * (axis.size - 1) / axis.size
    return float(fetched.max()) / others  # type: ignore[union-attr]
