"""In-place writes that no functional graph can express with the right gradient are refused.

A write under ``no_grad``, or through a detached alias, changes the value of a tensor without its
gradient history noticing; a functional graph would cut that history.
"""

from collections.abc import Iterable
from typing import Any

import torch

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.shadows import tensors_in
from mllm_compile.passes.capture.tracing import storage_key


class MemoryWrites:
    """Remembers which memory belongs to values with a gradient."""

    def __init__(self) -> None:
        self._with_gradient: dict[int, torch.Tensor] = {}  # kept alive, so that keys stay unique

    def check(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors that ``func`` is about to write to; refuse the wrong ones."""
        for tensor in inputs:
            if tensor.requires_grad:
                self._with_gradient.setdefault(storage_key(tensor), tensor)
        written = list(written_arguments(func, args, kwargs))
        for tensor in written:
            hidden = not tensor.requires_grad and storage_key(tensor) in self._with_gradient
            if hidden or (tensor.requires_grad and not torch.is_grad_enabled()):
                raise CaptureError(
                    explain(
                        f"{func} at {source_line()}",
                        expected="in-place writes that autograd sees",
                        got="a write under no_grad, or through .data or detach(), into a tensor "
                        "that requires grad",
                        remedy="compute a new tensor, or update parameters outside forward",
                    )
                )
        return written


def written_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterable[torch.Tensor]:
    """The tensor arguments that the operator's schema declares as written."""
    if not func._schema.is_mutable:
        return
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from tensors_in(value)
