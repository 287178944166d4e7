"""What each axis may divide, told by classes of factors: those that run together in the graph.

``tokens``: the query tokens of attention (of its operator, of a softmax over keys, or of one that
is written out and begins with a maximum), what runs with them, and parts or joins of such dims.
``experts``: factors that choose one matrix of a stack of parameters. ``samples``: rows of batch
entries and the batches of attention, unless they are tokens too (packed sequences).

=========  ===================================================================================
context    tokens, and nothing else; divided wherever a gradient flows. Parameters stay whole.
expert     experts, and nothing else; stacks of matrices are divided.
tensor     anything but samples; matrices are divided. Tokens are divided where that pays
           (sequence parallelism).
=========  ===================================================================================

What must be divided is, wherever that is possible, whatever it costs; so is every contraction that
has a factor that the axis divides: no work is repeated on every rank for being cheap.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.sharding.factors import Factors
from mllm_compile.passes.sharding.refine import Refinement
from mllm_compile.passes.sharding.values import Value, operands

Class = Hashable
_OVER_KEYS = (
    torch.ops.mllm.attention.default,
    torch.ops.aten._softmax.default,
    torch.ops.aten.amax.default,
)


@dataclass(frozen=True)
class FactorClasses:
    """The classes that axes are told by; ``stacks`` are the contractions over experts."""

    refinement: Refinement
    tokens: frozenset[Class]
    experts: frozenset[Class]
    samples: frozenset[Class]
    stacks: frozenset[fx.Node]

    def allowed(self, axis: str, node: fx.Node, factor: str) -> bool:
        """Whether the axis may divide a factor of a node."""
        found = self.refinement.factor_class(node, factor)
        if axis == "context":
            return found in self.tokens
        if axis == "expert":
            return found in self.experts
        return found not in self.samples


def factor_classes(plan: Plan, graph: Graph, refinement: Refinement) -> FactorClasses:
    """Find the classes in the whole graph."""
    tokens: set[Class] = set()
    samples: set[Class] = set()
    stacks: dict[fx.Node, list[str]] = {}
    for node, factors in refinement.factors.items():
        if node.target in _OVER_KEYS and _over_keys(node, len(factors.inputs[0])):
            batch, *_, queries, _ = factors.inputs[0]
            tokens |= {refinement.factor_class(node, factor) for factor in queries}
            if node.target is torch.ops.mllm.attention.default:
                samples |= {refinement.factor_class(node, factor) for factor in batch}
        if node.name in plan.costs and plan.costs[node.name].total:
            stacks[node] = list(_batching(graph, node, factors))
    for node, item in graph.input_of.items():
        if item.kind == "batch":
            samples |= set(_parts(refinement, (node, 0), [0]))
    _spread(refinement, tokens)
    experts = {refinement.factor_class(node, name) for node, own in stacks.items() for name in own}
    return FactorClasses(
        refinement,
        frozenset(tokens),
        frozenset(experts),
        frozenset(samples - tokens),
        frozenset(node for node, own in stacks.items() if own),
    )


def _over_keys(node: fx.Node, rank: int) -> bool:
    """Whether an operator may be attention: a softmax over experts has them in another dim."""
    if rank < 3:
        return False
    if node.target is torch.ops.mllm.attention.default:
        return True
    dims = node.args[1] if len(node.args) > 1 else ()
    found = dims if isinstance(dims, (list, tuple)) else [dims]
    return [dim % rank for dim in found] == [rank - 1]  # type: ignore[operator]


def _parts(refinement: Refinement, value: Value, dims: Iterable[int]) -> Iterator[Class]:
    """The classes of the parts of some dims of a value."""
    parts = refinement.parts(value)
    for dim in dims:
        outer = 1
        for size in parts[dim] if dim < len(parts) else ():
            if size > 1:
                yield refinement.part_class(value, dim, outer, size)
            outer *= size


def _spread(refinement: Refinement, tokens: set[Class]) -> None:
    """A dim that an operator looks along, in argument and result alike, joins their classes.

    So a slice of tokens, or tokens behind one more, are tokens too.
    """
    joined = [
        {found for value, dims in ends for found in _parts(refinement, value, dims)}
        for node, factors in refinement.factors.items()
        for ends in _looked_along(node, factors)
    ]
    found = True
    while found:
        found = False
        for classes in joined:
            if not classes <= tokens and classes & tokens:
                tokens |= classes
                found = True


def _looked_along(node: fx.Node, factors: Factors) -> Iterator[list[tuple[Value, list[int]]]]:
    """Per dim that is whole in an argument and in a result of equal rank: where it is so."""
    tensors = [*zip(operands(node), factors.inputs, strict=True)]
    tensors += [((node, place), dims) for place, dims in enumerate(factors.results)]
    rank = len(factors.results[0]) if factors.results else 0
    for dim in range(rank):
        ends = [
            (value, [dim])
            for value, dims in tensors
            if len(dims) == rank and dims[dim] and factors.whole.issuperset(dims[dim])
        ]
        if any(value[0] is node for value, _ in ends) and len(ends) > 1:
            yield ends


def _batching(graph: Graph, node: fx.Node, factors: Factors) -> Iterator[str]:
    """Factors that choose a matrix of a stack of parameters."""
    has = [{name for dim in dims for name in dim} for dims in factors.inputs]
    made = {name for dims in factors.results for dim in dims for name in dim}
    weights = [value[0] in graph.weights for value in operands(node)]
    stacks = [names for names, weight in zip(has, weights, strict=True) if weight]
    others = [names for names, weight in zip(has, weights, strict=True) if not weight]
    for factor in factors.sizes:
        batched = factor in made and any(factor in names for names in others)
        if any(factor in names for names in stacks) and (batched or factor in factors.special):
            yield factor
