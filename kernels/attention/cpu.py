"""Attention on CPU: torch's fused flash kernels, which take float64 and give zeros on empty rows.

They want one head size for q, k and v and an additive mask in q's dtype; both are met by padding
with zeros and by -inf, which change no value. Intervals are computed by ``rectangles``: pairs that
lie in none cost nothing. The terms are those of ``reference``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mllm_compile.kernels.attention import reference
from mllm_compile.kernels.attention.rectangles import row_blocks
from mllm_compile.kernels.attention.runs import visible

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FEW_PAIRS = 1 << 16
"""Queries times keys up to which one masked call is cheaper than looking at the intervals."""


def computes(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> bool:
    """Whether the fused kernels compute this call; the definition does where they do not."""
    return not softcap and min(q.numel(), k.numel(), v.numel()) > 0


@dataclass(frozen=True, slots=True)
class _Masks:
    """What queries see, beside ``intervals`` of the whole."""

    intervals: Tensor | None
    mask: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        intervals: Tensor | None,
        mask: Tensor | None,
        bias: Tensor | None,
        causal: bool,
    ) -> tuple["_Masks", bool]:
        """The masks of a call, and whether it is causal besides: intervals have that in them."""
        if intervals is None:
            return _Masks(None, mask, bias), causal
        seen = visible(intervals, q.shape[2], k.shape[2], causal, q.device)
        return _Masks(seen, mask, bias), False

    def part(self, samples: slice, rows: slice, keys: slice) -> "_Masks":
        """The same for some samples, queries and keys; intervals still count from key 0."""
        intervals = self.intervals
        if intervals is not None:
            intervals = _cut(intervals, 0, samples)[:, rows]
        mask, bias = (_part(x, samples, rows, keys) for x in (self.mask, self.bias))
        return _Masks(intervals, mask, bias)

    def additive(self, dtype: torch.dtype, first: int, keys: int) -> Tensor | None:
        """What to add to the scores of ``keys`` keys from ``first`` on, dense in the last two."""
        added = None if self.bias is None else self.bias.to(dtype)
        mask = self.mask
        if self.intervals is not None:
            inside = reference.in_intervals(self.intervals, first, first + keys)
            mask = inside if mask is None else mask & inside
        if mask is not None:
            seen = torch.zeros((), dtype=dtype, device=mask.device) if added is None else added
            added = torch.where(mask, seen, float("-inf"))
        return None if added is None else added.expand(-1, -1, -1, keys).contiguous()

    def blind(self, added: Tensor, first: int, causal_rows: int) -> Tensor:
        """[B|1, H|1, Q|1]: the rows in which ``added`` leaves no key of those from ``first`` on."""
        keys = added.shape[-1]
        if self.intervals is not None and self.mask is None and self.bias is None:
            seen = self.intervals.clamp(first, first + keys)
            return (seen[..., 0] >= seen[..., 1]).all(-1).unsqueeze(1)
        closed = added == float("-inf")
        if causal_rows:
            pairs = torch.ones(causal_rows, keys, dtype=torch.bool, device=added.device)
            closed = closed | pairs.triu(1)
        return closed.all(-1)


def _cut(x: Tensor, dim: int, part: slice) -> Tensor:
    """A part of a dim that may have been broadcast."""
    return x if x.shape[dim] == 1 else x.narrow(dim, part.start, part.stop - part.start)


def _part(x: Tensor | None, samples: slice, rows: slice, keys: slice) -> Tensor | None:
    return None if x is None else _cut(_cut(_cut(x, 0, samples), 2, rows), 3, keys)


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
    """Output and log-sum-exp; see ``reference.attention``."""
    size, width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = _pad(q, size), _pad(k, size), _pad(v, size)
    masks, causal = _Masks.of(q, k, intervals, mask, bias, causal)
    if not _in_blocks(q, k, intervals):
        out, lse = _call(q, k, v, masks, 0, causal, scale)
        return out[..., :width], lse
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], float("-inf"), dtype=reference.accumulation_dtype(q.dtype))
    for samples, rows, parts in _blocks(masks, len(q), k.shape[2]):
        made = [
            _call(q[samples, :, rows], *_keys(k, v, samples, keys), own, keys.start, False, scale)
            for keys, own in parts
        ]
        out[samples, :, rows], lse[samples, :, rows] = (
            made[0] if len(made) == 1 else reference.merged(made)
        )
    return out[..., :width], lse


def _in_blocks(q: Tensor, k: Tensor, intervals: Tensor | None) -> bool:
    return intervals is not None and q.shape[2] * k.shape[2] > FEW_PAIRS


Part = tuple[slice, _Masks]


def _blocks(masks: _Masks, batch: int, length: int) -> Iterator[tuple[slice, slice, list[Part]]]:
    """(samples, queries, [(keys, what masks them)]) of the blocks that see anything."""
    assert masks.intervals is not None
    for sample, intervals in enumerate(masks.intervals):
        samples = slice(0, batch) if len(masks.intervals) == 1 else slice(sample, sample + 1)
        for block in row_blocks(intervals):
            rows, parts = slice(block.first, block.end), []
            for part in block.rectangles:
                keys = slice(part.first, part.end)
                own = masks.part(samples, rows, keys)
                parts.append((keys, replace(own, intervals=None) if part.full else own))
            if parts:
                yield samples, rows, parts


def _keys(k: Tensor, v: Tensor, samples: slice, keys: slice) -> tuple[Tensor, Tensor]:
    return k[samples, :, keys], v[samples, :, keys]


def _call(
    q: Tensor, k: Tensor, v: Tensor, masks: _Masks, first: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """One call of the fused kernel, on keys from ``first`` on. Its lse of an empty row is 0."""
    added = masks.additive(q.dtype, first, k.shape[2])
    out, lse = _forward(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    if added is not None:
        blind = masks.blind(added, first, q.shape[2] if causal else 0)
        lse = lse.masked_fill(blind, float("-inf"))
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; see ``reference.attention_backward``.

    The fused kernel subtracts rowsum(dO ∘ O) from dO·Vᵀ. One more column, with dlse in dO, -1 in O
    and 0 in V, makes that rowsum(dO ∘ O) - dlse: the gradient of the log-sum-exp comes for free.
    """
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    if grad_lse is not None:
        grad_out = torch.cat([grad_out, grad_lse.unsqueeze(-1).to(grad_out.dtype)], -1)
        out = torch.cat([out, out.new_full((*out.shape[:-1], 1), -1.0)], -1)
    sizes, size = [x.shape[-1] for x in (q, k, v)], max(q.shape[-1], out.shape[-1])
    grad_out, q, k, v, out = (_pad(x, size) for x in (grad_out, q, k, v, out))
    masks, causal = _Masks.of(q, k, intervals, mask, bias, causal)
    if not _in_blocks(q, k, intervals):
        added = masks.additive(q.dtype, 0, k.shape[2])
        grads = _backward(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=added, scale=scale)
    else:
        grads = _backward_in_blocks(grad_out, q, k, v, out, lse, masks, scale)
    grad_q, grad_k, grad_v = (x[..., :n] for x, n in zip(grads, sizes, strict=True))
    return grad_q, grad_k, grad_v


def _backward_in_blocks(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: _Masks,
    scale: float,
) -> tuple[Tensor, ...]:
    """Sums over blocks, in the accumulation dtype."""
    wide = reference.accumulation_dtype(q.dtype)
    grads = [torch.zeros_like(x, dtype=wide) for x in (q, k, v)]
    for samples, rows, parts in _blocks(masks, len(q), k.shape[2]):
        grad, query, result, sums = (x[samples, :, rows] for x in (grad_out, q, out, lse))
        for keys, own in parts:
            added = own.additive(q.dtype, keys.start, keys.stop - keys.start)
            made = _backward(
                grad, query, *_keys(k, v, samples, keys), result, sums, 0.0, False,
                attn_mask=added, scale=scale,
            )  # fmt: skip
            grads[0][samples, :, rows] += made[0]
            for total, more in zip(_keys(grads[1], grads[2], samples, keys), made[1:], strict=True):
                total += more
    return tuple(total.to(q.dtype) for total in grads)
