"""From microbatches to one step's program: capture, plan, schedule, lower, each once and cached.

Compilation is a pure function of the request, the model and the microbatches, so every rank runs it
for itself and arrives at the same step; nothing is shipped between ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.captured import Captured, Prepared
from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.request import Request
from mllm_compile.denominators import check_alike, with_global_denominators
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.lower.lower import lower
from mllm_compile.passes.lower.transfers import transfers
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.schedule import make_schedule, variant_of


@dataclass(frozen=True)
class Step:
    """One step, compiled: a plan and inputs per microbatch, and the schedule of all of them.

    The denominators in ``prepared`` are sums over the whole step, so that the losses (and the
    gradients) of its microbatches add up to those of the global batch.
    """

    plans: tuple[Plan, ...]
    prepared: tuple[Prepared, ...]
    schedule: Schedule


class Compiler:
    """Compiles the steps of one model under one request.

    Args:
        request: the user's request.
        model: as :func:`mllm_compile.model.ready_model` returns it.

    """

    def __init__(self, request: Request, model: nn.Module) -> None:
        _check_runs(request)
        self.request = request
        self.model = model
        lift = torch.float64 if request.dtype == "float64" else None
        self.programs = Programs(model, lift=lift)
        self._plans: dict[int, Plan] = {}
        self._lowered: dict[tuple[int, int], StageProgram] = {}
        self._schedules: dict[tuple[int, ...], Schedule] = {}

    def step(
        self, batches: Sequence[Mapping[str, Any]], pair: Mapping[str, Any] | None = None
    ) -> Step:
        """Compile one step of ``len(batches)`` microbatches.

        A batch of one sample does not show what the model does with several; ``pair``, of two,
        is captured to see it.

        Raises:
            RequestError: the loss is no sum over samples, but there are several microbatches.
            CaptureError, PlanError: from the passes.

        """
        prepared = [self.programs.get(batch) for batch in batches]
        if len(batches) > 1:
            for item in prepared:
                _check_splittable(item.program)
        if pair is not None:
            both = capture(self.model, pair, **self.programs.options)
            _check_splittable(both)
            check_alike(both, [item.program for item in prepared[:2]])
        self.plan(
            richest(item.program for item in prepared)
        )  # first, so that it places the parameters
        plans = tuple(self.plan(item.program) for item in prepared)
        return Step(plans, with_global_denominators(prepared), self._schedule(plans))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plans of all programs so far, in the order in which they were made."""
        return tuple(self._plans.values())

    def plan(self, program: Captured) -> Plan:
        """The plan of a captured program; a parameter that an earlier plan placed stays there."""
        key = id(program)
        if key not in self._plans:
            placement = self.plans[-1].placement if self._plans else None
            self._plans[key] = make_plan(self.request, program, placement=placement)
        return self._plans[key]

    def lowered(self, plan: Plan, stage: int) -> StageProgram:
        """The lowered stage of a plan, compiled by Inductor if the request says so."""
        key = id(plan.captured), stage
        if key not in self._lowered:
            at = plan.stages[stage]
            links = transfers(at, at.ranks[0], [[plan]] * len(self.request.modules))
            program = replace(lower(plan, at), **links)
            self._lowered[key] = _inductor(program) if self.request.compile else program
        return self._lowered[key]

    def lower_all(self, step: Step) -> None:
        """Lower every stage of a step, for ranks that share this process."""
        for plan in step.plans:
            for stage in plan.stages:
                self.lowered(plan, stage.index)

    def _schedule(self, plans: tuple[Plan, ...]) -> Schedule:
        key = tuple(id(plan) for plan in plans)
        if key not in self._schedules:
            variants = [variant_of(plan) for plan in plans]
            made = make_schedule(plans[0].stages, variants)
            dry_run(made, plans[0].stages, variants)
            self._schedules[key] = made
        return self._schedules[key]


def richest(programs: Iterable[Captured]) -> Captured:
    """The program that reads most parameters (then: of most nodes); its plan places them all."""
    return max(programs, key=_size)


def _size(program: Captured) -> tuple[int, int]:
    graph = Graph(program)
    return len(graph.sites), len(graph.nodes)


def _check_runs(request: Request) -> None:
    """Layouts and shared ranks are planned, not yet run."""
    if sum(len(module.ranks) for module in request.modules) != request.num_ranks:
        raise RequestError(
            explain("ranks", expected="each in one module", remedy="give every module its own")
        )
    for module in request.modules:
        if module.parallel.size != module.parallel.pipeline:
            raise RequestError(
                explain(
                    f"{module.name}: tensor, context, data, expert",
                    expected="1",
                    remedy="only pipeline may exceed 1 for now",
                )
            )


def _check_splittable(program: Captured) -> None:
    if not program.splittable:
        raise RequestError(
            explain(
                "microbatches",
                expected="1, because the loss is no sum or mean over samples",
                got=" ".join(program.report.notes),
                remedy="set microbatches = 1",
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
