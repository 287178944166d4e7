"""What follows from intervals, made once for all layers, forward and backward, that share them.

Runs of tiles are small but take two dozen launches to make. What is kept goes when the intervals
go, and is made again when they were written to; another stream makes its own.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.kernels.attention import runs

T = TypeVar("T")
_MADE: Any = WeakIdKeyDictionary()


def once(intervals: Tensor, key: Hashable, make: Callable[[], T]) -> T:
    """What ``make`` makes of intervals, which are known under this key."""
    if intervals.is_inference():  # which does not count the writes to it
        return make()
    made: dict[Hashable, T] = _MADE.setdefault(intervals, {})
    stamped = intervals._version, _stream(intervals.device), key
    if stamped not in made:
        made[stamped] = make()
    return made[stamped]


def tiles_of(intervals: Tensor, block_q: int, block_k: int) -> Tensor:
    """``runs.query_runs``."""
    make = partial(runs.query_runs, intervals, block_q, block_k)
    return once(intervals, ("tiles", block_q, block_k), make)


def bounds_of(intervals: Tensor, block_q: int, block_k: int, key_blocks: int) -> Tensor:
    """``runs.key_bounds`` of those."""
    key = "bounds", block_q, block_k, key_blocks
    return once(
        intervals, key, lambda: runs.key_bounds(tiles_of(intervals, block_q, block_k), key_blocks)
    )


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
