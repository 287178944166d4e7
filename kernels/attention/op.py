"""``mllm::attention``: every attention of a captured graph is this one operator.

It returns the output and the log-sum-exp that its backward needs, because forward and backward are
lowered into different graphs. Both run the kernel that their node names, and never read values to
choose one: fused on a CPU, Triton's on a GPU but for float64, the definition for what neither
computes.
Layouts are fixed, so that fake and real agree: out and the gradients are [B, S, H, D] in memory
(seen as [B, H, S, D]), lse is contiguous. Terms and shapes: ``reference``.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from mllm_compile.kernels.attention import cpu, reference
from mllm_compile.kernels.attention.by_token import by_token, empty_by_token
from mllm_compile.kernels.attention.gpu import entry as gpu
from mllm_compile.kernels.attention.kernel import (
    BACKWARD,
    FORWARD,
    FUSED,
    TRITON,
    agreed,
    backward_of,
)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
) -> None:
    """Refuse shapes and dtypes outside the terms; ValueError says which."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"attention: expected [batch, heads, length, size], got {shapes}")
    if not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"attention: batch, key heads and key length must agree, got {shapes}")
    if q.shape[1] % max(k.shape[1], 1) or q.shape[3] != k.shape[3]:
        raise ValueError(f"attention: key heads must divide query heads, got {shapes}")
    if intervals is not None:
        _check_intervals(q, intervals)
    if mask is not None and mask.dtype is not torch.bool:
        raise ValueError(f"attention: mask must be boolean, got {mask.dtype}; pass it as bias")
    if bias is not None and not bias.is_floating_point():
        raise ValueError(f"attention: bias must be floating point, got {bias.dtype}")
    target = (*q.shape[:3], k.shape[2])
    for name, extra in (("mask", mask), ("bias", bias)):
        if extra is None:
            continue
        fits = extra.dim() == 4 and all(
            have in (1, want) for have, want in zip(extra.shape, target, strict=True)
        )
        if not fits:
            raise ValueError(f"attention: {name} {tuple(extra.shape)} is no broadcast of {target}")


def _check_intervals(q: Tensor, intervals: Tensor) -> None:
    expected = f"int32 [1 or {q.shape[0]}, {q.shape[2]}, 1 or 2, 2]"
    fits = intervals.dim() == 4 and intervals.dtype is torch.int32
    if not fits or (
        intervals.shape[0] not in (1, q.shape[0])
        or intervals.shape[1] != q.shape[2]
        or intervals.shape[2] not in (1, 2)
        or intervals.shape[3] != 2
    ):
        got = f"{intervals.dtype} {tuple(intervals.shape)}"
        raise ValueError(f"attention: intervals must be {expected}, got {got}")


@torch.library.custom_op("mllm::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    kernel: str = "",
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention; terms in ``reference``.

    Args:
        q: queries [B, H, Q, D].
        k: keys [B, G, K, D].
        v: values [B, G, K, E].
        intervals: int32 [B|1, Q, 1 or 2, 2], the keys that a query may see; None means all.
        mask: boolean, broadcasts to [B, H, Q, K].
        bias: floating point, broadcasts to [B, H, Q, K].
        causal: whether query i sees no key behind i.
        scale: of the scores.
        softcap: of the scores; 0 means none.
        kernel: the ``kernel.Kernel`` to run, as text; "" means the one that the call is due.

    Returns:
        out [B, H, Q, E] and lse [B, H, Q].

    Raises:
        ValueError: shapes, dtypes or the kernel do not fit.

    """
    check(q, k, v, intervals, mask, bias)
    run = agreed(kernel, FORWARD, q, k, v, intervals, mask, bias, scale, softcap)
    masks = intervals, mask, bias
    if run.how == FUSED:
        out, lse = cpu.attention(q, k, v, *masks, causal, scale)
    elif run.how == TRITON:
        out, lse = gpu.attention(q, k, v, *masks, causal, scale, softcap, run.tiles)
    else:
        out, lse = reference.attention(q, k, v, *masks, causal, scale, softcap)
    return by_token(out), lse.contiguous()


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    kernel: str = "",
) -> tuple[Tensor, Tensor]:
    check(q, k, v, intervals, mask, bias)
    lse = q.new_empty(q.shape[:3], dtype=reference.accumulation_dtype(q.dtype))
    return empty_by_token(q, v.shape[3]), lse


@torch.library.custom_op("mllm::attention_backward", mutates_args=())
def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    kernel: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in the shape of its input; ``kernel`` as in the forward."""
    run = agreed(kernel, BACKWARD, q, k, v, intervals, mask, bias, scale, softcap)
    call = grad_out, grad_lse, q, k, v, out, lse, intervals, mask, bias, causal, scale
    if run.how == FUSED:
        grads = cpu.attention_backward(*call)
    elif run.how == TRITON:
        grads = gpu.attention_backward(*call, softcap, run.tiles)
    else:
        grads = reference.attention_backward(*call, softcap)
    return by_token(grads[0]), by_token(grads[1]), by_token(grads[2])


@attention_backward.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    def like(x: Tensor) -> Tensor:
        return empty_by_token(x, x.shape[3])

    return like(q), like(k), like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, intervals, mask, bias, *ctx.terms, ctx.kernel = inputs
    if bias is not None and bias.requires_grad:
        raise ValueError(
            "attention: the operator has no gradient for bias; use plain operators "
            "(reference.attention) for a learned bias"
        )
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, intervals, mask, bias)


def _gradient(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, *masks = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    kernel = backward_of(ctx.kernel, q, k, v, *masks, *ctx.terms[1:])
    grads = attention_backward(grad_out, grad_lse, q, k, v, out, lse, *masks, *ctx.terms, kernel)
    return (*grads, *[None] * 7)


attention.register_autograd(_gradient, setup_context=_setup_context)


@register_flop_formula(torch.ops.mllm.attention)
def _flops(q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Scores and output, every pair counted, as torch counts its own attention."""
    return _pair_flops(q, k) * int(q[3] + v[3])


@register_flop_formula(torch.ops.mllm.attention_backward)
def _backward_flops(
    grad_out: Any,
    grad_lse: Any,
    q: Any,
    k: Any,
    v: Any,
    *rest: Any,
    out_shape: Any = None,
    **kwargs: Any,
) -> int:
    """Scores again, dP and dV over v's size, dQ and dK over q's: five products."""
    return _pair_flops(q, k) * int(3 * q[3] + 2 * v[3])


def _pair_flops(q: Any, k: Any) -> int:
    """A multiplication and an addition for every query, key, head and sample."""
    return 2 * int(q[0]) * int(q[1]) * int(q[2]) * int(k[2])
