"""One rank of a job: its parameters, its executor, its optimizer, and the steps that it runs.

The same class serves threads of one process, subprocesses and torchrun: they differ only in the
transport.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mllm_compile.agreement import agree
from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.plan import Plan
from mllm_compile.runtime.distributed_transport import DistributedTransport
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.migrate import receive_parameter, send_parameter
from mllm_compile.runtime.optimizer import make_optimizer, update
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
        self._holders: dict[str, tuple[int, ...]] = {}
        self._settled = 0
        self._settle()
        rank_of = {stage.index: stage.ranks[0] for stage in stages}
        self.executor = Executor(transport, self.state, rank_of, names=names, publish=publish)

    def run(self, step: Step, number: int = 0, *, measure: bool = False) -> StepResult:
        """Run one step's actions; gradients are summed in ``state``."""
        self._settle()
        programs = [
            {stage: self.compiler.lowered(plan, stage) for stage in self.stages}
            for plan in step.plans
        ]
        return self.executor.step(
            step.schedule, programs, step.prepared, number=number, measure=measure
        )

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
        before, self._holders = self._holders, _holders(plans)
        held = self.state.parameters
        mine = [name for name in self._model if self.rank in self._holders[name]]
        fresh = {name: self._own(name) for name in mine if name not in held}
        arrived = self._exchange(before, fresh)
        for name in [name for name in held if name not in mine]:
            del held[name]
        held.update(fresh)
        self.state.holders = {n: ranks for n, ranks in self._holders.items() if len(ranks) > 1}
        self._optimize(fresh)
        for name, kept in arrived.items():
            if self.optimizer is not None and kept:
                self.optimizer.state[fresh[name]] = kept

    def _exchange(
        self, before: Mapping[str, tuple[int, ...]], fresh: Mapping[str, nn.Parameter]
    ) -> dict[str, dict[str, Any]]:
        """Bring parameters to their new ranks, in one order on all; the optimizer's states."""
        arrived: dict[str, dict[str, Any]] = {}
        for name, old in sorted(before.items()):
            for target in (rank for rank in self._holders[name] if rank not in old):
                if self.rank == old[0]:
                    parameter = self.state.parameters[name]
                    send_parameter(self.transport, parameter, self.optimizer, target)
                elif self.rank == target:
                    value, arrived[name] = receive_parameter(self.transport, old[0])
                    fresh[name].data.copy_(value)
        return arrived

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


def _holders(plans: Iterable[Plan]) -> dict[str, tuple[int, ...]]:
    """The ranks of every parameter: all that read it in some program, else its home."""
    readers: dict[str, set[int]] = {}
    homes: dict[str, tuple[int, ...]] = {}
    for plan in plans:
        for stage in plan.stages:
            for name in stage.parameters:
                readers.setdefault(name, set()).update(stage.ranks)
        homes |= {name: plan.stages[home].ranks for name, home in plan.home.items()}
    return {name: tuple(sorted(readers.get(name, homes[name]))) for name in homes}
