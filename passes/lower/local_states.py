"""What a conversion in a localized graph makes of a value, by the elements that ranks hold."""

from dataclasses import dataclass
from functools import lru_cache

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, R
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.compiler.split import Split
from mllm_compile.passes.lower.local_values import Division, LocalRank, Shape


@dataclass(frozen=True, slots=True)
class Held:
    """A local tensor: the value of the stage that it is part of, that one's shape, its layouts."""

    value: str
    shape: Shape
    layouts: Layouts

    def __str__(self) -> str:
        return f"%{self.value} in {' '.join(map(str, self.layouts))}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Intervals of causality that lowering made, or a step on the way there.

    ``positions`` of the rows, ``end``: how far behind them their keys end, ``within``: the
    intervals of the model, or the number of all keys, once they are in.
    """

    positions: Holding
    end: int = 0
    within: Held | int | None = None

    def __str__(self) -> str:
        where = f"{self.within} keys" if isinstance(self.within, int) else self.within
        return f"intervals up to {self.end} behind the rows {self.positions.region} within {where}"


@lru_cache(maxsize=65536)
def stands(rank: LocalRank, shape: Shape, layouts: Layouts, at: int, division: Division) -> bool:
    """Whether one side of a conversion along axis ``at`` is what ``layouts`` ask for.

    For an S that means: of what the other axes leave, the side gives every member of the axis the
    very elements, in the very order, that its place gives it.
    """
    layout, (text, split, unit) = layouts[at], division
    if not layout.divided:
        return division == (str(layout), "", 0)
    try:
        local, parts = Layout.parse(text), Split.parse(split).parts
        whole = holding(rank, shape, (*layouts[:at], R, *layouts[at + 1 :]))
        length = whole.shape[local.dim] if local.divided and local.dim < len(shape) else -1
        sizes = (local.dim, len(parts), Split.parse(split).length, local.outer * local.size * unit)
        if sizes != (layout.dim, rank.axes[at].size, local.size, length):
            return False
        return all(
            whole.divided(local.dim, local.outer, local.size, part)
            == holding(_moved(rank, at, place), shape, layouts)
            for place, part in enumerate(parts)
        )
    except (PlanError, ValueError):
        return False


def cut(rank: LocalRank, held: Holding, at: int, division: Division) -> Holding:
    """What a cut along axis ``at`` leaves this rank of something that all members hold."""
    local, split = Layout.parse(division[0]), Split.parse(division[1])
    return held.divided(local.dim, local.outer, local.size, split.parts[rank.places[at]])


def rows_of(rank: LocalRank, held: Held, dim: int) -> Holding:
    """The elements of one dim that this rank holds."""
    return Holding((holding(rank, held.shape, held.layouts).region[dim],))


def _moved(rank: LocalRank, at: int, place: int) -> LocalRank:
    return LocalRank(rank.axes, (*rank.places[:at], place, *rank.places[at + 1 :]))


@lru_cache(maxsize=65536)
def holding(rank: LocalRank, shape: Shape, layouts: Layouts) -> Holding:
    """The elements of a value that this rank holds."""
    divided = tuple(layout if layout.divided else R for layout in layouts)
    return Holding.of(shape, divided, rank.axes, rank.places)
