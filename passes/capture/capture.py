"""capture: an unmodified model and one batch -> one forward graph that checks what it assumes.

The forward runs under fake tensors with gradients on, parameters requiring grad as in the user's
model. It is traced again as long as the last trace found new helpers to hoist.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.captured import Captured, CaptureReport, Guard
from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture import module_state
from mllm_compile.passes.capture.candidates import Candidates, candidates_in_traceback
from mllm_compile.passes.capture.entries import Entries
from mllm_compile.passes.capture.explicit_dtypes import pin_dtypes
from mllm_compile.passes.capture.forward_trace import ForwardTrace, Outputs, trace_forward
from mllm_compile.passes.capture.functionalize import functionalize
from mllm_compile.passes.capture.loss import Loss, take_apart
from mllm_compile.passes.capture.provenance import Provenance, is_model_file, place
from mllm_compile.passes.capture.randomness import unchanged_generators
from mllm_compile.passes.capture.shadow_mode import ShadowMode
from mllm_compile.passes.capture.split import split
from mllm_compile.passes.capture.tracing import LOCK

MAX_TRACES = 6


def capture(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    outputs: Outputs | None = None,
    lift: torch.dtype | None = None,
) -> Captured:
    """The program of ``model(**batch)``; the model may be on the meta device.

    ``outputs`` picks a flat tuple of tensors from what the model returns; by default it is the
    scalar loss. ``lift`` makes float32 mean another dtype (see ``lifted``). The model is left as it
    was. Raises CaptureError, naming the source line, for what cannot be one graph.
    """
    start = time.perf_counter()
    entries = Entries.of(batch)
    with LOCK, unchanged_generators() as host_draws:
        found, passes = _trace_until_stable(model, entries, outputs or loss_of, lift)
    program = _assemble(found, entries, outputs is None)
    report = CaptureReport(
        passes=passes,
        seconds=time.perf_counter() - start,
        hoisted=tuple(dict.fromkeys(found.mode.hoisted)),
        refused=tuple(found.hoister.refused.items()),
        attention=found.attention,
        notes=(*program.report.notes, *found.mode.random, *host_draws),
    )
    return replace(program, report=report)


def loss_of(result: Any) -> tuple[torch.Tensor]:
    """The scalar loss in what a model returned: ``.loss``, ``["loss"]``, itself, or the first."""
    loss = result
    if not isinstance(result, torch.Tensor):
        loss = result.get("loss") if hasattr(result, "get") else getattr(result, "loss", None)
        if loss is None and isinstance(result, (tuple, list)) and result:
            loss = result[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.dim():
        raise CaptureError(
            explain(
                "the model's result",
                expected="a scalar loss: a tensor, .loss, ['loss'], or the first of a tuple",
                got=f"{type(loss).__name__} in {type(result).__name__}",
                remedy="pass labels, or say by outputs= which tensors to compute",
            )
        )
    return (loss,)


def _trace_until_stable(
    model: nn.Module, entries: Entries, outputs: Outputs, lift: torch.dtype | None
) -> tuple[ForwardTrace, int]:
    candidates: Candidates = {}
    for attempt in range(1, MAX_TRACES + 1):
        mode = ShadowMode(Provenance(model), lift)
        found: ForwardTrace | None = None
        error: Exception | None = None
        try:
            with module_state.restored(model) as before:
                found = trace_forward(model, entries, outputs, mode, candidates)
                _refuse_counters(before)
        except Exception as problem:
            error = problem
            mode.reads.candidates |= candidates_in_traceback(problem.__traceback__)
        fresh = {
            code: name for code, name in mode.reads.candidates.items() if code not in candidates
        }
        if not fresh or attempt == MAX_TRACES:
            if found is None:
                assert error is not None
                raise _as_capture_error(error) from error
            return found, attempt
        candidates |= fresh
    raise AssertionError("unreachable")


def _assemble(found: ForwardTrace, entries: Entries, is_loss: bool) -> Captured:
    pin_dtypes(found.graph)
    functional = functionalize(found.graph, found.inputs, found.fakes, found.fake_mode)
    returned, reads = functional.outputs, found.mode.reads.log
    outputs, guards = returned[: found.num_outputs], returned[found.num_outputs :]
    loss = Loss(outputs[0], (), "its outputs were chosen by hand")
    if is_loss:
        loss = take_apart(functional, outputs[0], reads, found.fake_mode)
    outputs = [loss.node, *outputs[1:], *functional.updates.values()]
    halves = split(functional, outputs, guards, loss.denominators)
    return Captured(
        main=halves.main,
        prologue=halves.prologue,
        inputs=halves.inputs,
        prologue_inputs=halves.prologue_inputs,
        guards=tuple(
            Guard(read.kind, node, read.value, read.where, names)
            for read, node, names in zip(
                reads, halves.guard_nodes, halves.guard_inputs, strict=True
            )
        ),
        results=halves.results,
        constants=functional.constants,
        signature=entries.signature,
        num_outputs=found.num_outputs,
        updates=tuple(functional.updates),
        splittable=not loss.reason,
        report=CaptureReport(notes=(f"one microbatch only: {loss.reason}",) if loss.reason else ()),
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


def _refuse_counters(before: module_state.Snapshot) -> None:
    """A number that forward counts in an attribute would be frozen into the program."""
    counters = module_state.counters(before)
    if counters:
        raise CaptureError(
            explain(
                f"attribute {counters[0]}",
                got="a number that every forward changes",
                remedy="keep it in a registered buffer",
            )
        )
