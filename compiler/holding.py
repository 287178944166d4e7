"""Which elements of a value one rank holds, from the layouts of the value."""

from collections.abc import Sequence
from dataclasses import dataclass

from mllm_compile.compiler import regions
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.regions import Indices, Region


@dataclass(frozen=True, slots=True)
class Holding:
    """The product of the indices in ``region``, which are indices into the whole value.

    The local tensor of the rank has the elements in the order in which the indices stand.
    """

    region: Region

    def __post_init__(self) -> None:
        for indices in self.region:
            edges = [0, *(edge for pair in sorted(indices) for edge in pair)]
            if edges != sorted(edges) or any(start == stop for start, stop in indices):
                got = regions.text(self.region)
                raise PlanError(explain("holding", expected="every index once", got=got))

    @staticmethod
    def whole(shape: Sequence[int]) -> "Holding":
        """All elements, in order."""
        return Holding(tuple(regions.interval(0, number) for number in shape))

    @staticmethod
    def of(
        shape: Sequence[int],
        layouts: Sequence[Layout],
        axes: Sequence[MeshAxis],
        places: Sequence[int],
    ) -> "Holding":
        """What the rank at these places of the axes holds of a value of this shape.

        The axes stand with the outer one first. Where two of them divide the same factor of a dim,
        the inner one divides what the outer one left, equally on every rank.

        Raises:
            PlanError: a layout is neither R nor S, names a dim or a size that the value does not
                have, or does not divide what outer axes left.
        """
        held = Holding.whole(shape)
        outer_axes: list[_Division] = []
        for layout, axis, place in zip(layouts, axes, places, strict=True):
            if layout.kind == "R":
                continue
            if layout.kind != "S" or layout.dim >= len(shape):
                where = f"layout {layout} of a value of shape {list(shape)}"
                raise PlanError(explain(where, expected="R, or S of one of its dims"))
            before = held.shape[layout.dim]
            if before:
                outer, size = _local(layout, axis, before, outer_axes)
                held = held.divided(layout.dim, outer, size, axis.split(size).parts[place])
            outer_axes.append(_Division(layout, before, held.shape[layout.dim]))
        return held

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return regions.shape(self.region)

    @property
    def size(self) -> int:
        """The number of elements of the local tensor."""
        return regions.size(self.region)

    def divided(self, dim: int, outer: int, size: int, part: Indices) -> "Holding":
        """With ``dim`` seen as [outer, size, rest]: of the ``size`` in the middle these alone."""
        unit = self.shape[dim] // max(outer * size, 1)
        positions = tuple(
            ((row * size + start) * unit, (row * size + stop) * unit)
            for row in range(outer)
            for start, stop in part
        )
        return self._with(dim, regions.take(self.region[dim], regions.merged(positions)))

    def within(self, dim: int, outer: int, rows: int, offset: int, total: int) -> "Holding":
        """The same elements of a larger value, of which the value was a part.

        ``dim`` is seen as [outer, rows]; the larger value has ``total`` rows instead, of which this
        one's begin at ``offset``.
        """
        window = tuple(
            pair
            for row in range(outer)
            for pair in regions.interval(row * total + offset, row * total + offset + rows)
        )
        return self._with(dim, regions.take(regions.merged(window), self.region[dim]))

    def _with(self, dim: int, indices: Indices) -> "Holding":
        return Holding((*self.region[:dim], indices, *self.region[dim + 1 :]))


@dataclass(frozen=True, slots=True)
class _Division:
    """That an axis has divided a dim: its length before and after."""

    layout: Layout
    before: int
    after: int


def _local(
    layout: Layout, axis: MeshAxis, length: int, outer_axes: Sequence[_Division]
) -> tuple[int, int]:
    """``outer`` and ``size`` of a layout in what the outer axes left of its dim."""
    outer, size, rest = layout.outer, layout.size, 0
    for done in (item for item in outer_axes if item.layout.dim == layout.dim):
        other = done.layout
        if other.outer * other.size <= layout.outer:  # a factor outside of this one
            outer, rest = divmod(outer * done.after, done.before)
        elif other.outer != layout.outer:
            rest = other.outer < layout.outer * layout.size  # else a factor inside of this one
        elif axis.name == "context":  # this factor, whose elements are counted
            size, rest = divmod(size * done.after, done.before)
        if rest:
            where = f"{axis.name}: layout {layout} behind {other}"
            raise PlanError(explain(where, expected="factors that do not cross"))
    if not size or length % (outer * size):
        where = f"{axis.name}: layout {layout}"
        expected = f"a multiple of {outer * size} elements where outer axes have divided before"
        raise PlanError(explain(where, expected=expected, got=str(length)))
    return outer, size
