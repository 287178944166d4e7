"""Grouped matrix products: each run of rows with its own matrix, as experts of a mixture need.

``offsets`` [E] holds where each run ends and ``start`` [1] where the first begins (0 unless given);
rows outside all runs give zeros. Torch's own operator has a fake kernel for bfloat16 alone and no
float64; these have both, and a backward.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import register_flop_formula


def _bounds(offsets: Tensor, start: Tensor | None) -> Tensor:
    """[E + 1]: where each run begins, then where the last ends."""
    return torch.cat([offsets.new_zeros(1) if start is None else start, offsets])


def _runs(offsets: Tensor, start: Tensor | None) -> list[slice]:
    """Row slices of the runs. Reads the offsets: for host tensors only."""
    bounds = _bounds(offsets, start).tolist()
    return [slice(first, end) for first, end in pairwise(bounds)]


def _members(offsets: Tensor, start: Tensor | None, rows: int) -> Iterator[Tensor]:
    """For each run, boolean [rows, 1]: which rows are its own. Nothing is read by the host."""
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    found = torch.searchsorted(_bounds(offsets, start), positions, right=True)
    run = found.unsqueeze(1) - 1
    for index in range(offsets.shape[0]):
        yield run == index


def multiply_masked(
    x: Tensor, weights: Tensor, offsets: Tensor, start: Tensor | None = None
) -> Tensor:
    """``grouped_mm`` for devices: every matrix meets every row, and the run's own row is kept."""
    out = x.new_zeros(x.shape[0], weights.shape[2])
    for own, weight in zip(_members(offsets, start, x.shape[0]), weights, strict=True):
        out = torch.where(own, x @ weight, out)
    return out


def outer_masked(x: Tensor, y: Tensor, offsets: Tensor, start: Tensor | None = None) -> Tensor:
    """``grouped_outer`` for devices: rows of other runs are zeroed."""
    zero = x.new_zeros(())
    runs = [torch.where(own, x, zero).T @ y for own in _members(offsets, start, x.shape[0])]
    return torch.stack(runs)


@torch.library.custom_op("mllm::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor, start: Tensor | None = None) -> Tensor:
    """[T, I] rows times [E, I, O] matrices -> [T, O]; offsets [E] integers, ascending."""
    if x.device.type != "cpu":
        return multiply_masked(x, weights, offsets, start)
    out = x.new_zeros(x.shape[0], weights.shape[2])
    for run, weight in zip(_runs(offsets, start), weights, strict=True):
        out[run] = x[run] @ weight
    return out


@grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, offsets: Tensor, start: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("mllm::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor, start: Tensor | None = None) -> Tensor:
    """[T, I] and [T, O] rows -> [E, I, O]: xᵀ·y of each run; a run without rows gives zeros."""
    if x.device.type != "cpu":
        return outer_masked(x, y, offsets, start)
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    for index, run in enumerate(_runs(offsets, start)):
        out[index] = x[run].T @ y[run]
    return out


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor, start: Tensor | None = None) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weights, *runs = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad, weights.transpose(1, 2), *runs)
    if ctx.needs_input_grad[1]:
        grad_weights = grouped_outer(x, grad, *runs)
    return grad_x, grad_weights, None, None


grouped_mm.register_autograd(_gradient, setup_context=_setup_context)


def from_aten(
    x: Tensor,
    y: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten._grouped_mm`` on these operators: rows in runs, products of runs, or a plain batch.

    ValueError for the forms that mixtures of experts do not use.
    """
    if bias is not None or out_dtype not in (None, x.dtype):
        raise ValueError("grouped_mm: bias and another output dtype are not supported")
    if offsets is None and x.dim() == y.dim() == 3:
        return torch.bmm(x, y)
    if offsets is not None and x.dim() == y.dim() == 2:
        outer: Tensor = grouped_outer(x.transpose(0, 1), y, offsets)
        return outer
    if offsets is not None and x.dim() == 2 and y.dim() == 3:
        rows: Tensor = grouped_mm(x, y, offsets)
        return rows
    raise ValueError(
        "grouped_mm: expected [T, I] and [E, I, O] or [I, T] and [T, O] with offsets, or two "
        f"batches without; got {tuple(x.shape)} and {tuple(y.shape)}"
    )


class GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, torch's grouped product takes every dtype, in forward and backward.

    For runs of a plain model: torch's CPU kernel has no float64.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            return from_aten(*args, **{_ATEN_NAMES.get(key, key): kwargs[key] for key in kwargs})
        return func(*args, **kwargs)


_ATEN_NAMES = {"self": "x", "mat2": "y", "offs": "offsets"}


@register_flop_formula(torch.ops.mllm.grouped_mm)
def _flops(x: Any, weights: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Every row meets one matrix: 2·T·I·O."""
    return int(2 * x[0] * x[1] * weights[2])


@register_flop_formula(torch.ops.mllm.grouped_outer)
def _outer_flops(x: Any, y: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * y[1])
