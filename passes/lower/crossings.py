"""What the ranks at both ends of a boundary hold of every value that crosses it.

Modules of equally many data lanes exchange lane by lane. Between others a value is one whole, of
which each lane has the part of its samples (lane_parts.py); values of different lanes' programs
correspond by their position in the boundary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import R
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.reshard import Holdings
from mllm_compile.compiler.sharding import Sharding
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.lane_parts import LaneValue, Part, lane_parts

Plans = Sequence[Sequence[Plan]]
"""By module of the request: the plan that each of its data lanes runs of one microbatch."""


@dataclass(frozen=True)
class Crossing:
    """A value of one lane's program that crosses a boundary, and what the ranks hold of it."""

    value: LaneValue
    sources: Holdings
    targets: Holdings
    flows: bool

    @property
    def name(self) -> str:
        """Its name in that program."""
        return self.value.name

    def spec(self, rank: int, leaves: bool) -> TensorSpec:
        """Of the local tensor of a rank, where it is computed (``leaves``) or read."""
        held = self.sources if leaves else self.targets
        return TensorSpec.dense(self.value.tensor, held[rank].shape)


def crossings(stage: Stage, lane: int, boundary: Boundary, plans: Plans) -> Iterator[Crossing]:
    """The values of a boundary in the plan of one data lane of a stage at one of its ends.

    Raises:
        PlanError: lanes of unequal data sizes do not have the same samples' values.
    """
    plan = plans[stage.module][lane]
    sources, targets = (
        _lanes(end, boundary, lane, plans) for end in (boundary.source, boundary.target)
    )
    for position, name in enumerate(boundary.values):
        flows = name in boundary.gradients
        before, after = ([each.value(position) for each in end] for end in (sources, targets))
        parts = lane_parts(before, after, flows)
        yield Crossing(
            LaneValue(plan, name),
            _held(sources, before, parts[0]),
            _held(targets, after, parts[1]),
            flows,
        )


@dataclass(frozen=True)
class _Lane:
    """One data lane of a stage, and the boundary in the plan that it runs."""

    plan: Plan
    stage: Stage
    index: int
    boundary: Boundary

    def value(self, position: int) -> LaneValue:
        """The value at this position of the boundary."""
        return LaneValue(self.plan, self.boundary.values[position])

    def held(self, value: LaneValue, part: Part | None) -> dict[int, Holding]:
        """What each rank of the lane holds."""
        mesh = Mesh.of_stage(self.plan.request, self.stage)
        sharding = self.plan.shardings[self.stage.module] if self.plan.shardings else Sharding()
        known = sharding.sent if self.stage.index == self.boundary.source else sharding.layouts
        layouts = known.get(value.name, (R,) * len(mesh.axes))
        made = {}
        for rank in mesh.lanes()[self.index]:
            places = [mesh.place(rank, axis.name) for axis in mesh.axes]
            whole = Holding.of(value.shape, layouts, mesh.axes, places)
            made[rank] = whole if part is None else whole.within(*astuple(part))
        return made


def _held(
    lanes: Sequence[_Lane], values: Sequence[LaneValue], parts: Sequence[Part | None]
) -> Holdings:
    every = zip(lanes, values, parts, strict=True)
    return {
        rank: holding
        for lane, value, part in every
        for rank, holding in lane.held(value, part).items()
    }


def _lanes(end: int, boundary: Boundary, lane: int, plans: Plans) -> list[_Lane]:
    """The lanes of a stage that exchange with ``lane`` of the other one; those that have values."""
    stages = plans[0][0].stages
    stage = stages[end]
    sizes = {len(plans[stages[index].module]) for index in (boundary.source, boundary.target)}
    indices = [lane] if len(sizes) == 1 else range(len(plans[stage.module]))
    ends = (boundary.source, boundary.target)
    found = [
        _Lane(plans[stage.module][index], stage, index, other)
        for index in indices
        for other in plans[stage.module][index].boundaries
        if (other.source, other.target) == ends
    ]
    _check_alike(boundary, stage, found)
    return found


def _check_alike(boundary: Boundary, stage: Stage, lanes: Sequence[_Lane]) -> None:
    where = f"boundary {boundary.source} -> {boundary.target}, stage {stage.index}"
    remedy = "give both modules the same data size"
    if not lanes:
        raise PlanError(explain(where, expected="a data lane with its values", remedy=remedy))
    expected = _flows(boundary)
    for lane in lanes:
        if (got := _flows(lane.boundary)) != expected:
            where = f"{where}, data lane {lane.index}"
            raise PlanError(explain(where, expected=str(expected), got=str(got), remedy=remedy))


def _flows(boundary: Boundary) -> list[str]:
    """What lanes agree in: how many values there are, and whose gradient comes back."""
    return ["with gradient" if v in boundary.gradients else "without" for v in boundary.values]
