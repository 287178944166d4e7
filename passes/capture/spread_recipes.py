"""How values are computed, whatever sample they are of: all samples must be treated alike.

The *recipe* of a value is the computation that leads to it, without the places of rows that are cut
out along a carrying dim. Parts of one whole that are joined, or added up, must have one recipe: two
times the first sample plus the second is another loss in every split.

Once numbers of the batch were read on the host (not ``sized``), sizes, bounds and integers may be a
sample's own, and so may the way in which its rows are moved: recipes then leave these out.
"""

import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.captured import Input
from mllm_compile.passes.capture.opaque_function import CALLS
from mllm_compile.passes.capture.spread import (
    Lookup,
    Recipe,
    Spread,
    dim_argument,
    packet,
    rank_of,
    value_of,
)
from mllm_compile.passes.capture.spread_parts import CUTS, written_rows

aten = torch.ops.aten
mllm = torch.ops.mllm
LONGEST = 1024  # constants of more elements are known by their names
UNIFORM = {
    aten.zeros: 0, aten.zeros_like: 0, aten.new_zeros: 0,
    aten.ones: 1, aten.ones_like: 1, aten.new_ones: 1,
    aten.empty: None, aten.empty_like: None, aten.new_empty: None,
}  # fmt: skip
FILLED = {aten.full: 1, aten.full_like: 1, aten.new_full: 2, aten.scalar_tensor: 0}
SHAPED = {aten.view, aten._unsafe_view, aten.reshape, aten.expand}
MOVED = SHAPED | {
    aten.permute, aten.transpose, aten.t, aten.unsqueeze, aten.squeeze, aten.repeat, aten.select,
    aten.slice, aten.cat, aten.stack, aten.constant_pad_nd, aten.clone, aten.alias, aten.detach,
    aten._to_copy, aten.lift_fresh_copy, aten.select_scatter, aten.slice_scatter, aten.index,
    aten.index_put, aten.index_select, aten.unbind, aten.split, aten.split_with_sizes,
}  # fmt: skip
WRITES = {aten.select_scatter, aten.slice_scatter}
# a number of the call is among their arguments
KEYED = {mllm.function, mllm.mask, mllm.mask_intervals, mllm.hoisted}
RESIZED = {
    aten.linspace, aten.arange, aten.upsample_linear1d, aten.upsample_bilinear2d,
    aten.upsample_bicubic2d, aten._adaptive_avg_pool2d,
}  # fmt: skip


@dataclass(frozen=True)
class Recipes:
    """Numbers every computation; ``constants`` hold the values of placeholders, where known."""

    sized: bool = False
    constants: Mapping[fx.Node, torch.Tensor] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _plain: set[int] = field(default_factory=set)

    def of_input(self, node: fx.Node, item: Input) -> Recipe:
        """By name; of a small constant, by value, and where that is unknown all are alike."""
        if item.kind != "constant":
            return self._new(item.kind, item.name)
        held = self.constants.get(node)
        if held is None or held.numel() > LONGEST:
            return self._new("constant", item.name if self.constants else "")
        numbers = held.flatten().tolist()
        if len(set(numbers)) == 1:
            return self._uniform(numbers[0])
        return self._new("constant", held.dtype, held.shape, tuple(numbers))

    def of_call(self, node: fx.Node, spread: Spread, lookup: Lookup) -> Recipe:
        """The recipe of what an operator gives."""
        kind = packet(node)
        if kind in UNIFORM:
            return self._uniform(UNIFORM[kind])
        if kind in FILLED and not isinstance(node.args[FILLED[kind]], fx.Node):
            return self._uniform(_frozen(node.args[FILLED[kind]], lambda _: None))
        sources = {lookup(source).recipe for source in node.all_input_nodes}
        integers = self._uniform("integers")
        own = not self.sized and (spread.batch or not _picks_one(node))
        if _moves(node) and kind is not aten.constant_pad_nd and len(sources) == 1:
            recipe = next(iter(sources))
            if recipe <= self._plain and (own or recipe != integers):
                return recipe
        if own and not _has_floats(node):
            return integers
        found = self._neutral(node, lookup) or self._rows(node, spread, lookup)
        if found is None and own and _moves(node):
            moved = frozenset[int]().union(*sources)
            found = moved - self._plain or moved
        return found or self._call(node, spread, lookup)

    def with_term(self, node: fx.Node, position: int, term: Recipe, lookup: Lookup) -> Recipe:
        """``node`` computed with one term of a sum where the sum is argument ``position``."""
        if packet(node) is aten.add:
            if not position or not node.kwargs:
                return term
            return self._new("alpha", _frozen(node.kwargs, lambda _: None), term)
        others = (lookup(s).recipe for i, s in enumerate(node.all_input_nodes) if i != position)
        literals = _frozen((node.args, node.kwargs), lambda _: None)
        return self._new("term", node.target, position, term, literals, *others)

    def _new(self, *key: Hashable) -> Recipe:
        return frozenset({self._numbers.setdefault(key, len(self._numbers))})

    def _uniform(self, value: Hashable) -> Recipe:
        """One number everywhere, or numbers that say where things are."""
        recipe = self._new("uniform", value)
        self._plain.update(recipe)
        return recipe

    def _neutral(self, node: fx.Node, lookup: Lookup) -> Recipe | None:
        """Of x + 0, and of x copied into anything: that of x."""
        if packet(node) is aten.copy:
            return lookup(node.args[1]).recipe
        if packet(node) is not aten.add or node.kwargs:
            return None
        zero = self._uniform(0)
        for item, other in (node.args[:2], node.args[1::-1]):
            nothing = lookup(other).recipe == zero if isinstance(other, fx.Node) else other == 0
            if isinstance(item, fx.Node) and nothing:
                return lookup(item).recipe
        return None

    def _rows(self, node: fx.Node, spread: Spread, lookup: Lookup) -> Recipe | None:
        """Rows cut along a carrying dim, wherever they lie; rows written, as they are."""
        kind, source = packet(node), next(iter(node.all_input_nodes), None)
        if source is None:
            return None
        if kind in WRITES and lookup(node.args[1]).part == written_rows(node):
            return lookup(node.args[1]).recipe
        if node.target is operator.getitem and packet(source) in CUTS:
            node, source = source, source.all_input_nodes[0]
        elif kind not in (aten.select, aten.slice):
            return None
        if dim_argument(node, CUTS.get(packet(node), 1)) not in lookup(source).dims:
            return None
        if not spread.batch:  # rows that nothing was written into yet
            while packet(source) in WRITES:
                source = source.all_input_nodes[0]
        whole = lookup(source).recipe
        return whole if whole <= self._plain or not self.sized else self._new("row", whole)

    def _call(self, node: fx.Node, spread: Spread, lookup: Lookup) -> Recipe:
        args: Any = node.args
        if packet(node) in SHAPED and len(args[1]) == rank_of(node):
            kept = [None if d in spread.dims else size for d, size in enumerate(args[1])]
            args = (args[0], kept, *args[2:])
        if packet(node) in KEYED:
            call = CALLS.get(args[1]) if packet(node) is mllm.function else None
            args = (call and (call.cls, call.args), *node.all_input_nodes)
        if not self.sized and packet(node) in RESIZED:
            args = tuple(node.all_input_nodes)
        return self._new(node.target, _frozen((args, node.kwargs), partial(self._operand, lookup)))

    def _operand(self, lookup: Lookup, node: fx.Node) -> Hashable:
        """A recipe and, where sizes tell samples apart, those of dims without samples."""
        spread, shape = lookup(node), getattr(value_of(node), "shape", ())
        if not self.sized:
            return spread.recipe
        return spread.recipe, tuple(n for d, n in enumerate(shape) if d not in spread.dims)


def _frozen(argument: Any, recipe: Callable[[fx.Node], Any]) -> Hashable:
    """Arguments of a call as one key."""
    if isinstance(argument, fx.Node):
        return recipe(argument)  # type: ignore[no-any-return]
    if isinstance(argument, Mapping):
        return tuple((name, _frozen(item, recipe)) for name, item in argument.items())
    if isinstance(argument, (tuple, list)):
        return tuple(_frozen(item, recipe) for item in argument)
    return argument if isinstance(argument, Hashable) else repr(argument)


def _moves(node: fx.Node) -> bool:
    cuts = node.target is operator.getitem and packet(node.all_input_nodes[0]) in CUTS
    return cuts or packet(node) in MOVED


def _picks_one(node: fx.Node) -> bool:
    """Whether the result is one number, or one row."""
    return packet(node) is aten.select or getattr(value_of(node), "shape", None) == ()


def _has_floats(node: fx.Node) -> bool:
    value = value_of(node)
    values = value if isinstance(value, (tuple, list)) else [value]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
