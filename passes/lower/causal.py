"""Attention that is causal by position, where a rank has some of the queries and all keys.

The operator's own rule counts from its first query. So the rule becomes intervals that end behind
this rank's query positions: these are divided as the queries are, whatever the split.
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
from mllm_compile.passes.sharding.exchange import ATTENTION, SEQUENCE

aten = torch.ops.aten


@dataclass
class CausalIntervals:
    """Those of one graph: one for all attentions with the same lengths and layouts."""

    local: LocalGraph
    ends: dict[Any, fx.Node] = field(default_factory=dict)
    made: dict[Any, fx.Node] = field(default_factory=dict)

    def explicit(
        self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any], layouts: Layouts
    ) -> tuple[Any, ...]:
        """Arguments of an attention with intervals instead of ``causal``, if queries are divided.

        ``layouts`` are those of the queries; ``args`` and ``kwargs`` have local values.
        """
        names = [item.name for item in schema_of(ATTENTION)]
        named = dict(zip(names, filled(node, args, kwargs), strict=True))
        rows = tuple(
            Layout("S", 0, layout.outer, layout.size)
            if layout.divided and layout.dim == SEQUENCE
            else R
            for layout in layouts
        )
        if named["causal"] and any(layout.divided for layout in rows):
            queries, keys = (node.args[i].meta["val"].shape[SEQUENCE] for i in (0, 1))  # type: ignore[union-attr]
            named["intervals"] = self._up_to_itself(
                named["intervals"], (queries, keys, rows), node.meta
            )
            named["causal"] = False
        return tuple(named.values())

    def _up_to_itself(
        self, intervals: fx.Node | None, key: tuple[int, int, Layouts], meta: Meta
    ) -> fx.Node:
        """``intervals``, or all keys, as far as they lie before the end of each query."""
        if key not in self.ends:
            self.ends[key] = self._ends(key[0], key[2], meta)
        if (intervals, key) not in self.made:
            within = intervals
            if within is None:  # from 0 to the number of keys
                within = self._call(aten.mul.Tensor, (self._numbers(2, meta), key[1]), meta)
            ends = self.ends[key]
            self.made[intervals, key] = self._call(aten.minimum.default, (within, ends), meta)
        return self.made[intervals, key]

    def _ends(self, queries: int, rows: Layouts, meta: Meta) -> fx.Node:
        """int32 [1, this rank's queries, 1, 1]: behind the last key that a query may see."""
        positions = Value("query_positions", (queries,), False, meta)
        positions.forms[(R,) * len(rows)] = self._numbers(queries, meta)
        own = self.local.form(positions, rows, meta)
        ends = self._call(aten.add.Tensor, (own, 1), meta)
        for dim in (0, -1, -1):
            ends = self._call(aten.unsqueeze.default, (ends, dim), meta)
        return ends

    def _numbers(self, length: int, meta: Meta) -> fx.Node:
        device = meta["val"][0].device
        return self._call(aten.arange.default, (length,), meta, dtype=torch.int32, device=device)

    def _call(self, target: Any, args: tuple[Any, ...], meta: Meta, **kwargs: Any) -> fx.Node:
        return self.local.call(target, args, kwargs, meta, "causal_intervals")
