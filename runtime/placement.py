"""Where a parameter stands: what every rank holds of it, and whose gradients are added up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.runtime.pieces import pack, unpack

Ranks = tuple[int, ...]

_Share = tuple[Holding, Ranks]
"""A part of a parameter, and which of the equal gradients (places on axes with layout R)."""


@dataclass(frozen=True)
class Placement:
    """One parameter on all its ranks.

    ``shape`` is that of the whole parameter; ``held`` says by rank which part of it that rank has:
    two ranks have the same part or none in common. ``sums`` are groups of ranks, each rank in one
    at most, that have the same part and add up their gradients of it once per step: those of the
    data lanes, of the axes on which the parameter has layout V, of the stages that share it. Ranks
    of no common group have the same gradient (layout R), or other parts.
    """

    shape: tuple[int, ...]
    held: Mapping[int, Holding]
    sums: tuple[Ranks, ...] = ()

    def __post_init__(self) -> None:
        held = sum(holding.size for holding in set(self.held.values()))
        if held != prod(self.shape):
            expected = f"parts with the {prod(self.shape)} elements of {list(self.shape)}"
            raise PlanError(explain("placement", expected=expected, got=f"{held} elements"))
        ranks = [rank for group in self.sums for rank in group]
        if len(set(ranks)) != len(ranks):
            got = str(self.sums)
            raise PlanError(explain("placement", expected="a rank in one sum at most", got=got))
        for group in self.sums:
            if len({self.held[rank] for rank in group}) > 1:
                expected = f"the same part on ranks {group}, whose gradients are added up"
                raise PlanError(explain("placement", expected=expected))

    @staticmethod
    def replicated(shape: Sequence[int], ranks: Sequence[int]) -> "Placement":
        """Whole on every one of these ranks; each has a share in the gradient."""
        whole, group = Holding.whole(shape), tuple(sorted(ranks))
        return Placement(tuple(shape), dict.fromkeys(group, whole), (group,) * (len(group) > 1))

    @staticmethod
    def of(
        shape: Sequence[int],
        stages: Sequence[tuple[Mesh, Sequence[Layout]]],
        *,
        summed: bool = True,
    ) -> "Placement":
        """From the stages that read the parameter: their mesh, and its layouts on ``mesh.axes``.

        ``summed`` is False for a parameter without gradient.

        Raises:
            PlanError: a layout is none of R, V and S; stages disagree about what a rank holds, or
                about how many gradients there are of one part.
        """
        held: dict[int, Holding] = {}
        sums: dict[_Share, set[int]] = {}
        readers: dict[_Share, set[int]] = {}
        for stage, (mesh, layouts) in enumerate(stages):
            for rank in mesh.ranks:
                part = _part(shape, mesh, layouts, rank)
                if held.setdefault(rank, part) != part:
                    where = f"parameter of shape {list(shape)}, rank {rank}"
                    raise PlanError(explain(where, expected="one layout in all of its stages"))
                pairs = zip(mesh.axes, layouts, strict=True)
                copy = tuple(mesh.place(rank, axis.name) for axis, at in pairs if at.kind == "R")
                sums.setdefault((part, copy), set()).add(rank)
                readers.setdefault((part, copy), set()).add(stage)
        if not summed:
            return Placement(tuple(shape), held)
        _check_shares(shape, readers)
        groups = sorted(tuple(sorted(ranks)) for ranks in sums.values())
        return Placement(tuple(shape), held, tuple(group for group in groups if len(group) > 1))

    @cached_property
    def divided(self) -> bool:
        """Whether ranks hold different parts."""
        return len(set(self.held.values())) > 1

    @cached_property
    def first(self) -> frozenset[int]:
        """One rank for every part: together they hold every element once."""
        firsts: dict[Holding, int] = {}
        for rank in sorted(self.held):
            firsts.setdefault(self.held[rank], rank)
        return frozenset(firsts.values())

    def group(self, rank: int) -> Ranks:
        """The ranks whose gradients are added to this one's, itself among them; or none."""
        return next((group for group in self.sums if rank in group), ())

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """What a rank holds of a whole value; not a copy where that is everything."""
        return pack(whole, self.held[rank].region)

    def whole(self, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The whole value from the parts of all ranks, or of one rank for each part."""
        made = next(iter(parts.values())).new_empty(self.shape)
        for rank, part in parts.items():
            unpack(part, made, self.held[rank].region)
        return made


def _check_shares(shape: Sequence[int], readers: Mapping[_Share, set[int]]) -> None:
    """Every sum of a part has the gradient of every stage that reads the part, once."""
    stages: dict[Holding, set[int]] = {}
    for (part, _), own in readers.items():
        stages.setdefault(part, set()).update(own)
    for (part, _), own in readers.items():
        if own != stages[part]:
            raise PlanError(
                explain(
                    f"parameter of shape {list(shape)}",
                    expected="as many gradients of a part in every stage that reads it",
                    got="the same gradient on several ranks of one stage (R), and not in another",
                    remedy="give the modules that share the parameter the same sizes",
                )
            )


def _part(shape: Sequence[int], mesh: Mesh, layouts: Sequence[Layout], rank: int) -> Holding:
    whole = Layout("R")
    places = [mesh.place(rank, axis.name) for axis in mesh.axes]
    return Holding.of(shape, [whole if at.kind == "V" else at for at in layouts], mesh.axes, places)
