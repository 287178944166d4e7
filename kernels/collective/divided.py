"""Operators that a rank runs on its part of a dim over which the plain operator cannot be divided.

The rank at place r of ``axis`` holds the r-th of equal consecutive blocks of the vocabulary, the
classes or the experts. Each takes the plain operator's arguments, then the axis.

==================  ================================================  =========================
operator            divided arguments                                 result
==================  ================================================  =========================
divided_embedding   weight by rows                                    P
divided_softmax,    input along ``dim``                               S, as the input
…_log_softmax
divided_nll_loss    input along classes                               P, and so the total weight
divided_grouped_mm  weights by experts (x varies: V)                  P
==================  ================================================  =========================

Those without a registered backward are made of plain operators, and differentiated as these.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from mllm_compile.kernels.collective.convert import convert
from mllm_compile.kernels.collective.members import member
from mllm_compile.kernels.grouped_mm import grouped_mm

F = TypeVar("F", bound=Callable[..., Any])


def _composite(schema: str) -> Callable[[F], F]:
    """Register a function as an operator that dissolves into those it calls."""
    name = f"mllm::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])

    def register(function: F) -> F:
        torch.library.impl(name, "CompositeImplicitAutograd", function)
        return function

    return register


def _own(indices: Tensor, length: int, axis: str) -> tuple[Tensor, Tensor]:
    """Which indices fall into this rank's block of ``length``, and where (0 for the others)."""
    first = member(axis).place * length
    own = (indices >= first) & (indices < first + length)
    return own, torch.where(own, indices - first, 0)


@_composite(
    "divided_embedding(Tensor weight, Tensor indices, SymInt padding_idx, "
    "bool scale_grad_by_freq, bool sparse, str axis) -> Tensor"
)
def divided_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int,
    scale_grad_by_freq: bool,
    sparse: bool,
    axis: str,
) -> Tensor:
    """``aten.embedding`` of the rows [V / n, H] at hand: zeros for the others."""
    if scale_grad_by_freq or sparse:
        raise ValueError("embedding over a divided vocabulary: no sparse or scaled gradients")
    rows = weight.shape[0]
    own, local = _own(indices, rows, axis)
    padding = padding_idx - member(axis).place * rows
    found: Tensor = torch.ops.aten.embedding(weight, local, padding if 0 <= padding < rows else -1)
    return found.masked_fill(~own.unsqueeze(-1), 0)


@_composite(
    "divided_nll_loss(Tensor input, Tensor target, Tensor? weight, int reduction, "
    "SymInt ignore_index, str axis) -> (Tensor, Tensor)"
)
def divided_nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    axis: str,
) -> tuple[Tensor, Tensor]:
    """``aten.nll_loss_forward`` of log-probabilities [N, C / n] (or [C / n]) and whole targets."""
    if weight is not None:
        raise ValueError("nll_loss over divided classes: no class weights")
    own, local = _own(target, input.shape[-1], axis)
    valid = target != ignore_index
    picked = input.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    losses = -picked.masked_fill(~(own & valid), 0)
    if reduction == 0:
        return losses, input.new_zeros(())
    total = losses.sum()
    if reduction == 1:
        total = total / valid.sum()
    return total, (own & valid).sum().to(input.dtype)


@_composite("divided_grouped_mm(Tensor x, Tensor weights, Tensor offsets, str axis) -> Tensor")
def divided_grouped_mm(x: Tensor, weights: Tensor, offsets: Tensor, axis: str) -> Tensor:
    """``mllm::grouped_mm`` of all rows with the matrices [E / n, I, O] at hand; offsets [E]."""
    count = weights.shape[0]
    first = member(axis).place * count
    bounds = torch.cat([offsets.new_zeros(1), offsets])[first : first + count + 1]
    own: Tensor = grouped_mm(x, weights, bounds[1:], bounds[:1])
    return own


def _normalized(x: Tensor, dim: int, axis: str) -> tuple[Tensor, Tensor]:
    """Less its maximum over the whole dim, and the sum of its exponentials; at least float32."""
    group = member(axis).communicator
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    shifted = wide - group.all_reduce(wide.amax(dim, keepdim=True).contiguous(), "max")
    return shifted, group.all_reduce(shifted.exp().sum(dim, keepdim=True).contiguous())


def _result_dtype(x: Tensor, half_to_float: bool) -> torch.dtype:
    return torch.float32 if half_to_float else x.dtype


@torch.library.custom_op("mllm::divided_softmax", mutates_args=())
def divided_softmax(x: Tensor, dim: int, half_to_float: bool, axis: str) -> Tensor:
    """``aten._softmax`` over a divided dim."""
    shifted, total = _normalized(x, dim, axis)
    return (shifted.exp() / total).to(_result_dtype(x, half_to_float)).contiguous()


@torch.library.custom_op("mllm::divided_log_softmax", mutates_args=())
def divided_log_softmax(x: Tensor, dim: int, half_to_float: bool, axis: str) -> Tensor:
    """``aten._log_softmax`` over a divided dim."""
    shifted, total = _normalized(x, dim, axis)
    return (shifted - total.log()).to(_result_dtype(x, half_to_float)).contiguous()


@divided_softmax.register_fake
@divided_log_softmax.register_fake
def _(x: Tensor, dim: int, half_to_float: bool, axis: str) -> Tensor:
    return x.new_empty(x.shape, dtype=_result_dtype(x, half_to_float))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.dim, _, ctx.axis = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(output)


def _whole_sum(x: Tensor, dim: int, axis: str) -> Tensor:
    """The sum over the whole of a divided dim, on every rank."""
    summed: Tensor = convert(x.sum(dim, keepdim=True), "P", "R", axis)
    return summed


def _wide(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    (output,) = ctx.saved_tensors
    dtype = torch.promote_types(output.dtype, torch.float32)
    return output.to(dtype), grad.to(dtype)


def _softmax_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """For the probabilities P: P ∘ (g - Σ g ∘ P)."""
    output, grad = _wide(ctx, grad)
    product = grad * output
    result = product - output * _whole_sum(product, ctx.dim, ctx.axis)
    return result.to(ctx.dtype), None, None, None


def _log_softmax_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """For the log-probabilities L: g - exp(L) Σ g."""
    output, grad = _wide(ctx, grad)
    result = grad - output.exp() * _whole_sum(grad, ctx.dim, ctx.axis)
    return result.to(ctx.dtype), None, None, None


divided_softmax.register_autograd(_softmax_gradient, setup_context=_setup_context)
divided_log_softmax.register_autograd(_log_softmax_gradient, setup_context=_setup_context)
