"""Intervals and runs of tiles, made once for all layers, forward and backward, that share them.

They are small but take two dozen launches to make. What is kept goes when the intervals go, and is
made again when they were written to; another stream makes its own.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.kernels.attention import runs

_MADE: Any = WeakIdKeyDictionary()


def tiles_of(intervals: Tensor, block_q: int, block_k: int) -> Tensor:
    """``runs.query_runs``."""
    return _made(intervals, "tiles", block_q, block_k)


def bounds_of(intervals: Tensor, block_q: int, block_k: int, key_blocks: int) -> Tensor:
    """``runs.key_bounds`` of those."""
    return _made(intervals, "bounds", block_q, block_k, key_blocks)


def _made(intervals: Tensor, kind: str, block_q: int, block_k: int, key_blocks: int = 0) -> Tensor:
    if intervals.is_inference():  # which does not count the writes to it
        return _make(intervals, kind, block_q, block_k, key_blocks)
    made: dict[tuple[object, ...], Tensor] = _MADE.setdefault(intervals, {})
    key = (intervals._version, _stream(intervals.device), kind, block_q, block_k, key_blocks)
    if key not in made:
        made[key] = _make(intervals, kind, block_q, block_k, key_blocks)
    return made[key]


def _make(intervals: Tensor, kind: str, block_q: int, block_k: int, key_blocks: int) -> Tensor:
    if kind == "tiles":
        return runs.query_runs(intervals, block_q, block_k)
    return runs.key_bounds(tiles_of(intervals, block_q, block_k), key_blocks)


def visible(
    intervals: Tensor | None, queries: int, keys: int, causal: bool, device: torch.device
) -> Tensor:
    """``runs.visible``; one tensor for all calls without intervals of the same lengths."""
    if intervals is None:
        return _whole(queries, keys, causal, device, _stream(device))
    return runs.visible(intervals, queries, keys, causal, device)


@lru_cache(maxsize=16)
def _whole(queries: int, keys: int, causal: bool, device: torch.device, stream: int) -> Tensor:
    return runs.visible(None, queries, keys, causal, device)


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
