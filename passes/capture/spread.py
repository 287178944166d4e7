"""How the samples of a batch are spread over every value: what splitting a batch rests on.

A value *carries* samples in a dim if its rows along that dim belong to different samples. It is
*single* if it is one such row, *pooled* once it was reduced over such a dim, and *mixed* if its
rows depend on pooled values, on rows of other samples, or on a sample's place in the batch: then a
split of the batch changes it.

Assumed: batch entries carry samples in dim 0; what is computed from the batch alone without
floating point (positions, indices, masks), hoisted values, and what attention lets a token see,
stay within a sample; single rows, and parts of a split by sizes, meet those of their own sample.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.captured import Input

Part = tuple[range, int]
Recipe = frozenset[int]


@dataclass(frozen=True)
class Spread:
    """``batch``: depends on the batch; ``known``: on nothing but inputs (no parameter).

    ``places`` (dim, (outer, size)): within that carrying dim, samples are a factor of ``size``
    behind one of ``outer``, as in a view of [experts, tokens] as one dim; size 0 means the rest.
    ``part`` (rows, count): what is here of a value that was cut along a carrying dim.
    ``ranked``: an integer depends on its sample's place in the batch because of this operator.
    ``recipe``: how it is computed, whatever sample it is of (``spread_recipes``).
    ``varies`` (as places), ``numbered``: of a value without samples, and whether it counts a dim.
    """

    batch: bool = False
    known: bool = True
    dims: frozenset[int] = frozenset()
    places: frozenset[tuple[int, tuple[int, int]]] = frozenset()
    single: bool = False
    pooled: bool = False
    mixed: str = ""
    part: Part | None = None
    ranked: str = ""
    varies: frozenset[tuple[int, tuple[int, int]]] = frozenset()
    numbered: bool = False
    recipe: Recipe = frozenset()

    @property
    def rows(self) -> bool:
        """Depends on the batch, and every element on one sample alone."""
        return self.batch and not self.pooled and not self.mixed

    def over(self, dims: Iterable[int]) -> "Spread":
        """The same, carried in other dims."""
        return replace(self, dims=frozenset(dims), places=frozenset())

    def at(self, places: dict[int, tuple[int, int]]) -> "Spread":
        """The same, carried in other places."""
        return replace(self, dims=frozenset(places), places=frozenset(places.items()))

    def like(self, other: "Spread") -> "Spread":
        """The same, carried where ``other`` is."""
        return replace(self, dims=other.dims, places=other.places)

    def moved(self, new: Callable[[int], int | None]) -> "Spread":
        """The same, each carrying dim where ``new`` says; None where it is gone."""
        moved = ((new(dim), self.place_of(dim)) for dim in self.dims)
        return self.at({dim: place for dim, place in moved if dim is not None})

    def place_of(self, dim: int) -> tuple[int, int]:
        """(outer, size) within a carrying dim."""
        return dict(self.places).get(dim, (1, 0))


NOTHING = Spread()
LAST_BY_DEFAULT = (
    torch.ops.aten.topk.default,
    torch.ops.aten.sort.default,
    torch.ops.aten.sort.stable,
)
Lookup = Callable[[Any], Spread]
Rule = Callable[[fx.Node, Lookup], Spread]


def of_input(item: Input, value: torch.Tensor) -> Spread:
    """What a placeholder starts from."""
    if item.kind == "hoisted":  # where a helper's results carry samples is not known
        return Spread(batch=True)
    if item.kind == "batch":
        return Spread(batch=True).at({0: (1, value.shape[0])} if value.dim() else {})
    varies = frozenset((dim, (1, size)) for dim, size in enumerate(value.shape) if size > 1)
    return Spread(known=item.kind != "parameter", varies=varies)


def join(parts: Sequence[Spread]) -> Spread:
    """Dependence, pooling and mixing of a value computed from several; dims are left out."""
    mixed = next((part.mixed for part in parts if part.mixed), "")
    cut = [part.part for part in parts if part.part is not None]
    return Spread(
        batch=any(part.batch for part in parts),
        known=all(part.known for part in parts),
        single=any(part.single for part in parts),
        pooled=any(part.pooled for part in parts),
        mixed=mixed,
        part=max(cut, key=lambda item: item[1], default=None),
        ranked=next((part.ranked for part in parts if part.ranked), ""),
    )


def clash(parts: Iterable[Spread]) -> bool:
    """Whether different parts of one whole meet."""
    cut = {part.part for part in parts if part.part is not None}
    return len({count for _, count in cut}) < len(cut)


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two places within one dim share more than one row; places of unknown size do not."""
    if not one[1] or not other[1]:
        return False
    return one == other or (one[0] < math.prod(other) and other[0] < math.prod(one))


def place(node: fx.Node) -> str:
    """An operator and its source line, for reasons."""
    return f"{node.target} at {node.meta.get('where', '')}"


def value_of(node: fx.Node) -> Any:
    """The fake result of a node."""
    return node.meta["val"]


def reduced_dims(node: fx.Node, position: int = 1) -> set[int]:
    """The dims of its first argument that a reduction runs over; all if none is given."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    rank = value_of(source).dim()
    default = -1 if node.target in LAST_BY_DEFAULT else None
    dims: Any = (
        node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    )
    if dims is None or dims == []:
        return set(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % max(rank, 1) for dim in dims}


def after_reduction(node: fx.Node) -> Callable[[int], int | None]:
    """Where a reduction leaves the dims of its argument."""
    over = reduced_dims(node)
    keep = (len(node.args) > 2 and bool(node.args[2])) or bool(node.kwargs.get("keepdim"))
    rest = [dim for dim in range(rank_of(node.args[0])) if dim not in over]
    return lambda dim: None if dim in over else dim if keep else rest.index(dim)


def extents(spreads: Mapping[fx.Node, Spread]) -> set[int]:
    """Sizes of neighbouring dims together, one of which carries samples."""
    found = set()
    for node, spread in spreads.items():
        shape = getattr(node.meta.get("val"), "shape", ())
        for first, last in itertools.combinations(range(len(shape) + 1), 2):
            if spread.dims & set(range(first, last)):
                found.add(math.prod(shape[first:last]))
    return found


def mixing(node: fx.Node, joined: Spread) -> Spread:
    """The spread of a value whose rows depend on several samples because of this node."""
    return Spread(True, joined.known, joined.dims, mixed=joined.mixed or place(node))


def ranking(node: fx.Node, joined: Spread) -> Spread:
    """The spread of a value whose rows depend on their samples' places because of this node."""
    value = value_of(node)
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return replace(joined, ranked=joined.ranked or place(node))
    return mixing(node, joined)


def dim_argument(node: fx.Node, position: int = 1, default: int = 0) -> int:
    """An argument that names one dim of the first argument, counted from 0."""
    given: Any = (
        node.args[position] if len(node.args) > position else node.kwargs.get("dim", default)
    )
    return int(given) % max(rank_of(node.args[0]), 1)


def rank_of(argument: Any) -> int:
    """The number of dims of a tensor argument; 0 for a number."""
    return int(value_of(argument).dim()) if isinstance(argument, fx.Node) else 0


def packet(node: fx.Node) -> Any:
    """The operator of a node, whatever its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def reduction_position(node: fx.Node) -> int:
    """Where a loss operator takes its ``reduction`` argument."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return names.index("reduction")


def reduction_of(node: fx.Node) -> int:
    """0 none, 1 mean, 2 sum; torch's default is the mean."""
    position = reduction_position(node)
    given: Any = node.args[position] if len(node.args) > position else 1
    return int(node.kwargs.get("reduction", given))
