"""The loss as a sum over samples, divided by counts that come from outside.

A mean over the rows of a batch is not the sum of the means over its parts. Wherever the loss takes
one, ``mean(x) -> sum(x) / denominator``: the prologue computes this microbatch's own count, and a
step feeds the sum of the counts of all its microbatches. Then losses and gradients of microbatches
add up to those of the whole batch.

Rule: going up from the loss through linear operators, every path must end at a sum or mean over
rows that are neither pooled nor mixed (``spread``). A factor or divisor that depends on the batch
must be a scalar made from counts of inputs: each count becomes a denominator. A term that does not
depend on the batch is divided by the number of microbatches. A mean over a dim that does not carry
samples (hidden size, tokens of one sample, a list of losses) is the same in every split: it stays.
Anything else makes the program right for one microbatch only.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.counts import Counts
from mllm_compile.passes.capture.sample_terms import NotASum, check_term
from mllm_compile.passes.capture.spread import (
    Spread,
    extents,
    packet,
    place,
    reduced_dims,
    reduction_of,
    reduction_position,
    value_of,
)
from mllm_compile.passes.capture.spread_meeting import scaling_factor

aten = torch.ops.aten

# Linear in their first argument, whatever else they take.
LINEAR = {
    aten.neg, aten.clone, aten.alias, aten.detach, aten._to_copy, aten.view, aten._unsafe_view,
    aten.squeeze, aten.unsqueeze, aten.expand, aten.select, aten.slice, aten.permute, aten.t,
    aten.transpose, aten.sum, aten.mean, aten.unbind, aten.split,
}  # fmt: skip
NLL = (aten.nll_loss_forward, aten.nll_loss2d_forward)
MEAN, SUM = 1, 2  # values of the reduction argument of torch's losses


class LossTerms:
    """Rewrites one loss; ``suspicious`` says why a literal factor may be a size of the batch."""

    def __init__(
        self,
        counts: Counts,
        spread: dict[fx.Node, Spread],
        suspicious: Callable[[fx.Node, Any], str],
        constants: Mapping[fx.Node, torch.Tensor],
    ):
        self.counts, self.spread, self.suspicious = counts, spread, suspicious
        self.constants = constants
        self._terms: dict[fx.Node, fx.Node] = {}

    def term(self, node: fx.Node) -> fx.Node:
        """``node`` with its means over samples divided by denominators instead."""
        if node not in self._terms:
            self._terms[node] = self._rewrite(node)
        return self._terms[node]

    def _rewrite(self, node: fx.Node) -> fx.Node:
        spread = self.spread[node]
        if not spread.batch:
            return self.counts.call(node, aten.div.Tensor, node, self.counts.microbatches(node))
        if spread.mixed:
            raise NotASum(f"samples meet in {spread.mixed}")
        if spread.part is not None:
            check_term(node, spread)
            return node
        kind = packet(node)
        if kind in (aten.add, aten.sub):
            return self._copy(node, [self._part(item) for item in node.args])
        if self._pools(node):
            return self._reduction(node, kind)
        if kind in LINEAR or node.target is operator.getitem:
            return self._copy(node, [self._part(node.args[0]), *node.args[1:]])
        if kind in (aten.cat, aten.stack):
            items: Any = node.args[0]
            return self._copy(node, [[self._part(item) for item in items], *node.args[1:]])
        if kind is aten.where:
            condition, *branches = node.args
            return self._copy(node, [self._factor(condition), *map(self._part, branches)])
        if kind in (aten.mul, aten.div):
            return self._scaled(node, kind)
        raise NotASum(f"{place(node)} is not linear in the loss")

    def _pools(self, node: fx.Node) -> bool:
        """Whether this node is the reduction over samples (getitem: of its operator)."""
        source = node.args[0]
        if node.target is operator.getitem and isinstance(source, fx.Node):
            return self._pools(source)
        inputs = [self.spread[item] for item in node.all_input_nodes]
        return self.spread[node].pooled and not any(item.pooled for item in inputs)

    def _part(self, argument: Any) -> fx.Node:
        """One summand: a node, or a number, which every microbatch would add again."""
        if isinstance(argument, fx.Node):
            return self.term(argument)
        one = self.counts.microbatches(next(iter(self.spread)))
        return self.counts.call(one, aten.div.Tensor, self._number(one, argument), one)

    def _number(self, like: fx.Node, value: Any) -> fx.Node:
        device = value_of(like).device
        return self.counts.call(
            like, aten.full.default, [], value, dtype=self.counts.dtype, device=device
        )

    def _copy(self, node: fx.Node, args: list[Any]) -> fx.Node:
        return self.counts.call(node, node.target, *args, **node.kwargs)

    def _scaled(self, node: fx.Node, kind: Any) -> fx.Node:
        """A product or quotient: linear in one side, the other a factor."""
        left, right = node.args
        if kind is aten.div and not isinstance(left, fx.Node):
            raise NotASum(f"{place(node)} is not linear in the loss")
        sides = (
            [(left, right, False)]
            if kind is aten.div
            else [(left, right, False), (right, left, True)]
        )
        reasons = []
        for part, factor, swapped in sides:
            if not isinstance(part, fx.Node) or not self.spread[part].batch:
                continue
            try:
                self._refuse_count(node, part, factor)
                pair = [self.term(part), self._factor(factor, node)]
            except NotASum as reason:
                reasons.append(reason)
                continue
            return self._copy(node, pair[::-1] if swapped else pair)
        raise reasons[0]

    def _refuse_count(self, node: fx.Node, part: fx.Node, factor: Any) -> None:
        """A sum divided by a whole number, or scaled by a number of elements, may be a mean."""
        literals = self._literals(factor) if self._sums(part) else []
        for literal in literals:
            divides = packet(node) is aten.div and isinstance(literal, int) and abs(literal) != 2
            whole = (round(x) for x in (literal, 1 / literal) if math.isclose(x, round(x)))
            if divides or any(abs(x) > 1 and abs(x) in extents(self.spread) for x in whole):
                raise NotASum(
                    f"{place(node)} scales a sum by {literal:g}, which may count what is in this "
                    "batch (write it as a mean)"
                )

    def _sums(self, node: fx.Node) -> bool:
        """Whether a reduction over samples in this term is a sum that no count scales."""
        if self.spread[node].single:
            return True
        inputs = [item for item in node.all_input_nodes if self.spread[item].pooled]
        if not self._pools(node):
            counted = packet(node) in (aten.mul, aten.div) and len(inputs) > 1
            return not counted and any(self._sums(item) for item in inputs)
        source = node.args[0] if node.target is operator.getitem else node
        assert isinstance(source, fx.Node)
        if packet(source) in NLL:
            return bool(source.args[3] == SUM)
        if "reduction" in str(getattr(source.target, "_schema", "")):
            return reduction_of(source) == SUM
        return packet(source) is aten.sum

    def _literals(self, factor: Any) -> list[int | float]:
        """The finite numbers, zero apart, that a factor is made of without the batch."""
        if isinstance(factor, fx.Node):
            spread = self.spread[factor]
            if spread.batch or not spread.known:
                return []
            if any(self.spread[item].batch for item in factor.all_input_nodes):
                return [int(value_of(factor).numel())]  # filled in the shape of the batch
            return [x for item in (*factor.args, *self._held(factor)) for x in self._literals(item)]
        number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        return [factor] if number and factor and math.isfinite(factor) else []

    def _held(self, node: fx.Node) -> list[int | float]:
        """The number that a constant of the program holds."""
        constant = self.constants.get(node)
        if constant is None or constant.numel() != 1 or constant.is_complex():
            return []
        return [constant.item()]

    def _factor(self, argument: Any, user: fx.Node | None = None) -> Any:
        """A factor as it is for the whole batch: counts in it become denominators."""
        if not isinstance(argument, fx.Node):
            reason = self.suspicious(user, argument) if user is not None else ""
            if reason:
                raise NotASum(reason)
            return argument
        spread = self.spread[argument]
        if not spread.batch:
            return argument
        if not spread.known:
            raise NotASum(f"{place(argument)} depends on parameters, and scales the loss")
        kind, whole = packet(argument), value_of(argument).dim() == 0
        source = argument.args[0] if argument.args else None
        if whole and kind in (aten.sum, aten.count_nonzero):
            return self.counts.count(argument)
        if whole and kind is aten.mean:
            assert isinstance(source, fx.Node)
            total = self.counts.call(argument, aten.sum.default, source)
            size = self.counts.number(argument, value_of(source).numel())
            return self.counts.call(argument, aten.div.Tensor, self.counts.count(total), size)
        tags = getattr(argument.target, "tags", ())
        if whole and (torch.Tag.pointwise in tags or kind in (aten._to_copy, aten.clone)):
            return self._copy(argument, [self._factor(item) for item in argument.args])
        raise NotASum(f"{place(argument)} is no count that adds up over microbatches")

    def _reduction(self, node: fx.Node, kind: Any) -> fx.Node:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is operator.getitem:
            return self._nll(node, source)
        if kind is aten.sum:
            return node
        if kind is aten.mean:
            sizes = [value_of(source).shape[dim] for dim in reduced_dims(node)]
            keep = node.args[2] if len(node.args) > 2 else False
            total = self.counts.call(
                node, aten.sum.dim_IntList, source, sorted(reduced_dims(node)), keep, **node.kwargs
            )
            return self._over(total, self.counts.number(node, float(torch.Size(sizes).numel())))
        if "reduction" in str(getattr(node.target, "_schema", "")):
            return self._elementwise_loss(node, source)
        raise NotASum(f"{place(node)} is no sum or mean over samples")

    def _elementwise_loss(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """mse_loss and its kind: the mean is over elements."""
        if reduction_of(node) == SUM:
            return node
        position = reduction_position(node)
        args = [*node.args, *[None] * position][:position]
        size = self.counts.number(node, float(value_of(source).numel()))
        total = self._copy(node, [*args, SUM, *node.args[position + 1 :]])
        return self._over(total, size)

    def _over(self, total: fx.Node, denominator: fx.Node) -> fx.Node:
        return self.counts.call(total, aten.div.Tensor, total, denominator)

    def _nll(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Negative log-likelihood: its mean is over the weights of the labels that count."""
        logits, target, weight, reduction, ignored = source.args
        assert isinstance(target, fx.Node)
        if packet(source) not in NLL or node.args[1] != 0:
            raise NotASum(f"{place(source)}: its weight is used besides the loss")
        if reduction == SUM:
            return node
        if not self.spread[target].known or (
            isinstance(weight, fx.Node) and not self.spread[weight].known
        ):
            raise NotASum(f"{place(source)}: labels or weights depend on parameters")
        call = self.counts.call
        valid = call(source, aten.ne.Scalar, target, ignored)
        if isinstance(weight, fx.Node):
            zero = call(source, aten.zeros_like.default, target)
            label = call(source, aten.where.self, valid, target, zero)
            each = call(source, aten.index.Tensor, weight, [label])
            valid = call(source, aten.mul.Tensor, each, valid)
        count = self.counts.count(call(source, aten.sum.default, valid))
        total = call(source, source.target, logits, target, weight, SUM, ignored)
        return self._over(call(source, operator.getitem, total, 0), count)

    def check_literals(self, nodes: Iterable[fx.Node], owner: Any) -> None:
        """Rows that the module of the loss divides by a whole number: maybe a size of the batch."""
        for node in nodes:
            literal = node.args[1] if len(node.args) > 1 else None
            divides = packet(node) is aten.div and isinstance(literal, int)
            spread = self.spread[node]
            if divides and node.meta.get("owner") == owner and spread.rows and not spread.known:
                reason = self.suspicious(node, literal)
                if reason:
                    raise NotASum(reason)

    def globalize_scales(self, nodes: Iterable[fx.Node]) -> None:
        """Rows that are scaled by a count of inputs inside the model: make that count global."""
        for node in nodes:
            if packet(node) not in (aten.mul, aten.div) or not self.spread[node].rows:
                continue
            factor = scaling_factor(node, lambda item: self.spread[item])
            if factor is not None:
                with self.counts.graph.inserting_before(node):
                    node.replace_input_with(factor, self._factor(factor))
