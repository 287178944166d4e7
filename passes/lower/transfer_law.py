"""The law of transfers: the lists of both ends of a boundary are one exchange.

The moves are read off the lists alone, as the executor will: the n-th piece that a rank sends to
another is the n-th that this one receives from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from mllm_compile.compiler import regions
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.pass_runner import check
from mllm_compile.compiler.program import Piece, Transfer
from mllm_compile.compiler.reshard import Holdings, Move, check_moves
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.crossings import Crossing, Plans, crossings
from mllm_compile.passes.lower.transfers import Transfers, transfers

TransfersOf = Callable[[int, int], Transfers]
"""Of (stage, rank)."""


class Links:
    """The transfers of all ranks in one microbatch, made when they are asked for."""

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self._made: dict[tuple[int, int], Transfers] = {}
        self._checked: set[tuple[int, int, int]] = set()

    def of(self, stage: int, rank: int) -> Transfers:
        """Those of a rank in one of its stages, as :func:`transfers` makes them."""
        if (stage, rank) not in self._made:
            at = self.plans[0][0].stages[stage]
            self._made[stage, rank] = transfers(at, rank, self.plans)
        return self._made[stage, rank]

    def checked(self, stage: int, rank: int) -> Transfers:
        """The same; PlanError unless both ends of every boundary of the stage fit together."""
        at = self.plans[0][0].stages[stage]
        lane = Mesh.of_stage(self.plans[0][0].request, at).lane(rank)
        for boundary in self.plans[at.module][lane].boundaries:
            key = boundary.source, boundary.target, lane
            if stage in key[:2] and key not in self._checked:
                check(pieces_pair_up, self.of, boundary, at, lane, self.plans, after="transfers")
                self._checked.add(key)
        return self.of(stage, rank)


def pieces_pair_up(
    links: TransfersOf, boundary: Boundary, stage: Stage, lane: int, plans: Plans
) -> None:
    """What one rank sends another receives, and each element that a rank needs arrives once.

    The exchange over a ``boundary`` of one ``lane`` of a ``stage`` at one of its ends, with all
    lanes of the other end that take part in it.
    """
    values = list(crossings(stage, lane, boundary, plans))
    for backward in (False, True):
        travelling = [value for value in values if value.flows or not backward]
        if travelling:
            _Exchange(links, boundary, backward, travelling).check()


@dataclass(frozen=True)
class _Exchange:
    """What goes over a boundary in one direction."""

    links: TransfersOf
    boundary: Boundary
    backward: bool
    values: Sequence[Crossing]

    @property
    def stages(self) -> tuple[int, int]:
        """Where it starts and ends."""
        ends = self.boundary.source, self.boundary.target
        return ends[::-1] if self.backward else ends

    def holdings(self, value: Crossing) -> tuple[Holdings, Holdings]:
        """What ranks have of the value, or of its gradient, and what they need of it."""
        ends = value.sources, value.targets
        return ends[::-1] if self.backward else ends

    def check(self) -> None:
        moves = list(self.moves())
        for place, value in enumerate(self.values):
            try:
                check_moves(*self.holdings(value), [move for at, move in moves if at == place])
            except PlanError as error:
                name = f"d%{value.name}" if self.backward else f"%{value.name}"
                where = "{} from stage {} to {}".format(name, *self.stages)
                raise PlanError(f"{where}: {error}") from error

    def moves(self) -> Iterator[tuple[int, Move]]:
        """(place of the value, move) of all channels."""
        way = "backward" if self.backward else "forward"
        sources, targets = self.holdings(self.values[0])
        sent = {rank: self._pieces(rank, f"sends_{way}", 0) for rank in sources}
        taken = {rank: self._pieces(rank, f"receives_{way}", 1) for rank in targets}
        channels = {(rank, piece.rank): None for rank in sent for _, piece in sent[rank]}
        channels |= {(piece.rank, rank): None for rank in taken for _, piece in taken[rank]}
        for source, target in channels:
            mine = [(at, piece) for at, piece in sent.get(source, ()) if piece.rank == target]
            theirs = [(at, piece) for at, piece in taken.get(target, ()) if piece.rank == source]
            for one, other in zip_longest(mine, theirs):
                yield _paired(f"rank {source} -> rank {target}", one, other, source, target)

    def _pieces(self, rank: int, kind: str, end: int) -> list[tuple[int, Piece]]:
        """The pieces of a rank, with the place of their value among those that travel."""
        stage, peer = self.stages[:: -1 if end else 1]
        where = f"rank {rank}, stage {stage}, {kind} with stage {peer}"
        made: tuple[Transfer, ...] = self.links(stage, rank)[kind]  # type: ignore[literal-required]
        found = [transfer for transfer in made if transfer.peer == peer]
        if len(found) != 1 or len(found[0].values) != len(self.values):
            got = str([transfer.values for transfer in found])
            expected = f"one transfer of {len(self.values)} values"
            raise PlanError(explain(where, expected=expected, got=got))
        names, specs = list(found[0].values), found[0].specs
        for value, name, spec in zip(self.values, names, specs, strict=True):
            held = self.holdings(value)[end][rank].shape
            if spec.shape != held:
                got, expected = str(list(spec.shape)), f"{name} as {list(held)}"
                raise PlanError(explain(where, expected=expected, got=got))
        strange = [piece.value for piece in found[0].pieces if piece.value not in names]
        if strange:
            raise PlanError(explain(where, expected=f"pieces of {names}", got=strange[0]))
        return [(names.index(piece.value), piece) for piece in found[0].pieces]


Placed = tuple[int, Piece]


def _paired(
    where: str, one: Placed | None, other: Placed | None, source: int, target: int
) -> tuple[int, Move]:
    """The n-th pieces of both ends of a channel as one move, of one value and of one size."""
    if one is not None and other is not None and one[0] == other[0]:
        ends = one[1].region, other[1].region
        if regions.shape(ends[0]) == regions.shape(ends[1]):
            return one[0], Move(source, target, *ends)
    sent, received = (
        "nothing" if end is None else f"{end[1].value} {regions.text(end[1].region)}"
        for end in (one, other)
    )
    raise PlanError(explain(where, expected=f"{received}, to be received", got=f"{sent}, sent"))
