"""Find the factors that the operators of a graph have in common.

A matrix product knows ``m k, k n -> m n``; only the views around it know that ``m`` is (samples
tokens) and ``n`` is (heads size). Known boundaries inside of dims (*points*: numbers of elements
inside of a boundary) travel along the edges of the graph until no operator learns a new one; then
every factor is cut at its points. Points of one dim divide each other: one that does not fit to
those already found is dropped, which only costs strategies.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

from torch import fx

from mllm_compile.compiler.graph import is_element
from mllm_compile.passes.sharding.factors import Dims, Factors
from mllm_compile.passes.sharding.rules import factors_of
from mllm_compile.passes.sharding.values import Value, operands, shape_of

Points = tuple[int, ...]
"""Descending, each a multiple of the next."""


class Classes:
    """Equivalence classes of anything hashable (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, item: Hashable) -> Hashable:
        """The representative of an item's class; a new item is a class of its own."""
        parent = self._parent
        root = parent.setdefault(item, item)
        while parent[root] is not root:
            root = parent[root]
        while item is not root:
            parent[item], item = root, parent[item]
        return root

    def union(self, a: Hashable, b: Hashable) -> None:
        """Make two classes one."""
        self._parent[self.find(b)] = self.find(a)


@dataclass(frozen=True)
class Refinement:
    """``factors`` of every computing node that has a rule, cut at all points found.

    Elements of tuples are seen through: they have no factors of their own. A *class* is a set of
    factors and parts of dims that run together through the graph: tokens, samples, heads, experts,
    hidden size. Classes compare equal within one refinement.
    """

    factors: Mapping[fx.Node, Factors]
    points: Mapping[tuple[Value, int], Points]
    classes: Classes = field(repr=False)

    def parts(self, value: Value) -> tuple[tuple[int, ...], ...]:
        """For every dim of a value the sizes of its parts, the outer one first."""
        found = []
        for dim, size in enumerate(shape_of(value)):
            chain = (size, *self.points.get((value, dim), ()), 1)
            found.append(tuple(a // b for a, b in pairwise(chain)))
        return tuple(found)

    def factor_class(self, node: fx.Node, factor: str) -> Hashable:
        """The class of a factor of a node."""
        return self.classes.find((node, factor))

    def part_class(self, value: Value, dim: int, outer: int, size: int) -> Hashable:
        """The class of a part of a dim: ``size`` elements, ``outer`` elements outside of it."""
        return self.classes.find((value, dim, outer, size))


@lru_cache(maxsize=1)
def refined(main: fx.GraphModule) -> Refinement:
    """The refinement of a captured graph, which is read-only."""
    return refine(main.graph.nodes)


def refine(nodes: Iterable[fx.Node]) -> Refinement:
    """Refine the rules of all computing nodes among ``nodes``."""
    known: dict[fx.Node, Factors] = {}
    for node in nodes:
        if node.op == "call_function" and not is_element(node):
            factors = factors_of(node)
            if factors is not None:
                known[node] = factors
    search = _Search(known)
    cut: dict[Hashable, Factors] = {}
    refined: dict[fx.Node, Factors] = {}
    for node, factors in known.items():
        points = search.points_of(node, factors)
        key = id(factors), points
        if key not in cut:
            cut[key] = factors.cut(dict(points)) if points else factors
        refined[node] = cut[key]
    return Refinement(refined, search.points_of_dims(), _classes(refined))


def _tensors(node: fx.Node, factors: Factors) -> Iterator[tuple[Value, Dims]]:
    """The arguments and results of a node with their dims."""
    yield from zip(operands(node), factors.inputs, strict=True)
    yield from (((node, index), dims) for index, dims in enumerate(factors.results))


def _classes(refined: Mapping[fx.Node, Factors]) -> Classes:
    """Factors of neighbours that stand for the same part of a dim are one class."""
    classes = Classes()
    for node, factors in refined.items():
        for value, dims in _tensors(node, factors):
            for dim, names in enumerate(dims):
                outer = 1
                for name in names:
                    size = factors.sizes[name]
                    if name not in factors.whole:
                        classes.union((node, name), (value, dim, outer, size))
                    outer *= size
    return classes


@dataclass(frozen=True, slots=True)
class _Relation:
    """``inside`` elements of a dim are inside of one of its factors."""

    dim: Hashable
    factor: Hashable
    inside: int


class _Search:
    """Points of dims and factors, by class: a dim that is one factor has that factor's points.

    Only dims of several factors relate different classes; classes that learned a point wait.
    """

    def __init__(self, known: Mapping[fx.Node, Factors]) -> None:
        self.classes = Classes()
        self.dims: dict[tuple[Value, int], None] = {}
        self.sizes: dict[Hashable, int] = {}
        self.points: dict[Hashable, set[int]] = {}
        self.waiting: deque[tuple[Hashable, int]] = deque()
        composed = [item for node in known for item in self._meet(node, known[node])]
        self.sizes = {self.classes.find(item): size for item, size in self.sizes.items()}
        self.relations: dict[Hashable, set[_Relation]] = {}
        for dim, factor, inside, outside in composed:
            root = self.classes.find(dim)
            self._learn(root, inside)
            self._learn(root, outside)
            if factor is not None:
                relation = _Relation(root, self.classes.find(factor), inside)
                for end in (relation.dim, relation.factor):
                    self.relations.setdefault(end, set()).add(relation)
        while self.waiting:
            self._spread(*self.waiting.popleft())

    def _meet(
        self, node: fx.Node, factors: Factors
    ) -> Iterator[tuple[Hashable, Hashable | None, int, int]]:
        """Join dims of one factor with it; give (dim, factor, inside, inside with the factor)."""
        fixed = factors.whole | factors.special
        for value, dims in _tensors(node, factors):
            for dim, names in enumerate(dims):
                if not names:
                    continue
                place = value, dim
                self.dims[place] = None
                if len(names) == 1 and names[0] not in fixed:
                    self.classes.union((node, names[0]), place)
                    self.sizes[place] = factors.sizes[names[0]]
                    continue
                inside = 1
                for name in reversed(names):
                    size = factors.sizes[name]
                    key = None if name in fixed else (node, name)
                    if key is not None:
                        self.sizes[key] = size
                    yield place, key, inside, inside * size
                    inside *= size
                self.sizes[place] = inside

    def _learn(self, root: Hashable, point: int) -> None:
        """Take a point in, unless it is known, trivial or at odds with those that are known."""
        size, known = self.sizes[root], self.points.setdefault(root, set())
        if point in known or not 1 < point < size or size % point:
            return
        if all(point % other == 0 or other % point == 0 for other in known):
            known.add(point)
            self.waiting.append((root, point))

    def _spread(self, root: Hashable, point: int) -> None:
        for relation in self.relations.get(root, ()):
            if root is relation.factor:
                self._learn(relation.dim, point * relation.inside)
            if root is relation.dim and point % relation.inside == 0:
                self._learn(relation.factor, point // relation.inside)

    def _chain(self, item: Hashable) -> Points:
        return tuple(sorted(self.points.get(self.classes.find(item), ()), reverse=True))

    def points_of(self, node: fx.Node, factors: Factors) -> tuple[tuple[str, Points], ...]:
        """The points of a node's factors, for those that have any."""
        fixed = factors.whole | factors.special
        chains = ((name, self._chain((node, name))) for name in factors.sizes if name not in fixed)
        return tuple((name, chain) for name, chain in chains if chain)

    def points_of_dims(self) -> dict[tuple[Value, int], Points]:
        """The points of every dim that has any."""
        chains = ((place, self._chain(place)) for place in self.dims)
        return {place: chain for place, chain in chains if chain}
