"""Shadows: the real values that travel beside fake tensors.

Batch entries, buffers and constants have a shadow, parameters have none; a result has one if every
tensor it was computed from has. So "has a shadow" means "depends on inputs alone", and the shadow
is what the host would have read.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from mllm_compile.passes.capture.tracing import (
    FakeTensor,
    WeakIdKeyDictionary,
    outside_modes,
    storage_key,
)


class Shadows:
    """The shadow of every tensor of one trace that has one."""

    def __init__(self) -> None:
        self._values: Any = WeakIdKeyDictionary()
        self._stale: dict[int, torch.Tensor] = {}  # kept alive, so that keys stay unique

    def put(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Let ``real`` be the shadow of ``fake``; it may be written to from now on."""
        self._values[fake] = real

    def put_copy(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Let a copy of ``real`` be the shadow of ``fake``."""
        with outside_modes():
            self._values[fake] = real.detach().clone()

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The shadow of a tensor; a real tensor of the model's own is a constant and has one."""
        shadow: torch.Tensor | None = self._values.get(tensor)
        if shadow is None:
            if not _is_constant(tensor):
                return None
            self.put_copy(tensor, tensor)
            shadow = self._values[tensor]
        return None if storage_key(shadow) in self._stale else shadow

    def known(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether all of them have a shadow."""
        return all(self.of(tensor) is not None for tensor in tensors)

    def real(self, tensor: torch.Tensor) -> torch.Tensor:
        """The shadow of a tensor that must have one."""
        shadow = self.of(tensor)
        assert shadow is not None
        return shadow

    def forget(self, tensor: torch.Tensor) -> None:
        """Something unknown was written into this memory: none of its views is known any more."""
        shadow = self.of(tensor)
        if shadow is not None:
            self._stale[storage_key(shadow)] = shadow

    def compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """``func`` on the shadows of its arguments (in-place operators write to shadows)."""
        args, kwargs = _map_tensors(args, self.real), _map_tensors(kwargs, self.real)
        with outside_modes(), torch.no_grad():
            return func(*args, **kwargs)


def _is_constant(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not isinstance(tensor, FakeTensor)
    return plain and not tensor.requires_grad and tensor.device.type != "meta"


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {name: _map_tensors(item, function) for name, item in value.items()}
    return value
