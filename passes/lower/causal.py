"""Attention that is causal by position, where a rank has some of the queries and all keys.

The operator's own rule counts from its first query. So the rule becomes a mask of this rank's query
positions: these are divided as the queries are, whatever the split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.layout import Layout, R
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.passes.lower.local_graph import LocalGraph, Meta, Value
from mllm_compile.passes.lower.special import filled, schema_of

aten = torch.ops.aten
ATTENTION = torch.ops.mllm.attention.default
QUERY_DIM = 2


@dataclass
class CausalMasks:
    """The masks of one graph: one for all attentions with the same lengths and layouts."""

    local: LocalGraph
    made: dict[Any, fx.Node] = field(default_factory=dict)

    def explicit(
        self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], layouts: Layouts
    ) -> tuple[Any, ...]:
        """Arguments of an attention with a mask instead of ``causal``, if queries are divided.

        ``layouts`` are those of the queries; ``args`` and ``kwargs`` have local values.
        """
        names = [item.name for item in schema_of(ATTENTION)]
        named = dict(zip(names, filled(node, args, kwargs), strict=True))
        rows = tuple(
            Layout("S", 0, layout.outer, layout.size)
            if layout.divided and layout.dim == QUERY_DIM
            else R
            for layout in layouts
        )
        if named["causal"] and any(layout.divided for layout in rows):
            queries, keys = (node.args[i].meta["val"].shape[QUERY_DIM] for i in (0, 1))  # type: ignore[union-attr]
            named["mask"] = self._with_rule(node, named["mask"], (queries, keys, rows))
            named["causal"] = False
        return tuple(named.values())

    def _with_rule(
        self, node: fx.Node, mask: fx.Node | None, key: tuple[int, int, Layouts]
    ) -> fx.Node:
        if key not in self.made:
            self.made[key] = self._mask(*key, node.meta)
        if mask is None:
            return self.made[key]
        return self._call(aten.bitwise_and.Tensor, (mask, self.made[key]), node.meta)

    def _mask(self, queries: int, keys: int, rows: Layouts, meta: Meta) -> fx.Node:
        """Boolean [1, 1, this rank's queries, keys]."""
        positions = Value("query_positions", (queries,), False, meta)
        positions.forms[(R,) * len(rows)] = self._positions(queries, meta)
        own = self._call(aten.unsqueeze.default, (self.local.form(positions, rows, meta), 1), meta)
        mask = self._call(aten.ge.Tensor, (own, self._positions(keys, meta)), meta)
        for _ in range(2):
            mask = self._call(aten.unsqueeze.default, (mask, 0), meta)
        return mask

    def _positions(self, length: int, meta: Meta) -> fx.Node:
        device = meta["val"][0].device
        return self._call(aten.arange.default, (length,), meta, device=device)

    def _call(self, target: Any, args: tuple[Any, ...], meta: Meta, **kwargs: Any) -> fx.Node:
        return self.local.call(target, args, kwargs, meta, "causal_mask")
