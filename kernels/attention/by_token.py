"""Results of attention, laid out as [B, S, H, D] in memory and seen as [B, H, S, D]."""

import torch
from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """The same values, laid out as [B, S, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_by_token(x: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [B, H, S, size] like ``x`` [B, H, S, D], in that layout."""
    shape = x.shape[0], x.shape[2], x.shape[1], size
    return x.new_empty(shape, dtype=dtype or x.dtype).transpose(1, 2)
