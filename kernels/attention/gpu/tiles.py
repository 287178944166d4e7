# mypy: ignore-errors
"""Parts of the Triton kernels: loads, and from a product of q and k to masked scores.

Arguments are the named tuples of ``spec``. Index tensors come shaped to broadcast, so that one
function serves both tilings: queries by keys (``i`` a column, ``j`` a row) in the forward and dq,
keys by queries (the other way) in dk and dv. ``place`` is (batch, head of q, head of k and v).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of(sizes, blocks):
    """(block, place) of this program; blocks of a head are neighbours."""
    pair = tl.program_id(0) // blocks
    head = pair % sizes.heads
    place = (pair // sizes.heads, head, head // (sizes.heads // sizes.key_heads))
    return tl.program_id(0) % blocks, place


@triton.jit
def base_of(x, batch, head):
    """The address of a head; 64 bits, as a tensor may hold more than 2**31 elements."""
    return x.data + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head


@triton.jit
def query_base(x, place):
    """The address of a head of queries."""
    return base_of(x, place[0], place[1])


@triton.jit
def row_of(x, place, sizes):
    """The address of a head's queries in a dense [B, H, Q]."""
    return x + (place[0].to(tl.int64) * sizes.heads + place[1]) * sizes.queries


@triton.jit
def zeros(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """An accumulator."""
    return tl.zeros([ROWS, WIDE], tl.float32)


@triton.jit
def _addresses(base, stride, start, ROWS: tl.constexpr, WIDE: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, WIDE)[None, :]
    return base + start.to(tl.int64) * stride + offsets


@triton.jit
def load(base, stride, start, count, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """Rows start… of a head as [ROWS, WIDE]; zeros past ``count`` and SIZE."""
    at = _addresses(base, stride, start, ROWS, WIDE)
    inside = (start + tl.arange(0, ROWS) < count)[:, None]
    if SIZE != WIDE:
        inside = inside & (tl.arange(0, WIDE) < SIZE)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_inside(base, stride, start, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr):
    """``load`` of rows that all exist."""
    at = _addresses(base, stride, start, ROWS, WIDE)
    if SIZE == WIDE:
        return tl.load(at)
    return tl.load(at, mask=(tl.arange(0, WIDE) < SIZE)[None, :], other=0.0)


@triton.jit
def store(base, stride, start, count, value, SIZE: tl.constexpr):
    """The inverse of ``load``."""
    at = _addresses(base, stride, start, value.shape[0], value.shape[1])
    inside = (start + tl.arange(0, value.shape[0]) < count)[:, None]
    inside = inside & (tl.arange(0, value.shape[1]) < SIZE)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _tile(
    x, tiles, batch, head, start, count, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    if tiles is not None:  # a descriptor puts zeros outside by itself
        return tiles.load([batch, head, start, 0]).reshape(ROWS, WIDE)
    elif INSIDE:
        return load_inside(base_of(x, batch, head), x.row, start, ROWS, SIZE, WIDE)
    else:
        return load(base_of(x, batch, head), x.row, start, count, ROWS, SIZE, WIDE)


@triton.jit
def _tiles(
    x, tiles, batch, head, heads, start, count, ROWS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, spec: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    first = _tile(x, tiles, batch, head, start, count, ROWS, SIZE, WIDE, INSIDE)
    if spec.precision == "bf16x6":
        head += heads
        second = _tile(x, tiles, batch, head, start, count, ROWS, SIZE, WIDE, INSIDE)
        head += heads
        third = _tile(x, tiles, batch, head, start, count, ROWS, SIZE, WIDE, INSIDE)
        return first, second, third
    else:
        return (first,)


@triton.jit
def key_tile(
    x, tiles, place, start, sizes, SIZE: tl.constexpr, WIDE: tl.constexpr, spec: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, [block_k, WIDE], in its parts; INSIDE: all its rows exist."""
    return _tiles(
        x, tiles, place[0], place[2], sizes.key_heads, start, sizes.keys, spec.block_k, SIZE, WIDE,
        spec, INSIDE,
    )  # fmt: skip


@triton.jit
def query_tile(
    x, tiles, place, start, sizes, SIZE: tl.constexpr, WIDE: tl.constexpr, spec: tl.constexpr
):
    """The same of queries, [block_q, WIDE]."""
    return _tiles(
        x, tiles, place[0], place[1], sizes.heads, start, sizes.queries, spec.block_q, SIZE, WIDE,
        spec, False,
    )  # fmt: skip


@triton.jit
def bounds_of(intervals, batch, i, sizes, spec: tl.constexpr):
    """The key intervals of queries ``i``: start, end, and of the second, or the same again."""
    at = intervals.data + batch.to(tl.int64) * intervals.batch + i * (2 * spec.intervals)
    inside = i < sizes.queries
    start = tl.load(at, mask=inside, other=0)
    end = tl.load(at + 1, mask=inside, other=0)
    if spec.intervals == 1:
        return start, end, start, end
    return start, end, tl.load(at + 2, mask=inside, other=0), tl.load(at + 3, mask=inside, other=0)


@triton.jit
def _tanh(x):
    """By exponentials where they are exact, by its series near zero; plain arithmetic."""
    grown = tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2.0 * LOG2E))
    outer = 1.0 - 2.0 / (grown + 1.0)
    square = x * x
    inner = 2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))
    inner = x * (1.0 + square * (-1.0 / 3.0 + square * inner))
    return tl.where(square < 0.0625, inner, tl.where(x < 0.0, -outer, outer))


@triton.jit
def _pair(x, place, i, j, sizes, other):
    """Elements (i, j) of a ``Pairs``; ``other`` outside. A head's are fewer than 2**31."""
    at = query_base(x, place) + (i * x.row + j * x.column)
    return tl.load(at, mask=(i < sizes.queries) & (j < sizes.keys), other=other)


@triton.jit
def scored(product, place, i, j, visible, sizes, score, spec: tl.constexpr):
    """(scores, unit, slope) from q·kᵀ: exp(score) is exp2(scores · unit); the cap's derivative."""
    scores = product
    unit = score.scale * LOG2E
    slope = 1.0
    if spec.softcap:
        bent = _tanh(product * (score.scale / score.softcap))
        scores = bent * score.softcap
        unit = LOG2E
        slope = 1.0 - bent * bent
    if spec.bias:
        extra = _pair(visible.bias, place, i, j, sizes, 0.0).to(tl.float32)
        scores = scores * unit + extra * LOG2E
        unit = 1.0
    return scores, unit, slope


@triton.jit
def hidden(
    value, other, place, i, j, bounds, visible, sizes, spec: tl.constexpr, PARTIAL: tl.constexpr
):
    """``value``, but ``other`` where query i may not see key j; full tiles skip the intervals."""
    if PARTIAL:
        allowed = (j >= bounds[0]) & (j < bounds[1])
        if spec.intervals == 2:
            allowed = allowed | ((j >= bounds[2]) & (j < bounds[3]))
        value = tl.where(allowed, value, other)
    if spec.mask:
        value = tl.where(_pair(visible.mask, place, i, j, sizes, 0) != 0, value, other)
    return value
