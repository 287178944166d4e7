"""One rank of a job: its parameters, its executor, its optimizer, and the steps that it runs.

The same class serves threads of one process, subprocesses and torchrun: they differ only in the
transport.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mllm_compile.agreement import agree, agree_on_collectives
from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.layout import R, V
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.regions import Region
from mllm_compile.compiler.sharding import Layouts
from mllm_compile.runtime.distributed_transport import DistributedTransport
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.groups import groups_of
from mllm_compile.runtime.migrate import move_parameter
from mllm_compile.runtime.optimizer import make_optimizer, update
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.rank_main import RankContext
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Transport


class Rank:
    """What one rank holds between steps.

    Args:
        compiler: may be shared by the ranks of one process; has compiled the first step.
        transport: this rank's end of the network.
        private: copy parameters and buffers instead of using the model's own (for ranks that
            share a process).
        publish: called with the current action, for whoever watches the rank.
    """

    def __init__(
        self,
        compiler: Compiler,
        transport: Transport,
        *,
        private: bool = False,
        publish: Callable[[str], None] | None = None,
    ) -> None:
        self.compiler, self.transport, self.rank = compiler, transport, transport.rank
        stages = compiler.plans[0].stages
        modules = compiler.request.modules
        self.stages = tuple(stage.index for stage in stages if self.rank in stage.ranks)
        names = {stage.index: modules[stage.module].name for stage in stages}
        self.label = ", ".join(f"stage {stage}, {names[stage]}" for stage in self.stages)
        self._model = dict(compiler.model.named_parameters())
        self._private = private
        buffers = compiler.model.named_buffers()
        self.state = State({}, {name: self._here(buffer) for name, buffer in buffers})
        self.optimizer: torch.optim.Optimizer | None = None
        self._placements: dict[str, Placement] = {}
        self._settled = 0
        self._settle()
        meshes = {s.index: _mesh(compiler.plans[0], s.index) for s in stages}
        transport.connect(groups_of(meshes.values()))
        self.executor = Executor(transport, self.state, meshes, names=names, publish=publish)

    def run(self, step: Step, number: int = 0, *, measure: bool = False) -> StepResult:
        """Run one step's actions; gradients are summed in ``state``.

        Of the ranks that share a data lane's loss only the first one returns it.
        """
        self._settle()
        compiler, count = self.compiler, range(len(step.microbatches))
        programs = self.programs(step)
        prepared = [
            {stage: compiler.lane(step, k, stage, self.rank).prepared for stage in self.stages}
            for k in count
        ]
        return self.executor.step(step.schedule, programs, prepared, number=number, measure=measure)

    def programs(self, step: Step) -> list[dict[int, StageProgram]]:
        """What the rank runs of every microbatch, by stage."""
        return [
            {stage: self.compiler.program(step, k, stage, self.rank) for stage in self.stages}
            for k in range(len(step.microbatches))
        ]

    def update(self) -> torch.Tensor:
        """End the step with an update of the parameters; the global gradient norm."""
        clip_norm = self.compiler.request.optimizer.clip_norm
        return update(self.state, self.optimizer, self.transport, clip_norm)

    def gradients(self) -> dict[str, torch.Tensor]:
        """End the step without an update: gradients by name; parameters without one are absent."""
        self.state.finish(self.transport)
        found = self.state.parameters.items()
        return {name: p.grad for name, p in found if p.grad is not None}

    @property
    def regions(self) -> dict[str, Region]:
        """By parameter: which elements of it this rank holds."""
        return {
            name: self._placements[name].held[self.rank].region for name in self.state.parameters
        }

    def _settle(self) -> None:
        """Take in what newer programs use; a parameter that another rank reads now goes there."""
        plans = self.compiler.plans
        if self._settled == len(plans):
            return
        self._settled = len(plans)
        before, self._placements = self._placements, _placements(plans, self._model)
        held = self.state.parameters
        mine = [name for name in self._model if self.rank in self._placements[name].held]
        fresh = {name: self._own(name) for name in mine if name not in held}
        fresh |= self._divided(before)
        arrived = {
            name: move_parameter(
                self.transport,
                name,
                old,
                self._placements[name],
                held.get(name, fresh.get(name)),
                self.optimizer,
            )
            for name, old in sorted(before.items())
        }
        for name in [name for name in held if name not in mine]:
            del held[name]
        held.update(fresh)
        self.state.placements = {n: p for n, p in self._placements.items() if len(p.held) > 1}
        self.state.updaters = _updaters(plans)
        self.transport.connect(self.state.groups)
        self._optimize(fresh)
        for name, kept in arrived.items():
            if self.optimizer is not None and kept:
                self.optimizer.state[fresh[name]] = kept

    def _optimize(self, fresh: Mapping[str, nn.Parameter]) -> None:
        trainable = [parameter for parameter in fresh.values() if parameter.requires_grad]
        if self.optimizer is None:
            divided = any(
                placement.divided and self._model[name].requires_grad
                for name, placement in self._placements.items()
            )
            request = self.compiler.request.optimizer
            self.optimizer = make_optimizer(request, fresh, divided=divided)
        elif trainable:
            self.optimizer.add_param_group({"params": trainable})

    def _here(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` on this rank's device; a copy where ranks share the model's."""
        return x.to(self.transport.device, copy=self._private)

    def _own(self, name: str) -> nn.Parameter:
        """The part that this rank holds of one of the model's parameters."""
        parameter, placement = self._model[name], self._placements[name]
        if not placement.divided:
            here = self._here(parameter.detach())
            shared = here.device == parameter.device and not self._private
            return parameter if shared else nn.Parameter(here, parameter.requires_grad)
        part = placement.part(parameter.detach(), self.rank)
        here = part.to(self.transport.device, copy=True)
        return nn.Parameter(here, parameter.requires_grad)

    def _divided(self, before: Mapping[str, Placement]) -> dict[str, nn.Parameter]:
        """Parts of parameters that stood whole on this rank, unread, until a program divides them.

        Raises:
            PlanError: a parameter that programs read divided would have to be divided otherwise.
        """
        found = {}
        for name, parameter in self.state.parameters.items():
            old, new = before[name].held[self.rank], self._placements[name].held.get(self.rank)
            if new is None or new == old:
                continue
            if before[name].divided:
                raise PlanError(explain(f"parameter {name}", expected=str(old), got=str(new)))
            part = self._placements[name].part(parameter.detach(), self.rank)
            found[name] = nn.Parameter(part.clone(), parameter.requires_grad)
        return found


@contextmanager
def joined(
    context: RankContext, device: torch.device, compiler: Compiler, first: Step
) -> Iterator[Rank]:
    """Join the other ranks, which must have compiled the same plans, and leave them at the end.

    After an error the connection is left as it is: the launcher ends all ranks.
    """
    transport = DistributedTransport(device, channels_of(first))
    agree(transport, compiler.plans)
    rank = Rank(compiler, transport, publish=context.publish)
    context.label(rank.label)
    agree_on_collectives(transport, first.plans[0], rank.programs(first))
    yield rank
    transport.close()


def channels_of(step: Step) -> set[tuple[int, int]]:
    """(source rank, target rank) of everything that a step sends, tied gradients apart."""
    ranks = {stage.index: stage.ranks for stage in step.plans[0].stages}
    pairs = {
        (action.stage, action.peer)
        for actions in step.schedule.actions.values()
        for action in actions
        if action.kind.startswith("SEND") and action.peer is not None
    }
    return {
        (source, target)
        for here, there in pairs
        for source in ranks[here]
        for target in ranks[there]
        if source != target
    }


def _placements(plans: Sequence[Plan], model: Mapping[str, nn.Parameter]) -> dict[str, Placement]:
    """Every parameter in all stages that read it in some program, else whole in its home."""
    readers: dict[str, dict[int, Layouts]] = {}
    for plan in plans:
        layouts = plan.parameter_layouts
        for stage in plan.stages:
            for name in stage.parameters:
                whole = (V,) * len(_mesh(plan, stage.index).axes)
                known = layouts.get((stage.module, name), whole)
                readers.setdefault(name, {})[stage.index] = known
    homes = {name: home for plan in plans for name, home in plan.home.items()}
    found = {}
    for name, home in homes.items():
        held = readers.get(name, {home: (R,) * len(_mesh(plans[0], home).axes)})
        stages = [(_mesh(plans[0], stage), layouts) for stage, layouts in sorted(held.items())]
        parameter = model[name]
        found[name] = Placement.of(parameter.shape, stages, summed=parameter.requires_grad)
    return found


def _updaters(plans: Sequence[Plan]) -> dict[str, tuple[int, ...]]:
    """The ranks that update a buffer, where there are several."""
    found: dict[str, set[int]] = {}
    for plan in plans:
        for node, item in Graph(plan.captured).input_of.items():
            if item.kind == "buffer" and item.name in plan.captured.updates:
                readers = {user.name for user in node.users}
                held = [stage.ranks for stage in plan.stages if not readers.isdisjoint(stage.nodes)]
                found.setdefault(item.name, set()).update(*held)
    return {name: tuple(sorted(ranks)) for name, ranks in found.items() if len(ranks) > 1}


def _mesh(plan: Plan, stage: int) -> Mesh:
    return Mesh.of_stage(plan.request, plan.stages[stage])
