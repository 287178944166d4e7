"""Grouped matrix products: each run of rows with its own matrix, as experts of a mixture need.

``offsets`` [E] holds where each run ends; rows behind the last run give zeros. Torch's own operator
has a fake kernel for bfloat16 alone and no float64; these have both, and a backward.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def _groups(offsets: Tensor, rows: int) -> Tensor:
    """[rows] number of the run each row belongs to; E for rows behind the last."""
    positions = torch.arange(rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets.contiguous(), positions, right=True)


def _runs(offsets: Tensor) -> list[slice]:
    """Row slices of the runs. Reads the offsets: for host tensors only."""
    ends = offsets.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@torch.library.custom_op("mllm::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """[T, I] rows times [E, I, O] matrices -> [T, O]; offsets [E] int32, ascending."""
    out = x.new_zeros(x.shape[0], weights.shape[2])
    if x.device.type == "cpu":
        for run, weight in zip(_runs(offsets), weights, strict=True):
            out[run] = x[run] @ weight
        return out
    groups = _groups(offsets, x.shape[0]).unsqueeze(1)
    for index, weight in enumerate(weights):
        out = torch.where(groups == index, x @ weight, out)
    return out


@grouped_mm.register_fake
def _(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("mllm::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """[T, I] and [T, O] rows -> [E, I, O]: xᵀ·y of each run; a run without rows gives zeros."""
    out = x.new_zeros(offsets.shape[0], x.shape[1], y.shape[1])
    if x.device.type == "cpu":
        for index, run in enumerate(_runs(offsets)):
            out[index] = x[run].T @ y[run]
        return out
    groups = _groups(offsets, x.shape[0]).unsqueeze(1)
    for index in range(offsets.shape[0]):
        out[index] = torch.where(groups == index, x, torch.zeros_like(x)).T @ y
    return out


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], y.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weights, offsets = ctx.saved_tensors
    grad_x = grad_weights = None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_mm(grad, weights.transpose(1, 2), offsets)
    if ctx.needs_input_grad[1]:
        grad_weights = grouped_outer(x, grad, offsets)
    return grad_x, grad_weights, None


grouped_mm.register_autograd(_gradient, setup_context=_setup_context)


def from_aten(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What ``aten._grouped_mm`` computes for rows in runs, on these operators; else ValueError."""
    if bias is not None or out_dtype not in (None, x.dtype):
        raise ValueError("grouped_mm: bias and another output dtype are not supported")
    if offsets is not None and x.dim() == 2 and weights.dim() == 3:
        return grouped_mm(x, weights, offsets)  # type: ignore[no-any-return]
    if offsets is not None and x.dim() == weights.dim() == 2:
        return grouped_outer(x.transpose(0, 1), weights, offsets)  # type: ignore[no-any-return]
    if offsets is None and x.dim() == 3 and weights.dim() == 3:
        return torch.ops.aten.bmm.default(x, weights)  # type: ignore[no-any-return]
    raise ValueError(
        f"grouped_mm: expected rows [T, I] with matrices [E, I, O] and offsets, got "
        f"{tuple(x.shape)} and {tuple(weights.shape)}"
    )


@register_flop_formula(torch.ops.mllm.grouped_mm)
def _flops(x: Any, weights: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Every row meets one matrix: 2·T·I·O."""
    return int(2 * x[0] * x[1] * weights[2])


@register_flop_formula(torch.ops.mllm.grouped_outer)
def _outer_flops(x: Any, y: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * y[1])
