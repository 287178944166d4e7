"""Operators whose output shape depends on values, as operators of one shape and a guard.

Only the count is guarded; positions stay data. ``nonzero(x)`` becomes
``nonzero_static(x, size=n)`` beside the guard ``count_nonzero(x) == n``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.hoisted_calls import Refused, emit, record
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.tracing import outside_modes

if TYPE_CHECKING:
    from mllm_compile.passes.capture.shadow_mode import ShadowMode

aten = torch.ops.aten
Rule = Callable[["ShadowMode", Any, tuple[Any, ...], dict[str, Any]], Any]


def nonzero(mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The positions of the nonzero elements, [count, ndim]."""
    (mask,) = args
    mode.require_known(func, mask)
    with outside_modes():
        count = int(torch.count_nonzero(mode.shadows.real(mask)))
    with mode:
        mode.reads.add("size", aten.count_nonzero.default(mask), count)
        return aten.nonzero_static.default(mask, size=count)


def integer_indices(mode: "ShadowMode", indices: Any) -> list[torch.Tensor | None]:
    """Boolean masks among indices, as the integer indices that they stand for."""
    result: list[torch.Tensor | None] = []
    for index in indices:
        if _is_mask(index):
            positions = nonzero(mode, aten.nonzero.default, (index,), {})
            with mode:
                result.extend(aten.unbind.int(positions, 1))
        else:
            result.append(index)
    return result


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def index(mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``index``, ``index_put`` and their variants: args are (tensor, indices, *rest)."""
    tensor, indices, *rest = args
    masks = [item for item in indices if _is_mask(item)]
    if not masks or (rest and not mode.shadows.known(masks)):
        return NotImplemented  # writing where a computed mask says so has a shape of its own
    indices = integer_indices(mode, indices)
    with mode:
        return func(tensor, indices, *rest, **kwargs)


def masked_select(
    mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The selected elements, [count]."""
    tensor, mask = args
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    with mode:
        tensor, mask = aten.expand.default(tensor, shape), aten.expand.default(mask, shape)
    return index(mode, aten.index.Tensor, (tensor, [mask]), {})


def repeat_interleave(
    mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The index i repeated repeats[i] times, [sum of repeats]."""
    if kwargs.get("output_size") is not None:
        return NotImplemented
    (repeats,) = args
    mode.require_known(func, repeats)
    with outside_modes():
        size = int(mode.shadows.real(repeats).sum())
    with mode:
        mode.reads.add("size", aten.sum.default(repeats), size)
        return aten.repeat_interleave.Tensor(repeats, output_size=size)


def opaque(mode: "ShadowMode", func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any other operator (unique, bincount, …) of known values: one hoisted call."""
    mode.require_known(func, (args, kwargs))
    try:
        return emit(mode, *record(mode, func, str(func), args, kwargs))
    except Refused as reason:
        raise CaptureError(explain(f"{func} at {source_line()}", got=str(reason))) from reason


RULES: dict[Any, Rule] = {
    aten.nonzero.default: nonzero,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index,
    aten.index_put_.default: index,
    aten._index_put_impl_.default: index,
    aten._unsafe_index_put.default: index,
    aten.masked_select.default: masked_select,
    aten.repeat_interleave.Tensor: repeat_interleave,
}
