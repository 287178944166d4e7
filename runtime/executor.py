"""Run one rank's actions: one loop, one handler per kind of action. It decides nothing.

For every microbatch the executor is given its lowered stages (``programs``: microbatches of one
step may be of different variants, with other image counts or without a modality) and its inputs
(``prepared``). Terms are those of ``compiler/program.py``.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import fx

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.captured import Prepared
from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.compiler.program import Segment, StageProgram, Transfer
from mllm_compile.runtime.boxed import Boxed, boxed
from mllm_compile.runtime.live import LiveValues, Value, uses_of
from mllm_compile.runtime.measures import HostReads, Measures, live_bytes, storages
from mllm_compile.runtime.outbox import Outbox
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import (
    Handle,
    PeerLostError,
    Transport,
    receive_buffer,
    to_wire,
)


@dataclass(frozen=True)
class StepResult:
    """Losses by microbatch (scalar tensors, only on the rank that computes them) and measures."""

    losses: Mapping[int, torch.Tensor]
    measures: Measures


class Executor:
    """Runs the steps of one rank.

    Args:
        transport: this rank's end of the network.
        state: parameters, buffers and gradients of this rank's stages.
        rank_of: the rank of every stage.
        names: what to call each stage in messages, such as its module's path.
        publish: called with a short text before every action, for whoever watches the rank.
    """

    def __init__(
        self,
        transport: Transport,
        state: State,
        rank_of: Mapping[int, int],
        *,
        names: Mapping[int, str] | None = None,
        publish: Callable[[str], None] | None = None,
    ) -> None:
        self.transport, self.state, self.rank_of = transport, state, dict(rank_of)
        self.names = dict(names or {})
        self.publish = publish or (lambda text: None)
        self._uses: dict[int, tuple[StageProgram, Counter[str]]] = {}
        self._boxed: dict[int, tuple[Segment, Boxed]] = {}

    def step(
        self,
        schedule: Schedule,
        programs: Sequence[Mapping[int, StageProgram]],
        prepared: Sequence[Prepared],
        *,
        number: int = 0,
        measure: bool = False,
    ) -> StepResult:
        """Run the actions of one step; gradients are added to ``state``.

        Args:
            schedule: of all ranks; this one runs its own actions and keeps the windows.
            programs: per microbatch, this rank's stages by index.
            prepared: per microbatch, the values of its inputs.
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
                    _HANDLERS[action.kind](step, action, step.table(action).program)
                except Exception as error:
                    raise self._explained(action, number, error) from error
                step.observe()
            self.publish(f"the last transfers of step {number}")
            step.finish()
        self.publish(f"the work after step {number}")
        if step.reads is not None:
            step.measures.host_reads = step.reads.count
        return StepResult(step.losses, step.measures)

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
            peer = f" (stage {action.peer} is on rank {self.rank_of.get(action.peer)})"
        kind = PeerLostError if isinstance(error, PeerLostError) else RunError
        text = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        return kind(
            f"rank {self.transport.rank} ({where}) failed during {action}{peer} of step {number}: "
            f"{text}"
        )


@dataclass(frozen=True)
class _Arrival:
    """The receive of one value; its end tells the outbox."""

    handle: Handle
    outbox: Outbox
    action: Action

    def wait(self) -> None:
        self.handle.wait()
        self.outbox.arrived(self.action)


class _Step:
    """The state of one step: live values by (stage, microbatch), sends under way, results."""

    def __init__(
        self,
        executor: Executor,
        schedule: Schedule,
        programs: Sequence[Mapping[int, StageProgram]],
        prepared: Sequence[Prepared],
        measure: bool,
    ) -> None:
        self.executor, self.programs, self.prepared = executor, programs, prepared
        self.transport, self.state = executor.transport, executor.state
        self.live: dict[tuple[int, int], LiveValues] = {}
        self.outbox = Outbox(schedule, executor.transport.rank)
        self.losses: dict[int, torch.Tensor] = {}
        self.reads = HostReads() if measure else None
        self.measures = Measures(peak_live_bytes=0 if measure else None)

    def table(self, action: Action) -> LiveValues:
        """The live values of the action's stage and microbatch."""
        key = (action.stage, action.microbatch)
        if key not in self.live:
            program = self.programs[action.microbatch].get(action.stage)
            if program is None:
                raise RunError(explain(f"stage {action.stage}", expected="a program on this rank"))
            uses = self.executor.uses_of(program)
            self.live[key] = LiveValues(program, uses)
        return self.live[key]

    def forward(self, segment: Segment, action: Action) -> None:
        """Keep the stage's window, then run."""
        self.outbox.forward_starts(action)
        self.run(segment, action)

    def run(self, segment: Segment | None, action: Action) -> None:
        """Read the inputs, drop what this uses last, call the graph, store the outputs."""
        table = self.table(action)
        if segment is None:
            raise RunError(explain(f"stage {action.stage}", expected=f"a segment for {action}"))
        inputs = [self.value(name, action.microbatch, table) for name in segment.inputs]
        # torch.compile falls back to the plain graph while such a mode is on.
        interpreted = isinstance(segment.graph, fx.GraphModule)
        call = self.executor.boxed(segment)
        table.used(segment)
        with self.reads if interpreted and self.reads else nullcontext():
            outputs: Sequence[Value] = call(inputs)
        if len(outputs) != len(segment.outputs):
            expected = f"{len(segment.outputs)} outputs"
            raise RunError(explain(f"{action}", expected=expected, got=str(len(outputs))))
        for name, value in zip(segment.outputs, outputs, strict=True):
            self.keep(name, value, action.microbatch, table)

    def value(self, name: str, microbatch: int, table: LiveValues) -> torch.Tensor:
        """What a segment reads under ``name``."""
        prefix, _, rest = name.partition(":")
        if prefix == "p":
            return self.state.parameters[rest]
        if prefix == "b":
            return self.state.buffers[rest]
        if prefix == "x" and name not in table:
            kind, _, key = rest.partition(":")
            value = self.prepared[microbatch].values[kind, key]
            table.store(name, value.to(self.transport.device, non_blocking=True))
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
        if name == table.program.loss:
            assert value is not None
            self.losses[microbatch] = value
        table.store(name, value)

    def send(self, transfers: Iterable[Transfer], action: Action) -> None:
        """Start to send a transfer's values."""
        transfer, peer = self.find(transfers, action)
        table = self.table(action)
        forward = action.kind == "SEND_F"
        handles = []
        for name, spec in zip(transfer.values, transfer.specs, strict=True):
            tensor = to_wire(table.read(name), spec)
            if tensor.dtype != spec.dtype or tensor.numel() != math.prod(spec.shape):
                got = f"{tensor.dtype} with {tensor.numel()} elements"
                raise RunError(explain(name, expected=f"{spec.dtype} {spec.shape}", got=got))
            handles.append(self.transport.send(tensor, peer))
            self.measures.count_send(tensor, forward=forward)
        table.used(transfer)
        self.outbox.sent(action, handles)

    def receive(self, transfers: Iterable[Transfer], action: Action) -> None:
        """Post the receives of a transfer; whoever reads the values waits for them."""
        transfer, peer = self.find(transfers, action)
        table = self.table(action)
        for name, spec in zip(transfer.values, transfer.specs, strict=True):
            buffer, value = receive_buffer(spec, self.transport.device)
            handle = _Arrival(self.transport.receive(buffer, peer), self.outbox, action)
            table.expect(name, transfer.peer, handle, value)

    def find(self, transfers: Iterable[Transfer], action: Action) -> tuple[Transfer, int]:
        """The transfer with the action's peer stage, and the rank of that stage."""
        for transfer in transfers:
            if transfer.peer == action.peer:
                return transfer, self.executor.rank_of[transfer.peer]
        raise RunError(explain(f"stage {action.stage}", expected=f"a transfer for {action}"))

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
        inputs = (value for item in self.prepared for value in item.values.values())
        known = storages((*state.parameters.values(), *state.buffers.values(), *inputs))
        tensors = [tensor for table in self.live.values() for tensor in table.tensors()]
        now = live_bytes(tensors, known)
        self.measures.peak_live_bytes = max(self.measures.peak_live_bytes, now)


_HANDLERS: Mapping[str, Callable[[_Step, Action, StageProgram], None]] = {
    "F": lambda step, action, program: step.forward(program.forward, action),
    "I": lambda step, action, program: step.run(program.input_grad, action),
    "W": lambda step, action, program: step.run(program.weight_grad, action),
    "SEND_F": lambda step, action, program: step.send(program.sends_forward, action),
    "RECV_F": lambda step, action, program: step.receive(program.receives_forward, action),
    "SEND_B": lambda step, action, program: step.send(program.sends_backward, action),
    "RECV_B": lambda step, action, program: step.receive(program.receives_backward, action),
}
