"""Results of attention, laid out as [B, S, H, D] in memory and seen as [B, H, S, D]."""

from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """The same values, laid out as [B, S, H, D] in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_by_token(x: Tensor, size: int) -> Tensor:
    """An empty [B, H, S, size] like ``x`` [B, H, S, D], in that layout."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], size).transpose(1, 2)
