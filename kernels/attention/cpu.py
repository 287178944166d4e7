"""Attention on CPU: torch's fused flash kernels, which take float64 and give zeros on empty rows.

They want one head size for q, k and v and an additive mask in q's dtype; both are met by padding
with zeros and by -inf, which change no value. The terms are those of ``reference``.
"""

import torch
from torch import Tensor

from mllm_compile.kernels.attention import reference

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def supports(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether the fused kernels compute this call; the definition does where they do not."""
    nothing_empty = min(q.numel(), k.numel(), v.numel()) > 0
    return q.device.type == "cpu" and not softcap and nothing_empty


def _with_intervals(mask: Tensor | None, intervals: Tensor | None, keys: int) -> Tensor | None:
    if intervals is None:
        return mask
    inside = reference.in_intervals(intervals, 0, keys)
    return inside if mask is None else mask & inside


def _additive(
    mask: Tensor | None, bias: Tensor | None, dtype: torch.dtype, keys: int
) -> Tensor | None:
    """What to add to the scores, [B|1, H|1, Q|1, keys] and dense."""
    added = None if bias is None else bias.to(dtype)
    if mask is not None:
        seen = torch.zeros((), dtype=dtype, device=mask.device) if added is None else added
        added = torch.where(mask, seen, float("-inf"))
    return None if added is None else added.expand(-1, -1, -1, keys).contiguous()


def _pad(x: Tensor, size: int) -> Tensor:
    """``x`` as the kernels read it: ``size`` wide, last dim dense (which they do not check)."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x if x.shape[-1] == size else torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp; see ``reference.attention``. The fused lse of an empty row is 0."""
    size = max(q.shape[-1], v.shape[-1])
    mask = _with_intervals(mask, intervals, k.shape[2])
    added = _additive(mask, bias, q.dtype, k.shape[2])
    out, lse = _forward(
        _pad(q, size), _pad(k, size), _pad(v, size), 0.0, causal, attn_mask=added, scale=scale
    )
    if added is not None:
        lse = lse.masked_fill(_sees_nothing(added, q.shape[2] if causal else 0), float("-inf"))
    return out[..., : v.shape[-1]], lse


def _sees_nothing(added: Tensor, causal_rows: int) -> Tensor:
    closed = added == float("-inf")
    if causal_rows:
        pairs = torch.ones(causal_rows, added.shape[-1], dtype=torch.bool, device=added.device)
        closed = closed | pairs.triu(1)
    return closed.all(-1)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; see ``reference.attention_backward``.

    The fused kernel subtracts rowsum(dO ∘ O) from dO·Vᵀ. One more column, with dlse in dO, -1 in O
    and 0 in V, makes that rowsum(dO ∘ O) - dlse: the gradient of the log-sum-exp comes for free.
    """
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    mask = _with_intervals(mask, intervals, k.shape[2])
    if grad_lse is not None:
        grad_out = torch.cat([grad_out, grad_lse.unsqueeze(-1).to(grad_out.dtype)], -1)
        out = torch.cat([out, out.new_full((*out.shape[:-1], 1), -1.0)], -1)
    size = max(q.shape[-1], out.shape[-1])
    grad_q, grad_k, grad_v = _backward(
        _pad(grad_out, size),
        _pad(q, size),
        _pad(k, size),
        _pad(v, size),
        _pad(out, size),
        lse,
        0.0,
        causal,
        attn_mask=_additive(mask, bias, q.dtype, k.shape[2]),
        scale=scale,
    )
    return grad_q[..., : q.shape[-1]], grad_k[..., : k.shape[-1]], grad_v[..., : v.shape[-1]]
