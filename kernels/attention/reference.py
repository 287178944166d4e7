"""Attention by its definition and its gradient by the chain rule: what kernels are held to.

Terms: q [B, H, Q, D], k [B, G, K, D], v [B, G, K, E] with G dividing H (head h reads key head
h // (H/G)). ``intervals``, int32 [B|1, Q, n, 2] with n 1 or 2: query i may see the keys from start
up to, not including, end of its n intervals; they are ascending, disjoint and inside [0, K], an
empty one has start = end. ``mask`` is boolean, True where a query may see a key; ``bias`` is added
to the scores; both broadcast to [B, H, Q, K]. With ``causal`` query i sees keys 0…i. All of them
hold together. A query that sees nothing gives zeros, a log-sum-exp of -inf and no gradient.

Everything is plain operators, in float64 for float64 inputs and in float32 for all others; the
forward is differentiable by autograd in every floating input.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores, sums and the log-sum-exp are kept."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[B, G, S, D] -> [B, heads, S, D]: every key head once per query head that reads it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def in_intervals(intervals: Tensor, first: int, end: int) -> Tensor:
    """Boolean [B|1, 1, Q, end - first]: which of the keys first…end-1 lie in the intervals."""
    places = torch.arange(first, end, dtype=intervals.dtype, device=intervals.device)
    inside = (intervals[..., :1] <= places) & (places < intervals[..., 1:])
    return (inside if inside.shape[2] == 1 else inside.any(2, keepdim=True)).transpose(1, 2)


def allowed_pairs(
    q: Tensor, k: Tensor, intervals: Tensor | None, mask: Tensor | None, causal: bool
) -> Tensor | None:
    """Boolean, broadcastable to [B, H, Q, K]; None where every query sees every key."""
    parts = [] if mask is None else [mask]
    if intervals is not None:
        parts.append(in_intervals(intervals, 0, k.shape[2]))
    if causal:
        below = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        parts.append(below[None, None])
    return functools.reduce(torch.logical_and, parts) if parts else None


def _raw_scores(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _masked(raw: Tensor, bias: Tensor | None, allowed: Tensor | None) -> Tensor:
    scores = raw if bias is None else raw + bias
    return scores if allowed is None else scores.masked_fill(~allowed, float("-inf"))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    intervals: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(softcap·tanh(q·kᵀ·scale / softcap) + bias) · v, and the row's log-sum-exp.

    Returns out [B, H, Q, E] in q's dtype and lse [B, H, Q] in the accumulation dtype. ``softcap`` 0
    means none; ``dropout`` drops weights after the softmax.
    """
    wide = accumulation_dtype(q.dtype)
    keys, values = repeat_heads(k, q.shape[1]).to(wide), repeat_heads(v, q.shape[1]).to(wide)
    allowed = allowed_pairs(q, k, intervals, mask, causal)
    scores = _masked(_raw_scores(q.to(wide), keys, scale, softcap), bias, allowed)
    if not k.shape[2]:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), scores.new_full(q.shape[:3], float("-inf"))
    highest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - highest.masked_fill(highest == float("-inf"), 0.0))
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (highest + torch.log(total)).squeeze(-1)
    probabilities = weights / total
    if dropout:
        probabilities = torch.nn.functional.dropout(probabilities, dropout)
    return (probabilities @ values).to(q.dtype), lse


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all parts, from (out, lse) of each: weighed by exp(lse).

    The output is in the accumulation dtype. Source: FlashAttention (arXiv 2205.14135), section 3.
    """
    lses = torch.stack([lse for _, lse in parts])
    lse = lses.logsumexp(0)
    weights = torch.exp(lses - lse.masked_fill(lse == float("-inf"), 0.0)).unsqueeze(-1)
    out = parts[0][0] * weights[0]
    for (other, _), weight in zip(parts[1:], weights[1:], strict=True):
        out = out.addcmul_(other, weight) if other.dtype == out.dtype else out + other * weight
    return out, lse


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from the forward's out and lse.

    With P the weights: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - rowsum(dO ∘ O) + dlse), then through the cap.
    """
    wide = accumulation_dtype(q.dtype)
    queries, keys = q.to(wide), repeat_heads(k, q.shape[1]).to(wide)
    values, grad = repeat_heads(v, q.shape[1]).to(wide), grad_out.to(wide)
    raw = _raw_scores(queries, keys, scale, softcap)
    scores = _masked(raw, bias, allowed_pairs(q, k, intervals, mask, causal))
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    offset = (grad * out.to(wide)).sum(-1)
    if grad_lse is not None:
        offset = offset - grad_lse.to(wide)
    grad_scores = weights * (grad @ values.transpose(-1, -2) - offset.unsqueeze(-1))
    if softcap:
        grad_scores = grad_scores * (1.0 - (raw / softcap) ** 2)
    grad_scores = grad_scores * scale
    grad_q = grad_scores @ keys
    grad_k = _sum_over_group(grad_scores.transpose(-1, -2) @ queries, k.shape[1])
    grad_v = _sum_over_group(weights.transpose(-1, -2) @ grad, k.shape[1])
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _sum_over_group(x: Tensor, key_heads: int) -> Tensor:
    batch, heads, *rest = x.shape
    return x if heads == key_heads else x.view(batch, key_heads, heads // key_heads, *rest).sum(2)
