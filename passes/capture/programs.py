"""The programs of one model: which one fits a batch, and a new one where none does."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from mllm_compile.compiler.captured import Captured, Prepared
from mllm_compile.compiler.errors import GuardError
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.guards import Number
from mllm_compile.passes.capture.prepare import prepare, run

__all__ = ["Programs", "prepare", "run"]


class Programs:
    """The programs of one model, captured on demand: one per signature and guarded values."""

    def __init__(self, model: nn.Module, **options: Any):
        self.model, self.options = model, options
        self.captured: list[Captured] = []

    def get(self, batch: Mapping[str, Any]) -> Prepared:
        """Prepare a batch with a program that fits, capturing a new one if none does."""
        buffers = dict(self.model.named_buffers())
        for program in self.captured:
            try:
                return prepare(program, batch, buffers)
            except GuardError:
                continue
        program = capture(self.model, batch, **self.options)
        self.captured.append(program)
        return prepare(program, batch, buffers)

    def varying_guards(self) -> list[tuple[str, tuple[Number, ...]]]:
        """Guards at one source line that took several values over the programs captured so far."""
        values: dict[str, dict[Number, None]] = {}
        for program in self.captured:
            for guard in program.guards:
                label = f"{guard.kind} {guard.where} ({', '.join(guard.inputs)})"
                values.setdefault(label, {})[guard.value] = None
        return [(label, tuple(found)) for label, found in values.items() if len(found) > 1]
