"""A graph under construction whose values are local, and their layouts.

Every call is run on fake tensors as it is added, so a shape that is wrong on this rank is found
here, with the name of its node.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.layout import R
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.kernels.collective.convert import convert
from mllm_compile.kernels.collective.members import members
from mllm_compile.passes.lower.conversions import path
from mllm_compile.passes.lower.local_values import LocalRank, Shape

Meta = Mapping[str, Any]
CONVERT = torch.ops.mllm.convert.default
assert convert is not None  # registers the operator


@dataclass
class Value:
    """One tensor of the whole program on this rank: its nodes, by the layouts they have.

    Without gradient R and V are the same.
    """

    name: str
    shape: Shape
    grad: bool
    meta: Meta
    forms: dict[Layouts, fx.Node] = field(default_factory=dict)

    def normal(self, layouts: Layouts) -> Layouts:
        """The layouts under which a form is kept."""
        if self.grad:
            return layouts
        return tuple(R if layout.kind == "V" else layout for layout in layouts)


class LocalGraph:
    """The graph of one rank."""

    def __init__(self, rank: LocalRank) -> None:
        self.rank = rank
        self.graph = fx.Graph()
        self._mode = FakeTensorMode()

    def placeholder(self, value: Value, layouts: Layouts) -> None:
        """An input; a part of a value is contiguous in the order of dims of the whole."""
        whole = value.meta["val"]
        spec = TensorSpec.of(whole)
        shape = self.rank.shape(value.shape, value.normal(layouts))
        if shape != value.shape:
            spec = TensorSpec.dense(torch.empty_strided(shape, spec.stride, device="meta"))
        with self._mode:
            val = torch.empty_strided(shape, spec.stride, dtype=whole.dtype, device=whole.device)
        node = self.graph.placeholder(value.name)
        node.meta = {**value.meta, "val": val}
        value.forms[value.normal(layouts)] = node

    def call(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        meta: Meta,
        name: str,
    ) -> fx.Node:
        """Add a call. PlanError if it cannot run on local values."""
        fakes = fx.map_arg((args, dict(kwargs)), lambda node: node.meta["val"])
        try:
            with torch.no_grad(), self._mode, members(self.rank.members):
                val = target(*fakes[0], **fakes[1])
        except Exception as error:
            where = meta.get("where", "")
            subject = f"%{name} = {target}" + (f" ({where})" if where else "")
            expected = "a call that fits the local values"
            raise PlanError(explain(subject, expected=expected, got=str(error))) from error
        node = self.graph.create_node("call_function", target, args, dict(kwargs), name)
        node.meta = {**meta, "val": val}
        return node

    def form(self, value: Value, layouts: Layouts, meta: Meta) -> fx.Node:
        """The value in these layouts: as it is, or by conversions that all its readers share.

        ``meta`` is the reader's, for conversions of inputs, which have no owner themselves.
        """
        want = value.normal(layouts)
        if want not in value.forms:
            found = [
                path(have, want, value.shape, self.rank.axes, value.grad) for have in value.forms
            ]
            for at, before, after in min(found, key=lambda item: item[0])[1]:
                if after not in value.forms:
                    value.forms[after] = self._convert(value, at, before, after, meta)
        return value.forms[want]

    def _convert(
        self, value: Value, at: int, before: Layouts, after: Layouts, meta: Meta
    ) -> fx.Node:
        axis = self.rank.axes[at].name
        try:
            sides = [
                self.rank.division(value.shape, before, at, layout)
                for layout in (before[at], after[at])
            ]
        except PlanError as error:
            raise PlanError(f"%{value.name}: {error}") from error
        (have, split_have, unit_have), (want, split_want, unit_want) = sides
        divisions = (split_have, split_want, unit_have, unit_want)
        meta = value.meta if "owner" in value.meta else {**meta, "val": None}
        name = f"{value.name}_{axis}_{after[at].kind}"
        arguments = (value.forms[before], have, want, axis, *divisions)
        return self.call(CONVERT, arguments, {}, meta, name)
