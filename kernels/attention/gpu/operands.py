"""Tensors as the kernels read them: rows that descriptors can reach, float32 in three parts."""

import torch
from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """``x`` [B, H, S, D], or a copy, with a dense last dim and rows at multiples of 16 bytes.

    Tensor descriptors (TMA) read no other.
    """
    steps = (step * x.element_size() for step in x.stride()[:3])
    aligned = all(step % 16 == 0 for step in (x.data_ptr(), *steps))
    if aligned and x.stride(3) == 1 and min(x.stride()) > 0:
        return x
    return _room(x, x.shape[1], x.dtype).copy_(x)


def split(x: Tensor) -> Tensor:
    """Float32 [B, H, S, D] as bfloat16 [B, 3H, S, D]: heads of their first 8 bits, and so on.

    The three add up to ``x``: bfloat16 has the exponents of float32 and a third of its 24 bits.
    """
    parts = _room(x, 3 * x.shape[1], torch.bfloat16)
    for part in parts.chunk(3, 1):
        x = x - part.copy_(x)
    return parts


def _room(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    step = 16 // dtype.itemsize
    size = -(-x.shape[3] // step) * step
    return x.new_empty(x.shape[0], heads, x.shape[2], size, dtype=dtype)[..., : x.shape[3]]
