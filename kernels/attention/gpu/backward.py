# mypy: ignore-errors
"""The backward in Triton: delta, then dq by query blocks and dk, dv by key blocks.

Every element has one writer that adds in a fixed order: no atomics, and runs repeat bit by bit.
With P the weights: dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - delta), delta = rowsum(dO ∘ O) - dlse.
"""

import triton
import triton.language as tl

from mllm_compile.kernels.attention.gpu.products import dot, parts, transposed
from mllm_compile.kernels.attention.gpu.tiles import (
    LOG2E,
    base_of,
    bounds_of,
    hidden,
    key_tile,
    load,
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
    run_of,
    runs_of,
)


@triton.jit
def delta_kernel(out, grad_out, lse, grad_lse, delta, sizes, spec: tl.constexpr):
    """Rows out, grad_out; lse, grad_lse or None, delta [B, H, Q]; 0 where a query sees nothing."""
    block, place = place_of(sizes, tl.cdiv(sizes.queries, spec.block_q))
    start = block * spec.block_q
    row = start + tl.arange(0, spec.block_q)
    inside = row < sizes.queries
    value = load(
        query_base(out, place), out.row, start, sizes.queries, spec.block_q, spec.value_size,
        spec.value_wide,
    )  # fmt: skip
    grad = load(
        query_base(grad_out, place), grad_out.row, start, sizes.queries, spec.block_q,
        spec.value_size, spec.value_wide,
    )  # fmt: skip
    total = tl.sum(value.to(tl.float32) * grad.to(tl.float32), 1)
    if grad_lse is not None:
        total -= tl.load(row_of(grad_lse, place, sizes) + row, mask=inside, other=0.0)
    seeing = tl.load(row_of(lse, place, sizes) + row, mask=inside, other=0.0) > float("-inf")
    tl.store(row_of(delta, place, sizes) + row, tl.where(seeing, total, 0.0), mask=inside)


@triton.jit
def _saved(lse, delta, place, row, sizes):
    """Lse as a power of two, +inf (no weight) where a query sees nothing or is none; and delta."""
    inside = row < sizes.queries
    high = tl.load(row_of(lse, place, sizes) + row, mask=inside, other=float("inf"))
    high = tl.where(high == float("-inf"), float("inf"), high * LOG2E)
    return high, tl.load(row_of(delta, place, sizes) + row, mask=inside, other=0.0)


@triton.jit
def _dq_step(
    grad, query, grad_out, saved, k, v, tiles, tile, place, i, bounds, visible, sizes, score,
    spec: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries with one more tile of keys."""
    start = tile * spec.block_k
    j = (start + tl.arange(0, spec.block_k))[None, :]
    key = key_tile(k, tiles[0], place, start, sizes, spec.size, spec.wide, spec, not PARTIAL)
    product = dot(query, transposed(key, spec), zeros(spec.block_q, spec.block_k), spec)
    scores, unit, slope = scored(product, place, i, j, visible, sizes, score, spec)
    weights = tl.exp2(scores * unit - saved[0])
    weights = hidden(weights, 0.0, place, i, j, bounds, visible, sizes, spec, PARTIAL)
    value = key_tile(
        v, tiles[1], place, start, sizes, spec.value_size, spec.value_wide, spec, not PARTIAL
    )
    value = transposed(value, spec)
    grad_weights = dot(grad_out, value, zeros(spec.block_q, spec.block_k), spec)
    grad_scores = weights * (grad_weights - saved[1]) * slope
    return dot(parts(grad_scores, key, spec), key, grad, spec)


@triton.jit
def dq_kernel(
    q, k, v, key_tiles, value_tiles, grad_out, grad_q, lse, delta, visible, sizes, score,
    spec: tl.constexpr,
):  # fmt: skip
    """As the forward; Rows grad_out and grad_q; lse and delta [B, H, Q] float32."""
    blocks = tl.cdiv(sizes.queries, spec.block_q)
    block, place = place_of(sizes, blocks)
    block = blocks - 1 - block
    start = block * spec.block_q
    row = start + tl.arange(0, spec.block_q)
    i = row[:, None]
    count = sizes.queries
    query = query_tile(q, None, place, start, sizes, spec.size, spec.wide, spec)
    above = query_tile(grad_out, None, place, start, sizes, spec.value_size, spec.value_wide, spec)
    high, offset = _saved(lse, delta, place, row, sizes)
    saved = (high[:, None], offset[:, None])
    bounds = bounds_of(visible.intervals, place[0], i, sizes, spec)
    tiles = (key_tiles, value_tiles)
    grad = zeros(spec.block_q, spec.wide)
    runs = runs_of(visible.tiles, place[0], block, spec)
    for n in range(partial_tiles(runs, spec)):
        grad = _dq_step(
            grad, query, above, saved, k, v, tiles, partial_tile(n, runs, spec), place, i, bounds,
            visible, sizes, score, spec, True,
        )  # fmt: skip
    for n in range(full_tiles(runs, spec)):
        grad = _dq_step(
            grad, query, above, saved, k, v, tiles, full_tile(n, runs, spec), place, i, bounds,
            visible, sizes, score, spec, False,
        )  # fmt: skip
    base = query_base(grad_q, place)
    store(base, grad_q.row, start, count, grad * score.scale, spec.size)


@triton.jit
def _kind_in(run, tile):
    kept = (tile >= run[0]) & (tile < run[3])
    full = (tile >= run[1]) & (tile < run[2])
    return kept.to(tl.int32) + full.to(tl.int32)


@triton.jit
def _kind(visible, batch, block, tile, spec: tl.constexpr):
    """How a query block sees a tile of keys: 0 not, 1 in part, 2 in full."""
    kind = _kind_in(run_of(visible.tiles, batch, block, 0, spec), tile)
    if spec.intervals == 2:
        kind += _kind_in(run_of(visible.tiles, batch, block, 1, spec), tile)
    return kind


@triton.jit
def _dkv_step(
    state, key, value, inputs, index, first, length, batch, key_head, j, visible, sizes, score,
    spec: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with one more tile: ``index`` counts the run's query blocks head after head."""
    grad_key, grad_value = state
    q, query_tiles, grad_out, grad_tiles, lse, delta = inputs
    place = (batch, key_head * (sizes.heads // sizes.key_heads) + index // length, key_head)
    start = (first + index % length) * spec.block_q
    row = start + tl.arange(0, spec.block_q)
    i = row[None, :]
    query = query_tile(q, query_tiles, place, start, sizes, spec.size, spec.wide, spec)
    above = query_tile(
        grad_out, grad_tiles, place, start, sizes, spec.value_size, spec.value_wide, spec
    )
    high, offset = _saved(lse, delta, place, row, sizes)
    product = dot(key, transposed(query, spec), zeros(spec.block_k, spec.block_q), spec)
    scores, unit, slope = scored(product, place, i, j, visible, sizes, score, spec)
    weights = tl.exp2(scores * unit - high[None, :])
    bounds = (0, 0, 0, 0)
    if PARTIAL:
        bounds = bounds_of(visible.intervals, batch, i, sizes, spec)
    weights = hidden(weights, 0.0, place, i, j, bounds, visible, sizes, spec, PARTIAL)
    if spec.dv:
        grad_value = dot(parts(weights, above, spec), above, grad_value, spec)
    if spec.dk:
        above = transposed(above, spec)
        grad_weights = dot(value, above, zeros(spec.block_k, spec.block_q), spec)
        grad_scores = weights * (grad_weights - offset[None, :]) * slope
        grad_key = dot(parts(grad_scores, query, spec), query, grad_key, spec)
    return grad_key, grad_value


@triton.jit
def _next(
    visible, batch, block, end, tile, spec: tl.constexpr, KIND: tl.constexpr, SAME: tl.constexpr
):
    """The first query block from ``block`` on that sees the tile in this kind, or not in it."""
    searching = block < end
    while searching:
        if (_kind(visible, batch, block, tile, spec) == KIND) == SAME:
            searching = False
        else:
            block += 1
            searching = block < end
    return block


@triton.jit
def _dkv_runs(
    state, key, value, inputs, tile, batch, key_head, j, visible, sizes, score,
    spec: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """(dk, dv) with all runs of query blocks that see the tile in this kind."""
    at = visible.bounds.data + batch.to(tl.int64) * visible.bounds.batch + tile * 2
    end = tl.load(at + 1)
    block = _next(visible, batch, tl.load(at), end, tile, spec, KIND, True)
    while block < end:
        stop = _next(visible, batch, block, end, tile, spec, KIND, False)
        for index in range((stop - block) * (sizes.heads // sizes.key_heads)):
            state = _dkv_step(
                state, key, value, inputs, index, block, stop - block, batch, key_head, j, visible,
                sizes, score, spec, KIND == 1,
            )  # fmt: skip
        block = _next(visible, batch, stop, end, tile, spec, KIND, True)
    return state


@triton.jit
def dkv_kernel(
    q, k, v, query_tiles, grad_tiles, grad_out, grad_k, grad_v, lse, delta, visible, sizes, score,
    spec: tl.constexpr,
):  # fmt: skip
    """As dq, but descriptors are of q and grad_out; Rows grad_k and grad_v."""
    columns = tl.cdiv(sizes.keys, spec.block_k)
    tile = tl.program_id(0) % columns
    batch = tl.program_id(0) // columns // sizes.key_heads
    key_head = tl.program_id(0) // columns % sizes.key_heads
    start = tile * spec.block_k
    count = sizes.keys
    j = start + tl.arange(0, spec.block_k)[:, None]
    place = (batch, 0, key_head)
    key = key_tile(k, None, place, start, sizes, spec.size, spec.wide, spec, False)
    value = key_tile(v, None, place, start, sizes, spec.value_size, spec.value_wide, spec, False)
    inputs = (q, query_tiles, grad_out, grad_tiles, lse, delta)
    state = (zeros(spec.block_k, spec.wide), zeros(spec.block_k, spec.value_wide))
    for KIND in tl.static_range(1, 3):  # in part, then in full
        state = _dkv_runs(
            state, key, value, inputs, tile, batch, key_head, j, visible, sizes, score, spec, KIND
        )
    if spec.dk:
        grad_key = state[0] * score.scale
        store(base_of(grad_k, batch, key_head), grad_k.row, start, count, grad_key, spec.size)
    if spec.dv:
        base = base_of(grad_v, batch, key_head)
        store(base, grad_v.row, start, count, state[1], spec.value_size)
