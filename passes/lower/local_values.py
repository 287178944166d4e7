"""How a value stands on one rank: local shapes, and a conversion in terms of local tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, R
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.kernels.collective.members import Member

Shape = tuple[int, ...]
Division = tuple[str, str, int]
"""Layout and split (as texts) and unit of one side of ``mllm::convert``."""


@dataclass(frozen=True)
class LocalRank:
    """One rank's places along the axes of a module, the outer axis first."""

    axes: tuple[MeshAxis, ...]
    places: tuple[int, ...]

    @staticmethod
    def of(axes: tuple[MeshAxis, ...], places: Mapping[str, int]) -> "LocalRank":
        """The rank at these places, given by name of the axis."""
        return LocalRank(axes, tuple(places[axis.name] for axis in axes))

    @property
    def members(self) -> Mapping[str, Member]:
        """For ``collective.members`` while shapes are traced."""
        pairs = zip(self.axes, self.places, strict=True)
        return {axis.name: Member(place, axis.size) for axis, place in pairs}

    def shape(self, shape: Shape, layouts: Layouts) -> Shape:
        """Global shape -> local shape."""
        return _shape(self, shape, layouts)

    def division(self, shape: Shape, layouts: Layouts, at: int, layout: Layout) -> Division:
        """One side of a conversion along axis ``at``, with the other axes as in ``layouts``.

        No inner axis may divide the factor of ``layout`` at that time. Raises PlanError where other
        axes divide the dim across this factor, or leave a length that does not divide.
        """
        if not layout.divided:
            return str(layout), "", 0
        others = (*layouts[:at], R, *layouts[at + 1 :])
        length = self.shape(shape, others)[layout.dim]
        outer, size = layout.outer, layout.size
        for place, (other, axis) in enumerate(zip(others, self.axes, strict=True)):
            if other.divided and other.dim == layout.dim and length:
                held = axis.split(other.size).sizes[self.places[place]]
                if other.outer * other.size <= layout.outer:
                    outer = outer * held // other.size
                elif other.outer == layout.outer and self.axes[at].name == "context":
                    size = size * held // other.size
        unit, rest = divmod(length, max(outer * size, 1))
        if rest:
            where = f"{self.axes[at].name}: {layout} beside {[str(other) for other in others]}"
            raise PlanError(
                explain(where, expected=f"a multiple of {outer * size}", got=str(length))
            )
        local = Layout("S", layout.dim, outer, size)
        return str(local), str(self.axes[at].split(size)), unit


@lru_cache(maxsize=65536)
def _shape(rank: LocalRank, shape: Shape, layouts: Layouts) -> Shape:
    divided = tuple(layout if layout.divided else R for layout in layouts)
    return Holding.of(shape, divided, rank.axes, rank.places).shape


def divided_in(layouts: Sequence[Layout], dims: Sequence[int]) -> bool:
    """Whether any axis divides one of the dims."""
    return any(layout.divided and layout.dim in dims for layout in layouts)
