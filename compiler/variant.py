"""What one microbatch asks of the stages: which of them compute, and what crosses between them.

The microbatches of a step may be of different programs: one with images, one of text alone. They
share the stages; what each of them does there, and which boundaries it crosses, is its variant.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mllm_compile.compiler.action import Action, Kind
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.stage import Boundary


@dataclass(frozen=True, slots=True)
class Variant:
    """``computes``: stages that have nodes of their own; ``trains``: those with weight gradients.

    Input gradients exist exactly where a boundary into the stage carries gradients.
    """

    computes: frozenset[int]
    trains: frozenset[int]
    boundaries: tuple[Boundary, ...]

    def __post_init__(self) -> None:
        ends = frozenset(end for b in self.boundaries for end in (b.source, b.target))
        for named, what in ((ends, "boundaries"), (self.trains, "weight gradients")):
            if not named <= self.computes:
                raise PlanError(
                    explain(
                        f"stages {sorted(named - self.computes)}",
                        expected=f"nodes wherever there are {what}",
                        got="none",
                    )
                )

    def compute(self, stage: int, microbatch: int) -> list[Action]:
        """The compute actions of one microbatch on one stage: F, I, W, as far as they exist."""
        input_grad = any(b.target == stage and b.gradients for b in self.boundaries)
        has: dict[Kind, bool] = {
            "F": stage in self.computes,
            "I": input_grad,
            "W": stage in self.trains,
        }
        return [Action(stage, kind, microbatch) for kind in has if has[kind]]

    def transfers(self, stage: int, kind: Kind, microbatch: int) -> list[Action]:
        """The transfers of one kind that one microbatch needs at one stage, ordered by peer."""
        forward, downstream = kind.endswith("F"), kind in ("SEND_F", "RECV_B")
        peers = {
            b.target if downstream else b.source
            for b in self.boundaries
            if stage == (b.source if downstream else b.target)
            and (b.values if forward else b.gradients)
        }
        return [Action(stage, kind, microbatch, peer) for peer in sorted(peers)]

    def actions(self, stage: int, microbatch: int) -> list[Action]:
        """Everything that one microbatch needs at one stage, in no particular order."""
        transfers: tuple[Kind, ...] = ("RECV_F", "SEND_F", "RECV_B", "SEND_B")
        return self.compute(stage, microbatch) + [
            action for kind in transfers for action in self.transfers(stage, kind, microbatch)
        ]


def union(variants: Iterable[tuple[Variant, frozenset[int]]]) -> Variant:
    """What the lanes of one microbatch ask for together; a lane skips what it does not need.

    With each variant come the stages whose ranks run it: modules of other data sizes run other
    programs. Between two such stages both have the boundary, or neither.
    """
    each = tuple(dict.fromkeys(variants))
    crossing: dict[tuple[int, int], dict[str, bool]] = {}
    for variant, stages in each:
        for boundary in variant.boundaries:
            if stages & {boundary.source, boundary.target}:
                values = crossing.setdefault((boundary.source, boundary.target), {})
                for value in boundary.values:
                    values[value] = values.get(value, False) or value in boundary.gradients
    return Variant(
        frozenset().union(*(variant.computes & stages for variant, stages in each)),
        frozenset().union(*(variant.trains & stages for variant, stages in each)),
        tuple(
            Boundary(source, target, tuple(values), tuple(v for v in values if values[v]))
            for (source, target), values in sorted(crossing.items())
        ),
    )


def depths(stages: Iterable[int], variants: Iterable[Variant]) -> dict[int, int]:
    """Length of the longest path from each stage to a sink, in stages: a sink has depth 1."""
    targets: dict[int, set[int]] = {stage: set() for stage in stages}
    for variant in variants:
        for boundary in variant.boundaries:
            targets[boundary.source].add(boundary.target)
    depth: dict[int, int] = {}
    for stage in sorted(targets, reverse=True):  # boundaries lead to higher stages
        depth[stage] = 1 + max((depth[target] for target in targets[stage]), default=0)
    return depth
