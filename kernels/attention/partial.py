"""Attention to some of the keys, for results that are joined with those of the rest.

The terms are those of ``reference``, but outputs and gradients are in the accumulation dtype: what
is summed over parts is rounded once, at the end. Triton's kernels store them so from operands in
any dtype; the others are given widened operands. ``kernel`` as in ``mllm::attention``.
"""

from torch import Tensor

from mllm_compile.kernels.attention import op, reference
from mllm_compile.kernels.attention.gpu import entry as gpu
from mllm_compile.kernels.attention.kernel import BACKWARD, FORWARD, TRITON, agreed


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor,
    scale: float,
    softcap: float,
    kernel: str = "",
) -> tuple[Tensor, Tensor]:
    """Out [B, H, Q, E] and log-sum-exp [B, H, Q]."""
    wide = reference.accumulation_dtype(q.dtype)
    run = agreed(kernel, FORWARD, q, k, v, intervals, None, None, scale, softcap)
    terms = (intervals, None, None, False, scale, softcap)
    if run.how == TRITON:
        return gpu.attention(q, k, v, *terms, run.tiles, wide)
    out, lse = op.attention(q.to(wide), k.to(wide), v.to(wide), *terms)
    return out, lse


def attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    intervals: Tensor,
    scale: float,
    softcap: float,
    kernel: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``out`` and ``lse`` are those of all parts together."""
    wide = reference.accumulation_dtype(q.dtype)
    run = agreed(kernel, BACKWARD, q, k, v, intervals, None, None, scale, softcap)
    terms = (intervals, None, None, False, scale, softcap)
    if run.how == TRITON:
        return gpu.attention_backward(
            grad_out, grad_lse, q, k, v, out, lse, *terms, run.tiles, wide
        )
    given = (x.to(wide) for x in (q, k, v, out))
    grads: tuple[Tensor, Tensor, Tensor] = op.attention_backward(
        grad_out.to(wide), grad_lse, *given, lse, *terms
    )
    return grads
