"""Guards: what the host read while the forward ran, as values to be computed anew.

A read of a known value is answered from its shadow; what was read joins the outputs of the trace.
"""

from dataclasses import dataclass, field

import torch

from mllm_compile.passes.capture.candidates import Candidates, candidates_on_stack
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.tracing import node_of

Number = bool | int | float | complex


@dataclass(frozen=True)
class Read:
    """One host read: the fake tensor that holds the value, and the value on the captured batch."""

    kind: str
    tensor: torch.Tensor
    value: Number
    where: str


@dataclass
class Reads:
    """All host reads of one trace, in order."""

    log: list[Read] = field(default_factory=list)
    candidates: Candidates = field(default_factory=dict)

    def add(self, kind: str, tensor: torch.Tensor, value: Number) -> None:
        """Record that the host read ``value`` from ``tensor``.

        The value is cloned where it is read: a later in-place write must not reach it. A real
        constant becomes part of the trace by this, so that a change of it is noticed.
        """
        if self.note(kind, tensor, value):
            self.candidates |= candidates_on_stack()

    def note(self, kind: str, tensor: torch.Tensor, value: Number) -> bool:
        """The same of a read that no model made: no call of it is to be hoisted for this."""
        copy = torch.ops.aten.clone.default(tensor)
        if node_of(copy) is None:
            return False
        self.log.append(Read(kind, copy, value, source_line()))
        return True


def same(value: Number, expected: Number) -> bool:
    """Equality under which a NaN equals itself."""
    return value == expected or (value != value and expected != expected)
