# mypy: ignore-errors
"""Which tiles of keys a query block visits: those seen in part, then those seen in full.

One walk leads through both runs: around two loops the compiler would hold what each wants at once.
"""

import triton
import triton.language as tl


@triton.jit
def run_of(tiles, batch, block, index, spec: tl.constexpr):
    """(first, first_full, end_full, end) of a query block's run number ``index``."""
    at = tiles.data + batch.to(tl.int64) * tiles.batch + (block * spec.intervals + index) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def runs_of(tiles, batch, block, spec: tl.constexpr):
    """The two runs of a query block, or its one run twice."""
    run = run_of(tiles, batch, block, 0, spec)
    other = run
    if spec.intervals == 2:
        other = run_of(tiles, batch, block, 1, spec)
    return run, other


@triton.jit
def _partials(run):
    return run[1] - run[0] + run[3] - run[2]


@triton.jit
def _partial_in(n, run):
    before = run[1] - run[0]
    return tl.where(n < before, run[0], run[2] - before) + n


@triton.jit
def partial_tiles(runs, spec: tl.constexpr):
    """How many tiles are seen in part, those on either side of the full ones of a run."""
    count = _partials(runs[0])
    if spec.intervals == 2:
        count += _partials(runs[1])
    return count


@triton.jit
def partial_tile(n, runs, spec: tl.constexpr):
    """Number ``n`` of them."""
    tile = _partial_in(n, runs[0])
    if spec.intervals == 2:
        before = _partials(runs[0])
        tile = tl.where(n < before, tile, _partial_in(n - before, runs[1]))
    return tile


@triton.jit
def full_tiles(runs, spec: tl.constexpr):
    """How many tiles are seen in full."""
    count = runs[0][2] - runs[0][1]
    if spec.intervals == 2:
        count += runs[1][2] - runs[1][1]
    return count


@triton.jit
def full_tile(n, runs, spec: tl.constexpr):
    """Number ``n`` of them."""
    tile = runs[0][1] + n
    if spec.intervals == 2:
        before = runs[0][2] - runs[0][1]
        tile = tl.where(n < before, tile, runs[1][1] + n - before)
    return tile
