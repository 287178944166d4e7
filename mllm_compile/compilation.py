"""From microbatches to one step's program: capture, plan, schedule, lower, each once and cached.

A microbatch is divided by its samples among the data lanes of a module. Every lane is captured as a
program of its own, like a microbatch; modules of different data sizes run different lanes of it.

Compilation is a pure function of the request, the model and the microbatches, so every rank runs it
for itself and arrives at the same step; nothing is shipped between ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.captured import Captured, Prepared
from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.pass_runner import check
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.variant import Variant, union
from mllm_compile.denominators import check_alike, totals_are_fed, with_global_denominators
from mllm_compile.model import Microbatch
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.lower.lower import HOST, differing, lower
from mllm_compile.passes.lower.transfer_law import Links
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.schedule import make_schedule, variant_of
from mllm_compile.passes.token_split.mask_values import key_intervals

Places = tuple[tuple[str, int], ...]
"""(axis, place) of a rank, for the axes over which the stage's values are divided."""


@dataclass(frozen=True)
class Lane:
    """The part of a microbatch that one data lane works on: a program of its own, and its plan."""

    plan: Plan
    prepared: Prepared


@dataclass(frozen=True)
class Step:
    """One step, compiled: the lanes of every microbatch by data size, and the schedule of all.

    The denominators in ``prepared`` are sums over the whole step, so that the losses (and the
    gradients) of its microbatches and lanes add up to those of the global batch.
    """

    microbatches: tuple[Mapping[int, tuple[Lane, ...]], ...]
    schedule: Schedule

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The different plans of the step."""
        lanes = (lane for mb in self.microbatches for each in mb.values() for lane in each)
        return tuple({id(lane.plan): lane.plan for lane in lanes}.values())


class Compiler:
    """Compiles the steps of one model under one request.

    Args:
        request: the user's request.
        model: as :func:`mllm_compile.model.ready_model` returns it.
        device: where the ranks of this process compute.

    """

    def __init__(self, request: Request, model: nn.Module, device: torch.device = HOST) -> None:
        self.request = request
        self.model = model
        self.device = device
        lift = torch.float64 if request.dtype == "float64" else None
        self.programs = Programs(model, lift=lift)
        self._unplanned: dict[int, list[Prepared]] = {}
        self._plans: dict[int, Plan] = {}
        self._lowered: dict[tuple[int, int, Places], StageProgram] = {}
        self._links: dict[tuple[int, ...], Links] = {}
        self._linked: dict[tuple[Any, ...], StageProgram] = {}
        self._variants: dict[int, Variant] = {}
        self._schedules: dict[tuple[Variant, ...], Schedule] = {}

    def step(self, batches: Sequence[Microbatch], pair: Mapping[str, Any] | None = None) -> Step:
        """Compile one step of ``len(batches)`` microbatches.

        A batch of one sample does not show what the model does with several; ``pair``, of two,
        is captured to see it.

        Raises:
            RequestError: the loss is no sum over samples, but there are several microbatches or
                lanes.
            CaptureError, PlanError: from the passes.

        """
        prepared = [
            {count: [self.programs.get(batch) for batch in lanes] for count, lanes in mb.items()}
            for mb in batches
        ]
        every = [item for mb in prepared for lanes in mb.values() for item in lanes]
        for item in every:
            if id(item.program) not in self._plans:
                self._unplanned.setdefault(id(item.program), []).append(item)
        self._check_divisible(every, len(batches))
        if pair is not None:
            both = capture(self.model, pair, **self.programs.options)
            _check_splittable(both)
            check_alike(both, [item.program for item in every[:2]])
        self._plan_first(item.program for item in every)
        counts = self.request.lane_counts
        totals = {
            count: iter(_summed([x for mb in prepared for x in mb[count]])) for count in counts
        }
        compiled = tuple(
            {
                count: tuple(Lane(self.plan(item.program), item) for item in islice(total, count))
                for count, total in totals.items()
            }
            for _ in batches
        )
        return Step(compiled, self._schedule(compiled))

    def _plan_first(self, programs: Iterable[Captured]) -> None:
        """Plan the richest of programs that are not all planned yet: it places the parameters."""
        different = {id(program): program for program in programs}
        if not different.keys() <= self._plans.keys():
            self.plan(richest(different.values()))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all programs so far, in the order in which they were made."""
        return tuple(self._plans.values())

    def plan(self, program: Captured) -> Plan:
        """The plan of a captured program; what an earlier plan decided for parameters stays."""
        key = id(program)
        if key not in self._plans:
            placement = self.plans[-1].placement if self._plans else None
            layouts = {k: v for plan in self.plans for k, v in plan.parameter_layouts.items()}
            batches = self._unplanned.pop(key, [])
            intervals = shown_intervals(self.request, self.model, batches)
            self._plans[key] = make_plan(self.request, program, placement, layouts, intervals)
        return self._plans[key]

    def lowered(self, plan: Plan, stage: int, places: Places = ()) -> StageProgram:
        """A stage of a plan for the ranks at ``places``, without its transfers."""
        key = id(plan.captured), stage, places
        if key not in self._lowered:
            program = lower(plan, plan.stages[stage], dict(places), self.device)
            self._lowered[key] = _inductor(program) if self.request.compile else program
        return self._lowered[key]

    def program(self, step: Step, microbatch: int, stage: int, rank: int) -> StageProgram:
        """What ``rank`` runs of a stage on one microbatch: its lane's, with its transfers."""
        lanes = step.microbatches[microbatch]
        every = tuple(id(lane.plan) for each in lanes.values() for lane in each)
        key = rank, stage, every
        if key not in self._linked:
            plan = self.lane(step, microbatch, stage, rank).plan
            places = self._places(plan, stage, rank)
            plans = [
                tuple(lane.plan for lane in lanes[module.parallel.data])
                for module in self.request.modules
            ]
            links = self._links.setdefault(every, Links(plans)).checked(stage, rank)
            self._linked[key] = replace(self.lowered(plan, stage, places), **links)
        return self._linked[key]

    def lane(self, step: Step, microbatch: int, stage: int, rank: int) -> Lane:
        """The lane of a microbatch that ``rank`` works on in a stage."""
        mesh = Mesh.of_stage(self.request, self.plans[0].stages[stage])
        return step.microbatches[microbatch][mesh.size("data")][mesh.lane(rank)]

    def lower_all(self, step: Step) -> None:
        """Lower every stage of a step, for ranks that share this process."""
        for stage in self.plans[0].stages:
            for rank in stage.ranks:
                for microbatch in range(len(step.microbatches)):
                    self.program(step, microbatch, stage.index, rank)

    def _places(self, plan: Plan, stage: int, rank: int) -> Places:
        """Where a rank stands along the axes of its stage, or 0 where all of them run one graph."""
        at = plan.stages[stage]
        mesh = Mesh.of_stage(self.request, at)
        differ = differing(plan, at)
        return tuple(
            (axis.name, mesh.place(rank, axis.name) if axis.name in differ else 0)
            for axis in mesh.axes
        )

    def _schedule(self, microbatches: Sequence[Mapping[int, tuple[Lane, ...]]]) -> Schedule:
        variants = tuple(
            union(
                (self._variant(lane.plan), self._stages_with(count))
                for count, each in lanes.items()
                for lane in each
            )
            for lanes in microbatches
        )
        if variants not in self._schedules:
            stages = self.plans[0].stages
            made = make_schedule(stages, variants)
            dry_run(made, stages, variants)
            self._schedules[variants] = made
        return self._schedules[variants]

    def _stages_with(self, lanes: int) -> frozenset[int]:
        modules = self.request.modules
        stages = self.plans[0].stages
        return frozenset(s.index for s in stages if modules[s.module].parallel.data == lanes)

    def _variant(self, plan: Plan) -> Variant:
        if id(plan) not in self._variants:
            self._variants[id(plan)] = variant_of(plan)
        return self._variants[id(plan)]

    def _check_divisible(self, prepared: Sequence[Prepared], microbatches: int) -> None:
        if microbatches * max(self.request.lane_counts) > 1:
            for item in prepared:
                _check_splittable(item.program)


def _summed(counted: Sequence[Prepared]) -> Sequence[Prepared]:
    """The lanes of all microbatches, with the denominators of the whole step."""
    fed = with_global_denominators(counted)
    check(totals_are_fed, fed, counted, after="with_global_denominators")
    return fed


def richest(programs: Iterable[Captured]) -> Captured:
    """The program that reads most parameters (then: of most nodes); its plan places them all."""
    return max({id(program): program for program in programs}.values(), key=_size)


def shown_intervals(
    request: Request, model: nn.Module, batches: Sequence[Prepared]
) -> dict[str, torch.Tensor]:
    """What masks allow in batches of one program, if ranks divide their tokens."""
    if all(spec.parallel.context == 1 for spec in request.modules):
        return {}
    buffers = {("buffer", name): buffer for name, buffer in model.named_buffers()}
    return key_intervals([(each.program, {**buffers, **each.values}) for each in batches])


def _size(program: Captured) -> tuple[int, int]:
    graph = Graph(program)
    return len(graph.sites), len(graph.nodes)


def _check_splittable(program: Captured) -> None:
    if not program.splittable:
        raise RequestError(
            explain(
                "microbatches and data lanes",
                expected="1 each, because the loss is no sum or mean over samples",
                got=" ".join(program.report.notes),
                remedy="set microbatches = 1 and data = 1",
            )
        )


def _inductor(program: StageProgram) -> StageProgram:
    """Each segment compiled by Inductor; shapes are static, as the plan knows them."""
    changed = {
        name: replace(segment, graph=torch.compile(segment.graph, dynamic=False))
        for name in ("forward", "input_grad", "weight_grad")
        if (segment := getattr(program, name)) is not None
    }
    return replace(program, **changed)
