"""One rank of a job: its parameters, its executor, its optimizer, and the steps that it runs.

The same class serves threads of one process, subprocesses and torchrun: they differ only in the
transport.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mllm_compile.agreement import agree
from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
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
        self.state = State({}, {name: b.clone() if private else b for name, b in buffers})
        self.optimizer: torch.optim.Optimizer | None = None
        self._placements: dict[str, Placement] = {}
        self._settled = 0
        self._settle()
        meshes = {s.index: Mesh.of(modules[s.module], s.position) for s in stages}
        transport.connect(groups_of(meshes.values()))
        self.executor = Executor(transport, self.state, meshes, names=names, publish=publish)

    def run(self, step: Step, number: int = 0, *, measure: bool = False) -> StepResult:
        """Run one step's actions; gradients are summed in ``state``."""
        self._settle()
        programs = [
            {stage: self.compiler.lowered(plan, stage) for stage in self.stages}
            for plan in step.plans
        ]
        prepared = [dict.fromkeys(self.stages, values) for values in step.prepared]
        return self.executor.step(step.schedule, programs, prepared, number=number, measure=measure)

    def update(self) -> torch.Tensor:
        """End the step with an update of the parameters; the global gradient norm."""
        clip_norm = self.compiler.request.optimizer.clip_norm
        return update(self.state, self.optimizer, self.transport, clip_norm)

    def gradients(self) -> dict[str, torch.Tensor]:
        """End the step without an update: gradients by name; parameters without one are absent."""
        self.state.finish(self.transport)
        found = self.state.parameters.items()
        return {name: p.grad for name, p in found if p.grad is not None}

    def _settle(self) -> None:
        """Take in what newer programs use; a parameter that another rank reads now goes there."""
        plans = self.compiler.plans
        if self._settled == len(plans):
            return
        self._settled = len(plans)
        shapes = {name: parameter.shape for name, parameter in self._model.items()}
        before, self._placements = self._placements, _placements(plans, shapes)
        held = self.state.parameters
        mine = [name for name in self._model if self.rank in self._placements[name].held]
        fresh = {name: self._own(name) for name in mine if name not in held}
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
        self.transport.connect(self.state.groups)
        self._optimize(fresh)
        for name, kept in arrived.items():
            if self.optimizer is not None and kept:
                self.optimizer.state[fresh[name]] = kept

    def _optimize(self, fresh: Mapping[str, nn.Parameter]) -> None:
        trainable = [parameter for parameter in fresh.values() if parameter.requires_grad]
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.compiler.request.optimizer, fresh)
        elif trainable:
            self.optimizer.add_param_group({"params": trainable})

    def _own(self, name: str) -> nn.Parameter:
        parameter = self._model[name]
        if not self._private:
            return parameter
        return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


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
    yield rank
    transport.close()


def channels_of(step: Step) -> set[tuple[int, int]]:
    """(source rank, target rank) of everything that a step sends, tied gradients apart."""
    rank_of = {stage.index: stage.ranks[0] for stage in step.plans[0].stages}
    return {
        (rank_of[action.stage], rank_of[action.peer])
        for actions in step.schedule.actions.values()
        for action in actions
        if action.kind.startswith("SEND") and action.peer is not None
    }


def _placements(plans: Iterable[Plan], shapes: Mapping[str, Sequence[int]]) -> dict[str, Placement]:
    """Every parameter on all ranks that read it in some program, else on those of its home."""
    readers: dict[str, set[int]] = {}
    homes: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        for stage in plan.stages:
            for name in stage.parameters:
                readers.setdefault(name, set()).update(stage.ranks)
        homes |= {name: plan.stages[home].ranks for name, home in plan.home.items()}
    return {
        name: Placement.replicated(shapes[name], tuple(readers.get(name, home)))
        for name, home in homes.items()
    }
