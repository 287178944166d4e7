"""Pipeline stages and the boundaries between them. Together they are a DAG."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mllm_compile.compiler.errors import PlanError, explain


@dataclass(frozen=True, slots=True)
class Stage:
    """A convex set of nodes of the main graph.

    ``module`` indexes the request's modules, ``position`` is the stage's place in that module's
    pipeline. ``nodes`` belong to this stage alone; ``replicated`` nodes are computed from inputs
    without parameters, and anew in every stage that needs them. ``parameters`` are the FQNs that
    the stage's nodes read; a tied weight may stand in several stages.
    """

    index: int
    module: int
    position: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    replicated: tuple[str, ...]
    parameters: tuple[str, ...]

    def __post_init__(self) -> None:
        both = set(self.nodes) & set(self.replicated)
        if both or len(set(self.nodes)) != len(self.nodes):
            raise PlanError(
                explain(f"stage {self.index}", expected="each node once", got=str(both))
            )


def representatives(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same stages on fewer ranks: of ranks that hold the same stages, the first one alone.

    They have equal lists of actions, so that one of them stands for all.
    """
    first: dict[tuple[int, ...], int] = {}
    for rank in sorted({rank for stage in stages for rank in stage.ranks}):
        first.setdefault(tuple(s.index for s in stages if rank in s.ranks), rank)
    kept = frozenset(first.values())
    return tuple(
        replace(stage, ranks=tuple(rank for rank in stage.ranks if rank in kept))
        for stage in stages
    )


@dataclass(frozen=True, slots=True)
class Boundary:
    """Values that stage ``source`` computes and stage ``target`` reads.

    ``values`` are node names in graph order; ``gradients`` are those whose gradient flows back.
    """

    source: int
    target: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.source < self.target:
            raise PlanError(
                explain(
                    f"boundary {self.source} -> {self.target}",
                    expected="values to flow to a higher stage",
                )
            )
        if not set(self.gradients) <= set(self.values):
            raise PlanError(
                explain(
                    f"boundary {self.source} -> {self.target}",
                    expected="gradients only of its values",
                    got=str(sorted(set(self.gradients) - set(self.values))),
                )
            )
