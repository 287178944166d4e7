"""Whether a forward leaves something behind in Python objects that changes the next one.

A program is one forward, run for every microbatch of every step. Where a forward has changed
anything that the model can reach, it is traced a second time in the same trace: both must be the
same computation, and numbers must have settled. A table made once and used again passes; a counter
does not, nor does what one batch leaves for the next.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture import module_state
from mllm_compile.passes.capture.fingerprint import fingerprint_halves, memory
from mllm_compile.passes.capture.guards import Read
from mllm_compile.passes.capture.shadow_mode import ShadowMode
from mllm_compile.passes.capture.tracing import (
    drop_after,
    is_mutable,
    last_node,
    node_of,
    outside_modes,
    recorded,
)

Forward = Callable[[], list[torch.Tensor]]


def traced_once(
    model: nn.Module, mode: ShadowMode, notes: Sequence[list[str]], forward: Forward
) -> list[torch.Tensor]:
    """The result of ``forward``; CaptureError, naming the attribute, if a second one would differ.

    Nothing of a second run stays in the trace, in ``notes`` or in the mode.
    """
    logs: list[list[Any]] = [mode.reads.log, mode.random, mode.hoisted, *notes]
    with module_state.restored(model) as before:
        made = forward()
        between = module_state.snapshot(model)
        changed = module_state.changed(before, between)
        if changed and not mode.will_be_repeated:
            with _dropped([*made, *(read.tensor for read in mode.reads.log)], logs):
                _run_again(mode, forward, made, between, changed)
    return made


@contextmanager
def _dropped(tensors: list[torch.Tensor], logs: list[list[Any]]) -> Iterator[None]:
    """Afterwards the trace, the logs and what the tensors stand for are as before."""
    mark, makers = last_node(), [(tensor, node_of(tensor)) for tensor in tensors]
    lengths = [len(log) for log in logs]
    yield
    drop_after(mark, makers)
    for log, length in zip(logs, lengths, strict=True):
        del log[length:]


def _run_again(
    mode: ShadowMode,
    forward: Forward,
    made: list[torch.Tensor],
    between: module_state.Snapshot,
    changed: list[str],
) -> None:
    """CaptureError if another forward counts on, or is another computation."""
    model, mark, count = between.model, last_node(), len(mode.reads.log)
    nodes = list(map(node_of, made))
    again = list(map(node_of, forward()))
    counted = module_state.counted(between, module_state.snapshot(model))
    if counted:
        raise _refusal(model, counted, "a number or a size that every forward changes")
    reads = mode.reads.log
    same = _told(reads[:count]) == _told(reads[count:]) and _same(model, mark, nodes, again)
    if not same:
        raise _refusal(model, changed, "something that one forward leaves behind for the next")


def _told(reads: list[Read]) -> list[tuple[Any, ...]]:
    return [(read.kind, str(read.value), read.where) for read in reads]


def _same(
    model: nn.Module,
    mark: fx.Node | None,
    made: list[fx.Node | None],
    again: list[fx.Node | None],
) -> bool:
    """Whether the nodes up to ``mark`` and those after it compute the same."""
    graph, root = recorded()
    written = {memory(s) for n in graph.nodes if is_mutable(n) for s in n.all_input_nodes}
    buffers = [node for node in map(node_of, model.buffers()) if node is not None]
    steady = [n for n in buffers if n.op == "placeholder" and memory(n) not in written]
    with outside_modes():
        first, second = fingerprint_halves(graph.nodes, root, mark, steady, (made, again))
    return first == second


def _refusal(model: nn.Module, paths: list[str], got: str) -> CaptureError:
    place = paths[0]
    if not place.startswith(module_state.ELSEWHERE):
        place = f"attribute {place} of {type(model).__name__}"
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return CaptureError(
        explain(
            f"{place}{more}",
            expected="a forward that does the same every time",
            got=got,
            remedy="keep it in a buffer (register_buffer in __init__), which forward may update",
        )
    )
