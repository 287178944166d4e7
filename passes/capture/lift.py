"""float32 raised to another dtype, so that a float64 run is float64 in every step.

Models cast to float32 in norms, rotary tables and losses whatever their own dtype is. While
``lifted(torch.float64)`` is open these casts, and tensors created with float32, are float64: in a
capture and in the plain model alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Lift(TorchFunctionMode):
    """Replaces the dtype argument of every torch function."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].to(self.dtype, **(kwargs or {}))
        if func in (torch.Tensor.type, torch.finfo) and torch.float32 not in args:
            return func(*args, **(kwargs or {}))
        return func(
            *(self._lift(value) for value in args),
            **{name: self._lift(value) for name, value in (kwargs or {}).items()},
        )

    def _lift(self, value: Any) -> Any:
        return self.dtype if value is torch.float32 else value


@contextmanager
def lifted(dtype: torch.dtype | None) -> Iterator[None]:
    """Let float32 mean ``dtype``, as an argument and as the default dtype; None changes nothing."""
    if dtype is None:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if before is torch.float32 else before)
    try:
        with _Lift(dtype):
            yield
    finally:
        torch.set_default_dtype(before)
