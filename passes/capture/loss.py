"""Takes the loss of a captured forward apart, or says why it cannot be split over microbatches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.capture.counts import Counts
from mllm_compile.passes.capture.denominators import LossTerms
from mllm_compile.passes.capture.functionalize import Functional
from mllm_compile.passes.capture.guards import Read
from mllm_compile.passes.capture.sample_terms import NotASum, check_terms
from mllm_compile.passes.capture.split import ancestors
from mllm_compile.passes.capture.spread import Spread, packet, place, value_of
from mllm_compile.passes.capture.spread_recipes import Recipes
from mllm_compile.passes.capture.spread_rules import spreads
from mllm_compile.passes.capture.tracing import FakeTensorMode


@dataclass(frozen=True)
class Loss:
    """The loss node to return, its denominators, and why it cannot be split ("" if it can)."""

    node: fx.Node
    denominators: tuple[fx.Node, ...] = ()
    reason: str = ""


def take_apart(
    found: Functional, loss: fx.Node, reads: Sequence[Read], fake_mode: FakeTensorMode
) -> Loss:
    """Write the loss in terms of denominators into the graph of ``found``."""
    graph, placeholders = found.graph.graph, found.placeholders
    needed = ancestors([loss])
    order = [node for node in graph.nodes if node in needed]
    constants = {
        node: found.constants[item.name]
        for node, item in placeholders.items()
        if item.kind == "constant"
    }
    recipes = Recipes(all(isinstance(read.value, bool) for read in reads), constants)
    spread = spreads(order, placeholders, recipes)
    counts = Counts(graph, fake_mode, value_of(loss).dtype)

    def suspicious(user: fx.Node, literal: Any) -> str:
        return _suspicious(user, literal, _sizes(spread), reads)

    terms = LossTerms(counts, spread, suspicious, constants)
    try:
        _refuse_updated(found, order)
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            node = terms.term(loss)
        check_terms(loss, order, spread.__getitem__, recipes)
        terms.globalize_scales(order)
        terms.check_literals(order, loss.meta.get("owner"))
    except NotASum as reason:
        return Loss(loss, (), str(reason))
    return Loss(node, tuple(counts.denominators))


def _refuse_updated(found: Functional, order: Sequence[fx.Node]) -> None:
    """Every microbatch updates a buffer again; what the loss sees of it then is another value."""
    for node, item in found.placeholders.items():
        if item.kind == "buffer" and item.name in found.updates and node in order:
            user = next(user for user in order if node in user.all_input_nodes)
            raise NotASum(f"{place(user)} depends on buffer {item.name}, which forward updates")


def _sizes(spread: dict[fx.Node, Spread]) -> set[int]:
    """Every size that may count samples, or the rows of samples."""
    sizes = set()
    for node, item in spread.items():
        shape = getattr(node.meta.get("val"), "shape", torch.Size())
        sizes |= {shape[dim] for dim in item.dims if dim < len(shape)}
        if node.op == "placeholder" and item.dims:
            sizes.add(shape[:2].numel())
    return sizes


def _suspicious(user: fx.Node, literal: Any, sizes: set[int], reads: Sequence[Read]) -> str:
    """A literal that equals a size of the batch, or a number read on the host, may be just that."""
    if not literal or not math.isfinite(literal):
        return ""
    inverse = 1 / literal
    whole = {int(x) for x in (literal, inverse) if x == int(x) and abs(x) > 1}
    if packet(user) is torch.ops.aten.div and isinstance(literal, int):
        whole.add(literal)  # 1 too: the size of a batch of one sample
    if whole & sizes:
        return f"{place(user)} scales the loss by {literal:g}, which may be a size of this batch"
    read = {read.value for read in reads if not isinstance(read.value, bool)}
    if whole & read:
        return f"{place(user)} scales the loss by {literal:g}, which was read on the host"
    return ""
