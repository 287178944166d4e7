"""What one rank sends and receives: pieces of local tensors, to and from the ranks of other stages.

A value arrives in the layout that its reader wants, straight from the ranks that hold it; gradients
go back likewise. Nothing is gathered or broadcast on the way.
"""

from collections.abc import Iterator, Sequence
from typing import TypedDict

from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.program import Piece, Transfer
from mllm_compile.compiler.reshard import reshard
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.crossings import Crossing, Plans, crossings


class Transfers(TypedDict):
    """Those fields of a :class:`StageProgram` that differ by rank."""

    sends_forward: tuple[Transfer, ...]
    receives_forward: tuple[Transfer, ...]
    sends_backward: tuple[Transfer, ...]
    receives_backward: tuple[Transfer, ...]


def transfers(stage: Stage, rank: int, plans: Plans) -> Transfers:
    """The transfers of one rank in one stage and one microbatch.

    Args:
        stage: of the plans; they all have the same stages.
        rank: one of the stage's.
        plans: by module of the request, the plan that each of its data lanes runs.

    Raises:
        PlanError: at a boundary between modules of unequal data sizes, lanes do not have the same
            samples' values; says what to change.
    """
    lane = Mesh.of_stage(plans[0][0].request, stage).lane(rank)
    boundaries = plans[stage.module][lane].boundaries
    out = [boundary for boundary in boundaries if boundary.source == stage.index]
    into = [boundary for boundary in boundaries if boundary.target == stage.index]

    def made(side: Sequence[Boundary], *, backward: bool) -> tuple[Transfer, ...]:
        found = []
        for boundary in side:
            leaves = boundary.source == stage.index
            peer = boundary.target if leaves else boundary.source
            values = crossings(stage, lane, boundary, plans)
            travelling = [value for value in values if value.flows or not backward]
            if travelling:
                found.append(_transfer(peer, rank, travelling, leaves, backward))
        return tuple(found)

    return Transfers(
        sends_forward=made(out, backward=False),
        receives_forward=made(into, backward=False),
        sends_backward=made(into, backward=True),
        receives_backward=made(out, backward=True),
    )


def _transfer(
    peer: int, rank: int, values: Sequence[Crossing], leaves: bool, backward: bool
) -> Transfer:
    names = tuple(f"d%{value.name}" if backward else f"%{value.name}" for value in values)
    specs = tuple(value.spec(rank, leaves) for value in values)
    pieces = [
        piece
        for name, value in zip(names, values, strict=True)
        for piece in _pieces(name, value, rank, leaves, backward)
    ]
    return Transfer(peer, names, specs, tuple(pieces))


def _pieces(name: str, value: Crossing, rank: int, leaves: bool, backward: bool) -> Iterator[Piece]:
    """What the rank sends, or what it receives, of one value or of its gradient."""
    ends = (value.targets, value.sources) if backward else (value.sources, value.targets)
    for move in reshard(name, *ends):
        if leaves != backward and move.source == rank:
            yield Piece(move.target, name, move.source_region)
        if leaves == backward and move.target == rank:
            yield Piece(move.source, name, move.target_region)
