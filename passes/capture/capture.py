"""capture: an unmodified model and one batch -> one forward graph that checks what it assumes.

The forward runs under fake tensors with gradients on, parameters requiring grad as in the user's
model. It is traced again as long as the last trace found new helpers to hoist.
"""

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.captured import Captured, CaptureReport, Guard
from mllm_compile.compiler.errors import CaptureError, GuardError, explain
from mllm_compile.passes.capture.entries import Entries
from mllm_compile.passes.capture.explicit_dtypes import pin_dtypes
from mllm_compile.passes.capture.forward_trace import ForwardTrace, Outputs
from mllm_compile.passes.capture.functionalize import functionalize
from mllm_compile.passes.capture.implementation_name import check_masks
from mllm_compile.passes.capture.loss import Loss, take_apart
from mllm_compile.passes.capture.prepare import prepare
from mllm_compile.passes.capture.randomness import unchanged_generators
from mllm_compile.passes.capture.split import split
from mllm_compile.passes.capture.stable_trace import StableTrace
from mllm_compile.passes.capture.tracing import LOCK


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
    with LOCK, _collected_young():
        return _capture(model, batch, outputs, lift)


@contextmanager
def _collected_young() -> Iterator[None]:
    """Collect what a trace leaves in cycles at its end, instead of letting it grow old.

    Old garbage provokes collections of the whole heap, which take longer than a small trace.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
            gc.collect(1)


def _capture(
    model: nn.Module, batch: Mapping[str, Any], outputs: Outputs | None, lift: torch.dtype | None
) -> Captured:
    start = time.perf_counter()
    entries = Entries.of(batch)
    with unchanged_generators():
        found, passes = StableTrace(model, entries, outputs or loss_of, lift).find()
    program = _assemble(found, entries, outputs is None)
    _check_itself(program, batch, dict(model.named_buffers()))
    report = CaptureReport(
        passes=passes,
        seconds=time.perf_counter() - start,
        hoisted=tuple(dict.fromkeys(found.mode.hoisted)),
        refused=tuple(found.hoister.refused.items()),
        attention=found.attention,
        notes=(*program.report.notes, *found.mode.random),
    )
    return replace(program, report=report)


def _check_itself(
    program: Captured, batch: Mapping[str, Any], buffers: dict[str, torch.Tensor]
) -> None:
    """A program must fit the batch that it was captured from; without data, nobody can tell."""
    needed = [buffers[item.name] for item in program.prologue_inputs if item.kind == "buffer"]
    if any(tensor.is_meta for tensor in (*needed, *program.constants.values())):
        return
    try:
        prepare(program, batch, buffers)
    except GuardError as error:
        raise CaptureError(
            explain(
                "the program refuses the batch that it was captured from",
                got=str(error),
                remedy="a helper that forward calls depends on more than its arguments",
            )
        ) from error


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


def _assemble(found: ForwardTrace, entries: Entries, is_loss: bool) -> Captured:
    pin_dtypes(found.graph)
    functional = functionalize(found.graph, found.inputs, found.fakes, found.fake_mode)
    entries.refuse_shared(functional.written)
    check_masks(functional.graph.graph)
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
