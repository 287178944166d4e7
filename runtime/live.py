"""The live values of one stage and microbatch, by name, until their last use.

A value is used once by every segment that reads it and once by every transfer that sends it; after
its last use it is dropped. A received value becomes live when it is first read: that is the moment
at which the rank waits for its transfer.
"""

from collections import Counter
from collections.abc import Iterator

import torch

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.compiler.program import Segment, StageProgram, Transfer
from mllm_compile.runtime.transport import Handle

Value = torch.Tensor | None


def uses_of(program: StageProgram) -> Counter[str]:
    """How often each name is read by the stage's segments and sends."""
    uses: Counter[str] = Counter()
    for segment in (program.forward, program.input_grad, program.weight_grad):
        if segment is not None:
            uses.update(segment.inputs)
    for transfer in (*program.sends_forward, *program.sends_backward):
        uses.update(transfer.values)
    return uses


class LiveValues:
    """The table of one (stage, microbatch)."""

    def __init__(self, program: StageProgram, uses: Counter[str]) -> None:
        self.program = program
        self._uses = Counter(uses)
        self._values: dict[str, Value] = {}
        self._arriving: dict[tuple[str, int], tuple[Handle, torch.Tensor]] = {}
        self._senders = {
            name: tuple(t.peer for t in transfers if name in t.values)
            for transfers in (program.receives_forward, program.receives_backward)
            for transfer in transfers
            for name in transfer.values
        }

    def expect(self, name: str, peer: int, handle: Handle, value: torch.Tensor) -> None:
        """A receive of ``name`` from stage ``peer`` has been posted; ``value`` will hold it."""
        self._arriving[name, peer] = (handle, value)

    def store(self, name: str, value: Value) -> None:
        """Keep a value if anything will use it."""
        if self._uses[name] > 0:
            self._values[name] = value

    def read(self, name: str) -> torch.Tensor:
        """The value of ``name``; waits for its transfers, sums gradients of several consumers."""
        value = self._values.get(name)
        if value is None:
            value = self._values[name] = self._received(name)
        return value

    def used(self, segment: Segment | Transfer) -> None:
        """The segment or send is over: drop what it used last."""
        for name in segment.inputs if isinstance(segment, Segment) else segment.values:
            self._uses[name] -= 1
            if self._uses[name] <= 0:
                self._values.pop(name, None)

    def settle(self) -> None:
        """Wait for what was received and never read, so that its buffer may go."""
        for handle, _ in self._arriving.values():
            handle.wait()
        self._arriving.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors held, those being received included."""
        yield from (value for value in self._values.values() if value is not None)
        yield from (value for _, value in self._arriving.values())

    def _received(self, name: str) -> torch.Tensor:
        total: Value = None
        for peer in self._senders.get(name, ()):
            if (name, peer) not in self._arriving:
                raise RunError(explain(name, expected=f"a receive from stage {peer} before it"))
            handle, value = self._arriving.pop((name, peer))
            handle.wait()
            total = value if total is None else total.add_(value)
        if total is None:
            raise RunError(explain(f"value {name}", expected="to be computed or received before"))
        return total
