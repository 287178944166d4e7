"""One trace of the forward, under everything that makes it possible; all undone afterwards."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from mllm_compile.compiler.captured import Input
from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.attention import attention_interfaces
from mllm_compile.passes.capture.attention_masks import Facts
from mllm_compile.passes.capture.candidates import Candidates
from mllm_compile.passes.capture.entries import Entries
from mllm_compile.passes.capture.hf_eager import eager_path
from mllm_compile.passes.capture.hoisting import Hoister, intercepted
from mllm_compile.passes.capture.host_reads import HostReads
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.opaque_function import opaque_functions
from mllm_compile.passes.capture.repeats import traced_once
from mllm_compile.passes.capture.shadow_mode import ShadowMode
from mllm_compile.passes.capture.tracing import FakeTensorMode, fake_like, reparametrize, trace

Outputs = Callable[[Any], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class ForwardTrace:
    """The raw graph of one forward, and everything that was noticed on the way.

    The graph takes ``inputs`` (their fakes are ``fakes``) and returns the model's outputs, then
    every value that the host read.
    """

    graph: fx.GraphModule
    inputs: list[Input]
    fakes: list[torch.Tensor]
    fake_mode: FakeTensorMode
    mode: ShadowMode
    hoister: Hoister
    attention: tuple[str, ...]
    num_outputs: int


def trace_forward(
    model: nn.Module, entries: Entries, outputs: Outputs, mode: ShadowMode, candidates: Candidates
) -> ForwardTrace:
    """Trace ``outputs(model(**batch))`` once, trying to hoist calls of the candidates."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    device = next((tensor.device for tensor in entries.tensors.values()), torch.device("cpu"))
    tensors = (*state.values(), *entries.tensors.values())
    fakes = [fake_like(fake_mode, tensor, device) for tensor in tensors]
    inputs, num_outputs = _inputs(model, entries), 0

    def traced_forward(*flat: torch.Tensor) -> list[torch.Tensor]:
        nonlocal num_outputs
        given = flat[len(state) :]
        stand_ins = dict(zip(state, flat, strict=False))
        _cast_shadows(model, entries, stand_ins, given, mode)

        def forward() -> list[torch.Tensor]:
            made = list(outputs(model(**entries.rebuild(given))))
            _write_back(model, stand_ins)
            return made

        with reparametrize(model, dict(stand_ins)), mode, HostReads(mode), lifted(mode.lift):
            made = traced_once(model, mode, [attention], forward)
        num_outputs = len(made)
        return [*made, *(read.tensor for read in mode.reads.log)]

    hoister = Hoister(model, mode)
    with intercepted(candidates, hoister), _surroundings(model, mode) as attention:
        graph = trace(traced_forward, fakes, fake_mode)
    return ForwardTrace(
        graph, inputs, fakes, fake_mode, mode, hoister, tuple(attention), num_outputs
    )


def _inputs(model: nn.Module, entries: Entries) -> list[Input]:
    return [
        *(Input("parameter", name, p.requires_grad) for name, p in model.named_parameters()),
        *(Input("buffer", name) for name, _ in model.named_buffers()),
        *(Input("batch", name, entry.requires_grad) for name, entry in entries.tensors.items()),
    ]


def _cast_shadows(
    model: nn.Module,
    entries: Entries,
    state: dict[str, torch.Tensor],
    given: Sequence[torch.Tensor],
    mode: ShadowMode,
) -> None:
    """Give batch entries and buffers their shadows; a buffer without data has none."""
    for name, buffer in model.named_buffers():
        if buffer.device.type != "meta":
            mode.shadows.put_copy(state[name], buffer)
    for fake, tensor in zip(given, entries.tensors.values(), strict=True):
        mode.shadows.put_copy(fake, tensor)


def _write_back(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """A buffer that forward replaced by another tensor gets that tensor's values instead."""
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in state.items():
        new = now.get(name)
        if new is None or new is tensor:
            continue
        if tensor.requires_grad or (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            raise CaptureError(
                explain(
                    f"{name}",
                    expected="a parameter left alone, or a buffer of the same shape and dtype",
                    got="another tensor in its place after forward",
                )
            )
        tensor.copy_(new.detach())
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = tensor


@contextmanager
def _surroundings(model: nn.Module, mode: ShadowMode) -> Iterator[list[str]]:
    """Process-wide changes for the time of one trace; yields a line per attention call."""
    with ExitStack() as stack:
        stack.enter_context(eager_path())
        facts = Facts(mode.shadows.of, mode.assume)
        sites = stack.enter_context(attention_interfaces(model, facts))
        stack.enter_context(opaque_functions())
        stack.enter_context(mode.provenance.followed())
        stack.enter_context(torch.enable_grad())
        yield sites.lines
