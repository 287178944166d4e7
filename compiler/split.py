"""How the elements of one factor of a tensor dim are divided among the ranks of a mesh axis."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from mllm_compile.compiler.errors import PlanError, explain

Interval = tuple[int, int]
"""(start, stop), stop excluded."""


@dataclass(frozen=True)
class Split:
    """For every rank of an axis, in order, the intervals of ``range(length)`` that it holds.

    A rank holds its intervals one behind the other, in the order given. Together they cover every
    element exactly once; a rank may hold nothing.
    """

    parts: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        end = 0
        for start, stop in sorted(interval for part in self.parts for interval in part):
            if start != end or stop <= start:
                raise PlanError(
                    explain(f"split {self}", expected="every element on exactly one rank")
                )
            end = stop

    @staticmethod
    def contiguous(length: int, ranks: int) -> "Split":
        """Equal blocks in order; the first ``length % ranks`` ranks hold one element more."""
        return Split(tuple(((a, b),) if a < b else () for a, b in _blocks(length, ranks)))

    @staticmethod
    def zigzag(length: int, ranks: int) -> "Split":
        """Block r and block 2n - 1 - r of 2n blocks: balanced under a causal mask.

        Source: the load-balanced ring attention of Megatron-LM and of arXiv 2311.09431.
        """
        blocks = list(_blocks(length, 2 * ranks))
        pairs = ((blocks[rank], blocks[2 * ranks - 1 - rank]) for rank in range(ranks))
        return Split(tuple(tuple(_merged(pair)) for pair in pairs))

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(text: str) -> "Split":
        """The inverse of ``str``."""
        parts = []
        for part in text.split("|"):
            cells = [cell.split(":") for cell in part.split(",") if cell]
            parts.append(tuple((int(start), int(stop)) for start, stop in cells))
        return Split(tuple(parts))

    def times(self, unit: int) -> "Split":
        """The split in which ``unit`` elements stand for every element of this one."""
        scaled = (tuple((unit * start, unit * stop) for start, stop in part) for part in self.parts)
        return Split(tuple(scaled))

    def __str__(self) -> str:
        """``"0:2,6:8|2:6"``: ranks by ``|``, intervals by ``,``."""
        return "|".join(",".join(f"{a}:{b}" for a, b in part) for part in self.parts)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    @cached_property
    def length(self) -> int:
        """Number of elements that are divided."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements on every rank."""
        return tuple(sum(stop - start for start, stop in part) for part in self.parts)

    @property
    def even(self) -> bool:
        """Whether all ranks hold equally many elements."""
        return len(set(self.sizes)) == 1


def _blocks(length: int, count: int) -> Iterable[Interval]:
    small, larger = divmod(length, count)
    start = 0
    for block in range(count):
        stop = start + small + (block < larger)
        yield start, stop
        start = stop


def _merged(intervals: Sequence[Interval]) -> Iterable[Interval]:
    """Without empty ones; neighbours become one."""
    kept = [interval for interval in intervals if interval[0] < interval[1]]
    if len(kept) == 2 and kept[0][1] == kept[1][0]:
        return [(kept[0][0], kept[1][1])]
    return kept
