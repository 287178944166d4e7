"""The ranks of one pipeline stage as a grid with named axes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.compiler.split import Split
from mllm_compile.compiler.stage import Stage

AXES = ("data", "expert", "context", "tensor")
"""Axes from the slowest to the fastest: neighbouring ranks share all but their tensor place."""

SHARDED = ("expert", "context", "tensor")
"""The axes over which layouts divide the values of one data lane, the outer one first."""


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One axis over which values of a lane are divided; ``policy`` names how a factor is split.

    A policy may be a split written out; factors of another length are then split contiguously.
    ``exchange``: how attention gets at keys that other ranks of the axis hold
    (passes/sharding/exchange.py).
    """

    name: str
    size: int
    policy: str = "contiguous"
    exchange: str = "auto"

    def split(self, length: int) -> Split:
        """How a factor of ``length`` elements is divided among the ranks of this axis."""
        if self.policy == "zigzag":
            return Split.zigzag(length, self.size)
        if ":" in self.policy and Split.parse(self.policy).length == length:
            return Split.parse(self.policy)
        return Split.contiguous(length, self.size)


@dataclass(frozen=True)
class Mesh:
    """``ranks`` in the order of :data:`AXES`, the last axis fastest; ``sizes`` of those axes."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    policy: str = "contiguous"
    exchange: str = "auto"

    def __post_init__(self) -> None:
        if len(self.sizes) != len(AXES) or prod(self.sizes) != len(self.ranks):
            expected = f"{len(self.ranks)} ranks over {AXES}"
            raise PlanError(explain("mesh", expected=expected, got=str(self.sizes)))

    @staticmethod
    def of(module: ModuleSpec, position: int) -> "Mesh":
        """The mesh of one pipeline position of a module: pipeline is the slowest axis of all."""
        width = len(module.ranks) // module.parallel.pipeline
        ranks = module.ranks[position * width : (position + 1) * width]
        sizes = tuple(getattr(module.parallel, name) for name in AXES)
        return Mesh(ranks, sizes, module.context_split, module.kv_exchange)

    @staticmethod
    def of_stage(request: Request, stage: Stage) -> "Mesh":
        """The mesh of a stage of the request."""
        return Mesh.of(request.modules[stage.module], stage.position)

    @cached_property
    def coordinates(self) -> Mapping[int, tuple[int, ...]]:
        """Rank -> place along every axis."""
        places = product(*map(range, self.sizes))
        return dict(zip(self.ranks, places, strict=True))

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.sizes[AXES.index(axis)]

    def place(self, rank: int, axis: str) -> int:
        """Where a rank stands along an axis."""
        return self.coordinates[rank][AXES.index(axis)]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` in these axes alone, in mesh order."""
        free = [AXES.index(axis) for axis in axes]
        mine = self.coordinates[rank]
        fixed = [i for i in range(len(AXES)) if i not in free]
        return tuple(
            other for other, at in self.coordinates.items() if all(at[i] == mine[i] for i in fixed)
        )

    def lane(self, rank: int) -> int:
        """The data lane of a rank."""
        return self.place(rank, "data")

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every data lane."""
        width = len(self.ranks) // self.sizes[0]
        return tuple(self.ranks[i : i + width] for i in range(0, len(self.ranks), width))

    @cached_property
    def axes(self) -> tuple[MeshAxis, ...]:
        """The axes of more than one rank over which values of a lane are divided, outer first."""
        own = {"context": (self.policy, self.exchange)}
        return tuple(
            MeshAxis(name, self.size(name), *own.get(name, ()))
            for name in SHARDED
            if self.size(name) > 1
        )
