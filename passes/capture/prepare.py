"""Whether a microbatch fits a program, and the values that the program then starts from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mllm_compile.compiler.captured import Captured, Guard, Prepared, Signature
from mllm_compile.compiler.errors import GuardError, explain
from mllm_compile.passes.capture.entries import Entries
from mllm_compile.passes.capture.guards import Number, same

State = Mapping[str, torch.Tensor]
Values = Mapping[tuple[str, str], torch.Tensor]


def prepare(captured: Captured, batch: Mapping[str, Any], buffers: State) -> Prepared:
    """Run the prologue on one microbatch; GuardError, naming what differs, if it does not fit.

    ``buffers`` are the model's buffers by name. The result holds a value for every batch, constant,
    hoisted and denominator input of the main graph.
    """
    entries = Entries.of(batch)
    _check_signature(captured.signature, entries.signature)
    given: dict[tuple[str, str], torch.Tensor] = {
        ("batch", name): tensor for name, tensor in entries.tensors.items()
    }
    given |= {("constant", name): tensor for name, tensor in captured.constants.items()}
    known = given | {("buffer", name): tensor for name, tensor in buffers.items()}
    returned = _run_prologue(captured, known)
    count = len(captured.guards)
    for guard, value in zip(captured.guards, returned, strict=False):
        _check_guard(guard, value.item())
    results = dict(zip(captured.results, returned[count:], strict=True))
    values: dict[tuple[str, str], torch.Tensor] = {}
    for item in captured.inputs:
        key = (item.kind, item.name)
        if item.kind in ("hoisted", "denominator"):
            values[key] = results[item.name]
        elif item.kind not in ("parameter", "buffer"):
            values[key] = given[key]
    return Prepared(captured, values)


def run(captured: Captured, state: State, prepared: Prepared) -> tuple[torch.Tensor, ...]:
    """Interpret the main graph: outputs, then buffer updates; ``state`` names the model's tensors.

    A plain, slow execution that autograd follows; the measure for everything that is faster.
    """
    arguments = [
        state[item.name]
        if item.kind in ("parameter", "buffer")
        else prepared.values[item.kind, item.name]
        for item in captured.inputs
    ]
    with torch.enable_grad():
        return tuple(fx.Interpreter(captured.main).run(*arguments))


def _check_signature(expected: Signature, got: Signature) -> None:
    for want, have in ((expected.tensors, got.tensors), (expected.others, got.others)):
        wanted, had = dict[str, Any](want), dict[str, Any](have)
        for name in dict.fromkeys((*wanted, *had)):
            if wanted.get(name) != had.get(name):
                raise GuardError(
                    explain(
                        f"batch entry {name!r}",
                        expected=str(wanted.get(name, "no such entry")),
                        got=str(had.get(name, "no such entry")),
                    )
                )


def _run_prologue(captured: Captured, known: Values) -> tuple[torch.Tensor, ...]:
    arguments = [known[item.kind, item.name] for item in captured.prologue_inputs]
    try:
        with torch.no_grad():
            return tuple(fx.Interpreter(captured.prologue).run(*arguments))
    except RuntimeError as error:  # an operator refused the microbatch's values
        raise GuardError(f"the prologue failed on this batch: {error}") from error


def _check_guard(guard: Guard, value: Number) -> None:
    if not same(value, guard.value):
        raise GuardError(
            explain(
                f"{guard.kind} read at {guard.where} from {', '.join(guard.inputs)}",
                expected=str(guard.value),
                got=str(value),
            )
        )
