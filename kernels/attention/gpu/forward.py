# mypy: ignore-errors
"""The forward in Triton: one program per query block and head, over the runs of its tiles."""

import triton
import triton.language as tl

from mllm_compile.kernels.attention.gpu.products import dot, parts, transposed
from mllm_compile.kernels.attention.gpu.tiles import (
    LOG2E,
    bounds_of,
    hidden,
    key_tile,
    place_of,
    query_base,
    query_tile,
    row_of,
    scored,
    store,
    zeros,
)
from mllm_compile.kernels.attention.gpu.walk import (
    full_tile,
    full_tiles,
    partial_tile,
    partial_tiles,
    runs_of,
)


@triton.jit
def _step(
    state, query, k, v, tiles, tile, place, i, bounds, visible, sizes, score,
    spec: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: (out, total, highest) with one more tile of keys."""
    out, total, highest = state
    start = tile * spec.block_k
    j = (start + tl.arange(0, spec.block_k))[None, :]
    key = key_tile(k, tiles[0], place, start, sizes, spec.size, spec.wide, spec, not PARTIAL)
    product = dot(query, transposed(key, spec), zeros(spec.block_q, spec.block_k), spec)
    scores, unit, _ = scored(product, place, i, j, visible, sizes, score, spec)
    low = float("-inf")
    scores = hidden(scores, low, place, i, j, bounds, visible, sizes, spec, PARTIAL)
    higher = tl.maximum(highest, tl.max(scores, 1) * unit)
    shift = higher
    if PARTIAL or spec.mask or spec.bias:  # a row may have seen nothing yet
        shift = tl.where(higher == low, 0.0, higher)
    weights = tl.exp2(scores * unit - shift[:, None])
    kept = tl.exp2(highest - shift)
    value = key_tile(
        v, tiles[1], place, start, sizes, spec.value_size, spec.value_wide, spec, not PARTIAL
    )
    out = out * kept[:, None]
    total = total * kept + tl.sum(weights, 1)
    return dot(parts(weights, value, spec), value, out, spec), total, higher


@triton.jit
def forward_kernel(
    q, k, v, key_tiles, value_tiles, out, lse, visible, sizes, score, spec: tl.constexpr
):
    """Rows q, k, v, out; descriptors of k and v or None; lse [B, H, Q] float32; the rest."""
    blocks = tl.cdiv(sizes.queries, spec.block_q)
    block, place = place_of(sizes, blocks)
    block = blocks - 1 - block  # under a causal mask the last have most to do: start them first
    start = block * spec.block_q
    row = start + tl.arange(0, spec.block_q)
    i = row[:, None]
    query = query_tile(q, None, place, start, sizes, spec.size, spec.wide, spec)
    bounds = bounds_of(visible.intervals, place[0], i, sizes, spec)
    tiles = (key_tiles, value_tiles)
    state = (
        zeros(spec.block_q, spec.value_wide),
        (row * 0).to(tl.float32),
        tl.where(row < 0, 0.0, float("-inf")),
    )
    runs = runs_of(visible.tiles, place[0], block, spec)
    for n in range(partial_tiles(runs, spec)):
        state = _step(
            state, query, k, v, tiles, partial_tile(n, runs, spec), place, i, bounds, visible,
            sizes, score, spec, True,
        )  # fmt: skip
    for n in range(full_tiles(runs, spec)):
        state = _step(
            state, query, k, v, tiles, full_tile(n, runs, spec), place, i, bounds, visible, sizes,
            score, spec, False,
        )  # fmt: skip
    value, total, highest = state
    blind = total == 0.0
    value = value / tl.where(blind, 1.0, total)[:, None]
    store(query_base(out, place), out.row, start, sizes.queries, value, spec.value_size)
    natural = tl.where(blind, float("-inf"), (highest + tl.log2(total)) / LOG2E)
    tl.store(row_of(lse, place, sizes) + row, natural, mask=row < sizes.queries)
