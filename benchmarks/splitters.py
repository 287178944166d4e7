"""Other ways to divide a sequence among context ranks, to compare the planner with.

Each takes (masks, document starts, ranks): masks as (number of layers, intervals [S, n, 2]), of
which all but the planner look at the first alone. Each gives a ``Split``.

PTRR is torch's own scheduling of tiles (``torch.distributed.tensor.experimental``). LPT is that of
Cornstarch (arXiv 2503.11367): the heaviest block of 128 tokens to the least loaded rank, whatever
the number of its tokens. Both are implemented here on tiles of 128; zigzag per document as in
TransformerEngine and WLB-LLM (arXiv 2503.17924), without padding.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _PTRRLoadBalancer,
)

from mllm_compile.compiler.split import Split
from mllm_compile.passes.token_split.measure import TILE, tiles
from mllm_compile.passes.token_split.planner import plan_split

Masks = Sequence[tuple[int, np.ndarray]]
Splitter = Callable[[Masks, Sequence[int], int], Split]


def contiguous(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    return Split.contiguous(len(masks[0][1]), ranks)


def zigzag(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    return Split.zigzag(len(masks[0][1]), ranks)


def per_document(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    owner = np.empty(len(masks[0][1]), np.int64)
    for start, end in zip(starts, [*starts[1:], len(owner)], strict=True):
        chunk = np.arange(end - start) * 2 * ranks // (end - start)
        owner[start:end] = np.minimum(chunk, 2 * ranks - 1 - chunk)
    return _split(owner, ranks)


def ptrr(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    work = torch.from_numpy(tiles(masks[0][1]))
    owner = np.empty(len(work), np.int64)
    for rank, blocks in enumerate(_PTRRLoadBalancer.ptrr_scheduling(work, ranks).numpy()):
        owner[blocks] = rank
    return _split(np.repeat(owner, TILE), ranks)


def lpt(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    work = tiles(masks[0][1])
    owner = np.empty(len(work), np.int64)
    heap = [(0, rank) for rank in range(ranks)]
    for block in np.argsort(-work, kind="stable"):
        load, rank = heapq.heappop(heap)
        owner[block] = rank
        heapq.heappush(heap, (load + int(work[block]), rank))
    return _split(np.repeat(owner, TILE), ranks)


def planned(masks: Masks, starts: Sequence[int], ranks: int) -> Split:
    return plan_split([mask for _, mask in masks], [layers for layers, _ in masks], ranks)


SPLITTERS: dict[str, Splitter] = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "per document": per_document,
    "PTRR": ptrr,
    "LPT": lpt,
    "planned": planned,
}


def _split(owner: np.ndarray, ranks: int) -> Split:
    edges = np.flatnonzero(np.diff(owner)) + 1
    parts: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for start, stop in zip([0, *edges], [*edges, len(owner)], strict=True):
        parts[owner[start]].append((int(start), int(stop)))
    return Split(tuple(map(tuple, parts)))
