"""Run one rank's actions: one loop, one handler per kind of action. It decides nothing.

For every microbatch the executor is given its lowered stages (``programs``: microbatches of one
step may be of different variants, with other image counts or without a modality) and the inputs of
each (``prepared``). All ranks of a stage run one list of actions; what the data lane of this rank
has no program, segment or transfer for, it skips. Terms are those of ``compiler/program.py``.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import fx

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.captured import Prepared
from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.program import Segment, StageProgram, Transfer
from mllm_compile.kernels.collective.members import members
from mllm_compile.kernels.host_copies import moved
from mllm_compile.runtime.boxed import Boxed, boxed
from mllm_compile.runtime.exchange import Exchange
from mllm_compile.runtime.groups import members_of
from mllm_compile.runtime.live import LiveValues, Value, uses_of
from mllm_compile.runtime.measures import HostReads, Measures, live_bytes, storages
from mllm_compile.runtime.outbox import Outbox
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import PeerLostError, Transport


@dataclass(frozen=True)
class StepResult:
    """Losses by microbatch (scalar tensors) and measures.

    Only the first rank of every data lane that computes the loss has it: over all ranks, they add
    up to the global loss.
    """

    losses: Mapping[int, torch.Tensor]
    measures: Measures


class Executor:
    """Runs the steps of one rank.

    Args:
        transport: this rank's end of the network.
        state: parameters, buffers and gradients of this rank's stages.
        meshes: the ranks of every stage. Groups along the axes of this rank's stages must be
            connected (``groups_of``).
        names: what to call each stage in messages, such as its module's path.
        publish: called with a short text before every action, for whoever watches the rank.
    """

    def __init__(
        self,
        transport: Transport,
        state: State,
        meshes: Mapping[int, Mesh],
        *,
        names: Mapping[int, str] | None = None,
        publish: Callable[[str], None] | None = None,
    ) -> None:
        self.transport, self.state, self.meshes = transport, state, dict(meshes)
        self.members = {
            stage: members_of(mesh, transport)
            for stage, mesh in self.meshes.items()
            if transport.rank in mesh.ranks
        }
        self.names = dict(names or {})
        self.publish = publish or (lambda text: None)
        self._uses: dict[int, tuple[StageProgram, Counter[str]]] = {}
        self._boxed: dict[int, tuple[Segment, Boxed]] = {}

    def step(
        self,
        schedule: Schedule,
        programs: Sequence[Mapping[int, StageProgram]],
        prepared: Sequence[Mapping[int, Prepared]],
        *,
        number: int = 0,
        measure: bool = False,
    ) -> StepResult:
        """Run the actions of one step; gradients are added to ``state``.

        Args:
            schedule: of all ranks; this one runs its own actions and keeps the windows.
            programs: per microbatch, the programs of this rank's stages by index, each for the
                rank's data lane of that stage; a stage with nothing to do is left out.
            prepared: per microbatch, the values of the inputs of these programs.
            number: of the step, for messages.
            measure: also count host reads and the peak of live bytes.

        Raises:
            RunError: an action failed; names rank, stage and action. PeerLostError if it failed
                only because another rank is gone.
        """
        step = _Step(self, schedule, programs, prepared, measure)
        with torch.no_grad():
            for action in schedule.actions[self.transport.rank]:
                self.publish(f"{action} of step {number}")
                try:
                    step.act(action)
                except Exception as error:
                    raise self._explained(action, number, error) from error
                step.observe()
            self.publish(f"the last transfers of step {number}")
            step.finish()
        self.publish(f"the work after step {number}")
        if step.reads is not None:
            step.measures.host_reads = step.reads.count
        return StepResult(step.losses, step.measures)

    def counts_loss(self, stage: int) -> bool:
        """Whether this rank is the first of its data lane."""
        mesh, rank = self.meshes[stage], self.transport.rank
        return all(mesh.place(rank, axis.name) == 0 for axis in mesh.axes)

    def uses_of(self, program: StageProgram) -> Counter[str]:
        """Uses of every name in ``program``; counted once per program."""
        if id(program) not in self._uses:
            self._uses[id(program)] = (program, uses_of(program))
        return self._uses[id(program)][1]

    def boxed(self, segment: Segment) -> Boxed:
        """The segment's graph as a function that frees inputs while it runs; made once."""
        if id(segment) not in self._boxed:
            self._boxed[id(segment)] = (segment, boxed(segment.graph))
        return self._boxed[id(segment)][1]

    def _explained(self, action: Action, number: int, error: Exception) -> RunError:
        name = self.names.get(action.stage)
        where = f"stage {action.stage}" + (f", {name}" if name else "")
        peer = ""
        if action.peer is not None:
            peer = f" (stage {action.peer} is on {_on(self.meshes.get(action.peer))})"
        kind = PeerLostError if isinstance(error, PeerLostError) else RunError
        text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        return kind(
            f"rank {self.transport.rank} ({where}) failed during {action}{peer} of step {number}: "
            f"{text}"
        )


def _on(mesh: Mesh | None) -> str:
    ranks = mesh.ranks if mesh is not None else ()
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks)) or '?'}"


class _Step:
    """The state of one step: live values by (stage, microbatch), sends under way, results."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        programs: Sequence[Mapping[int, StageProgram]],
        prepared: Sequence[Mapping[int, Prepared]],
        measure: bool,
    ) -> None:
        self.executor, self.programs, self.prepared = executor, programs, prepared
        self.transport, self.state = executor.transport, executor.state
        self.live: dict[tuple[int, int], LiveValues] = {}
        self.outbox = Outbox(schedule, executor.transport.rank)
        self.losses: dict[int, torch.Tensor] = {}
        self.reads = HostReads() if measure else None
        self.measures = Measures(peak_live_bytes=0 if measure else None)
        self.exchange = Exchange(self.transport, self.outbox, self.measures)

    def act(self, action: Action) -> None:
        """Run one action, or skip it where this rank's data lane has nothing to do."""
        program = self.programs[action.microbatch].get(action.stage)
        todo = None if program is None else _TODO[action.kind](program, action.peer)
        if todo is None:
            self.skip(action)
        elif isinstance(todo, Segment):
            self.run(todo, action)
        elif action.kind.startswith("SEND"):
            self.send(todo, action)
        else:
            self.receive(todo, action)

    def skip(self, action: Action) -> None:
        """Lanes share one list of actions; where there is but one lane, nothing may be missing."""
        stages = (action.stage,) if action.peer is None else (action.stage, action.peer)
        if all(self.executor.meshes[stage].size("data") == 1 for stage in stages):
            raise RunError(explain(f"stage {action.stage}", expected=f"a program for {action}"))
        if action.kind.startswith("SEND"):
            self.outbox.sent(action, {})

    def table(self, action: Action) -> LiveValues:
        """The live values of the action's stage and microbatch."""
        key = (action.stage, action.microbatch)
        if key not in self.live:
            program = self.programs[action.microbatch][action.stage]
            self.live[key] = LiveValues(program, self.executor.uses_of(program))
        return self.live[key]

    def run(self, segment: Segment, action: Action) -> None:
        """Read the inputs, drop what this uses last, call the graph, store the outputs."""
        if action.kind == "F":
            self.outbox.forward_starts(action)
        table = self.table(action)
        inputs = [self.value(name, action, table) for name in segment.inputs]
        # torch.compile falls back to the plain graph while such a mode is on.
        interpreted = isinstance(segment.graph, fx.GraphModule)
        call = self.executor.boxed(segment)
        table.used(segment)
        counted = self.reads if interpreted and self.reads else nullcontext()
        with members(self.executor.members[action.stage]), counted:
            outputs: Sequence[Value] = call(inputs)
        if len(outputs) != len(segment.outputs):
            expected = f"{len(segment.outputs)} outputs"
            raise RunError(explain(f"{action}", expected=expected, got=str(len(outputs))))
        for name, value in zip(segment.outputs, outputs, strict=True):
            self.keep(name, value, action.microbatch, table)

    def value(self, name: str, action: Action, table: LiveValues) -> torch.Tensor:
        """What a segment reads under ``name``."""
        prefix, _, rest = name.partition(":")
        if prefix == "p":
            return self.state.parameters[rest]
        if prefix == "b":
            return self.state.buffers[rest]
        if prefix == "x" and name not in table:
            kind, _, key = rest.partition(":")
            value = self.prepared[action.microbatch][action.stage].values[kind, key]
            table.store(name, moved(value, self.transport.device))
        return table.read(name)

    def keep(self, name: str, value: Value, microbatch: int, table: LiveValues) -> None:
        """Where an output of a segment goes."""
        prefix, _, rest = name.partition(":")
        if prefix == "g":
            if value is not None:
                self.state.accumulate(rest, value)
            return
        if prefix == "u":
            assert value is not None
            self.state.set_buffer(rest, value)
            return
        if name == table.program.loss and self.executor.counts_loss(table.program.stage):
            assert value is not None
            self.losses[microbatch] = value
        table.store(name, value)

    def send(self, transfer: Transfer, action: Action) -> None:
        """Start to send a transfer's values."""
        table = self.table(action)
        values = {name: table.read(name) for name in transfer.values}
        self.exchange.send(transfer, action, values)
        table.used(transfer)

    def receive(self, transfer: Transfer, action: Action) -> None:
        """Post the receives of a transfer; whoever reads the values waits for them."""
        table = self.table(action)
        for name, arrival in self.exchange.receive(transfer, action).items():
            table.expect(name, transfer.peer, arrival, arrival.value)

    def finish(self) -> None:
        """Wait for all transfers."""
        for table in self.live.values():
            table.settle()
        self.outbox.finish()

    def observe(self) -> None:
        """Track the peak of live bytes, if asked to measure."""
        if self.measures.peak_live_bytes is None:
            return
        state = self.state
        prepared = (item for stages in self.prepared for item in stages.values())
        inputs = (value for item in prepared for value in item.values.values())
        known = storages((*state.parameters.values(), *state.buffers.values(), *inputs))
        tensors = [tensor for table in self.live.values() for tensor in table.tensors()]
        now = live_bytes(tensors, known)
        self.measures.peak_live_bytes = max(self.measures.peak_live_bytes, now)


Todo = Segment | Transfer | None

_TODO: Mapping[str, Callable[[StageProgram, int | None], Todo]] = {
    "F": lambda program, peer: program.forward,
    "I": lambda program, peer: program.input_grad,
    "W": lambda program, peer: program.weight_grad,
    "SEND_F": lambda program, peer: _with(program.sends_forward, peer),
    "RECV_F": lambda program, peer: _with(program.receives_forward, peer),
    "SEND_B": lambda program, peer: _with(program.sends_backward, peer),
    "RECV_B": lambda program, peer: _with(program.receives_backward, peer),
}


def _with(transfers: Iterable[Transfer], peer: int | None) -> Transfer | None:
    return next((transfer for transfer in transfers if transfer.peer == peer), None)
