"""Tracing again until nothing new is learned, and making sure that luck plays no part in it.

A trace that found new helpers to hoist is repeated with them, soon after it did. One that drew from
Python's or NumPy's random numbers is repeated with other draws: the graph must stay the same.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.candidates import Candidates, candidates_in_traceback
from mllm_compile.passes.capture.entries import Entries
from mllm_compile.passes.capture.fingerprint import fingerprint
from mllm_compile.passes.capture.forward_trace import ForwardTrace, Outputs, trace_forward
from mllm_compile.passes.capture.provenance import Provenance, is_model_file, place
from mllm_compile.passes.capture.randomness import host_draws, other_draws
from mllm_compile.passes.capture.shadow_mode import NewCandidates, ShadowMode

MAX_TRACES = 8
# The helpers that captures of a model have met: its next capture tries to hoist them at once.
_met: WeakKeyDictionary[nn.Module, Candidates] = WeakKeyDictionary()


@dataclass(frozen=True)
class StableTrace:
    """What to trace, and how."""

    model: nn.Module
    entries: Entries
    outputs: Outputs
    lift: torch.dtype | None

    def find(self) -> tuple[ForwardTrace, int]:
        """The last of as many traces as it takes, and their number."""
        candidates = dict(_met.get(self.model, {}))
        for attempt in range(1, MAX_TRACES + 1):
            known = candidates if attempt < MAX_TRACES else None
            mode = ShadowMode(Provenance(self.model), self.lift, known)
            found: ForwardTrace | None = None
            error: Exception | None = None
            with host_draws() as draws:
                try:
                    found = self._once(mode, candidates)
                except NewCandidates:
                    pass
                except Exception as problem:
                    error = problem
                    mode.reads.candidates |= candidates_in_traceback(problem.__traceback__)
            fresh = {c: name for c, name in mode.reads.candidates.items() if c not in candidates}
            if fresh and attempt < MAX_TRACES:
                candidates |= fresh
                continue
            if found is None:
                assert error is not None
                raise _as_capture_error(error) from error
            if draws:
                self._refuse_luck(found, candidates, draws)
            _met[self.model] = candidates
            return found, attempt
        raise AssertionError("unreachable")

    def _once(self, mode: ShadowMode, candidates: Candidates) -> ForwardTrace:
        return trace_forward(self.model, self.entries, self.outputs, mode, candidates)

    def _refuse_luck(self, found: ForwardTrace, candidates: Candidates, draws: list[str]) -> None:
        """Small draws and large ones must give the same graph."""
        for draw in other_draws():
            with draw:
                again = self._once(ShadowMode(Provenance(self.model), self.lift), candidates)
            if fingerprint(again.graph) != fingerprint(found.graph):
                raise CaptureError(
                    explain(
                        f"a draw from {' and '.join(draws)} in forward",
                        expected="random numbers from torch's operators",
                        got="random numbers that change the graph",
                        remedy="draw with torch, or switch this off",
                    )
                )


def _as_capture_error(error: Exception) -> CaptureError:
    """Errors of the model's own code while it was traced, with the line where they arose."""
    if isinstance(error, CaptureError):
        return error
    where, traceback = "", error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if is_model_file(frame.f_code.co_filename):
            where = place(frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    message = str(error).strip().splitlines() or [""]
    return CaptureError(
        explain(
            f"forward raised {type(error).__name__} at {where}",
            got=message[0],
            remedy="if it does so outside capture too, mend it there; if not, keep data in tensors",
        )
    )
