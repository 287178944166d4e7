"""Plans how one value gets from the ranks that hold it to the ranks that need it.

Pure arithmetic on intervals: any holdings to any other, on the same ranks, other ones, or some of
both. Every element that a rank needs reaches it once: from itself if it holds it, else from one of
the ranks that do. What several ranks hold, they send in equal shares. Nothing else moves, so a
rank receives exactly the elements that it needs and does not hold.

The adjoint is the same function with the roles swapped: replicas of a value have the same gradient,
so each rank that held an element gets its gradient once, from one of the ranks that needed it.

Source: interval intersection as in arXiv 2112.01075 (cross-mesh resharding), without its broadcast.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mllm_compile.compiler import regions
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.regions import Region

Holdings = Mapping[int, Holding]
"""By rank; all of the same value."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """Elements that rank ``source`` sends to rank ``target``; both may be the same rank.

    The regions are those of the two local tensors; the k-th index of a dim in one of them is the
    k-th in the other.
    """

    source: int
    target: int
    source_region: Region
    target_region: Region

    @property
    def size(self) -> int:
        """The number of elements that move."""
        return regions.size(self.source_region)


def reshard(value: str, sources: Holdings, targets: Holdings) -> tuple[Move, ...]:
    """The moves of one value, in the order in which both ends of every channel take them.

    Args:
        value: its name, for messages.
        sources: what ranks hold of it.
        targets: what ranks need of it.

    Raises:
        PlanError: a rank needs elements that no rank holds; or the moves break the law, which would
            be a fault of this file.
    """
    try:
        return _reshard(tuple(sources.items()), tuple(targets.items()))
    except PlanError as error:
        raise PlanError(f"value {value}: {error}") from error


@lru_cache(maxsize=1024)
def _reshard(
    sources: tuple[tuple[int, Holding], ...], targets: tuple[tuple[int, Holding], ...]
) -> tuple[Move, ...]:
    holds, needs = dict(sources), dict(targets)
    moves = []
    shared: dict[tuple[int, ...], list[tuple[int, Region]]] = {}
    for holders, users, cell in _cells(holds, needs):
        for user in users:
            if user in holders:
                moves.append((user, user, cell))
            elif holders:
                shared.setdefault(holders, []).append((user, cell))
            else:
                got = f"none for elements {regions.text(cell)}"
                raise PlanError(explain(f"rank {user}", expected="ranks that hold it", got=got))
    for holders, demands in shared.items():
        moves += _shares(holders, demands)
    made = sorted(
        Move(source, target, _local(holds[source], cell), _local(needs[target], cell))
        for source, target, cell in moves
    )
    check_moves(holds, needs, made)
    return tuple(made)


def _cells(
    holds: Holdings, needs: Holdings
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Region]]:
    """Cells of elements that the same ranks hold and the same ranks need: those ranks, the cell."""
    ranks = (*holds, *needs)
    parts = [holding.region for holding in (*holds.values(), *needs.values())]
    needed = ((1 << len(needs)) - 1) << len(holds)
    for bits, cell in regions.cells(parts, needed):
        inside = [at for at in range(len(parts)) if bits >> at & 1]
        holders = tuple(ranks[at] for at in inside if at < len(holds))
        yield holders, tuple(ranks[at] for at in inside if at >= len(holds)), cell


def _shares(
    holders: tuple[int, ...], demands: Sequence[tuple[int, Region]]
) -> Iterator[tuple[int, int, Region]]:
    """All demands in a row, cut into equal shares: the n-th share comes from the n-th holder."""
    count, total = len(holders), sum(regions.size(cell) for _, cell in demands)
    begin = 0  # in elements times count; a share has ``total`` of these
    for user, cell in demands:
        end = begin + regions.size(cell) * count
        for share in range(begin // total, -(-end // total)):
            first, last = max(total * share, begin), min(total * (share + 1), end)
            part = _portion(cell, count, (first - begin, last - begin, end - begin))
            if regions.size(part):
                yield holders[share], user, part
        begin = end


def _portion(cell: Region, count: int, portion: tuple[int, int, int]) -> Region:
    """From first/whole to last/whole of a cell, in rows of a dim that is easy to cut in shares."""
    first, last, whole = portion
    if (first, last) == (0, whole):
        return cell
    lengths = regions.shape(cell)
    even = [dim for dim, number in enumerate(lengths) if number % count == 0]
    dim = min(even, default=max(range(len(lengths)), key=lengths.__getitem__, default=-1))
    if dim < 0:  # one number: whole or nothing
        return cell if first == 0 else (((0, 0),),)
    start, stop = ((2 * lengths[dim] * edge + whole) // (2 * whole) for edge in (first, last))
    part = regions.take(cell[dim], regions.interval(start, stop))
    return (*cell[:dim], part, *cell[dim + 1 :])


def _local(holding: Holding, cell: Region) -> Region:
    pairs = zip(holding.region, cell, strict=True)
    return tuple(regions.locate(indices, wanted) for indices, wanted in pairs)


def check_moves(sources: Holdings, targets: Holdings, moves: Sequence[Move]) -> None:
    """The law: every rank gets each element that it needs exactly once, as the element that it is.

    Raises:
        PlanError: the first move or element that is wrong; names ranks and elements.
    """
    for move in moves:
        sent = _whole_region(sources, move.source, move.source_region)
        received = _whole_region(targets, move.target, move.target_region)
        if sent != received:
            where = f"rank {move.source} -> rank {move.target}"
            expected = f"elements {regions.text(received)}"
            raise PlanError(explain(where, expected=expected, got=regions.text(sent)))
    for rank, holding in targets.items():
        _check_coverage(rank, holding, [move for move in moves if move.target == rank])


def _check_coverage(rank: int, holding: Holding, moves: Sequence[Move]) -> None:
    parts = [Holding.whole(holding.shape).region, *(move.target_region for move in moves)]
    for bits, cell in regions.cells(parts, 1):
        senders = [move.source for at, move in enumerate(moves, 1) if bits >> at & 1]
        if len(senders) != 1:
            where = f"rank {rank}, elements {regions.text(_global(holding, cell))}"
            got = f"it {len(senders)} times, from ranks {senders}" if senders else "nothing"
            raise PlanError(explain(where, expected="each element once", got=got))


def _whole_region(holdings: Holdings, rank: int, region: Region) -> Region:
    """A region of a rank's local tensor as indices into the whole value."""
    try:
        Holding(region)
        return _global(holdings[rank], region)
    except (KeyError, ValueError, PlanError) as error:
        where = f"rank {rank}, region {regions.text(region)}"
        raise PlanError(explain(where, expected="a part of what the rank holds")) from error


def _global(holding: Holding, region: Region) -> Region:
    pairs = zip(holding.region, region, strict=True)
    return tuple(regions.take(indices, positions) for indices, positions in pairs)
