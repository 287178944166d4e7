"""What a step cost on one rank: messages, bytes, peak of live values, host reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HOST_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass
class Measures:
    """Sent by this rank in one step. Messages are tensors; values without elements send none.

    ``peak_live_bytes`` counts the values of all microbatches alive between two actions, values
    being received included, each storage once. Parameters, buffers, parameter gradients, inputs and
    sent values whose transfer is under way are not in it.
    It and ``host_reads`` are None unless the step was asked to measure. Host reads are those of the
    segments' operators; a compiled segment hides its own.
    """

    messages_forward: int = 0
    messages_backward: int = 0
    bytes_forward: int = 0
    bytes_backward: int = 0
    peak_live_bytes: int | None = None
    host_reads: int | None = None

    def count_send(self, tensor: torch.Tensor, *, forward: bool) -> None:
        """One tensor has been handed to the transport."""
        messages = 1 if tensor.numel() else 0
        if forward:
            self.messages_forward += messages
            self.bytes_forward += tensor.nbytes
        else:
            self.messages_backward += messages
            self.bytes_backward += tensor.nbytes


def live_bytes(tensors: Iterable[torch.Tensor], excluded: frozenset[int]) -> int:
    """Bytes of the distinct storages behind ``tensors``; ``excluded`` holds their addresses."""
    sizes = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def storages(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Addresses of the storages behind ``tensors``."""
    return frozenset(tensor.untyped_storage().data_ptr() for tensor in tensors)


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators whose result the host must know, such as ``item`` and ``nonzero``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count and run."""
        self.count += _reads(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _reads(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """By the operator's tags; indexing reads only masks, repeating only an unknown total."""
    if func is torch.ops.aten.index.Tensor:
        masks = (torch.bool, torch.uint8)
        return any(index is not None and index.dtype in masks for index in args[1])
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return any(tag in func.tags for tag in _HOST_TAGS)
