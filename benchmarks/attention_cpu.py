"""Attention on CPU: the operator's intervals against torch's SDPA with a dense mask.

    python benchmarks/attention_cpu.py [NAME ...] [--tokens S] [--rounds N] [--dtype float32]

Masks are those of ``masks.py``. Both compute the same attention forward, and forward and backward
together, taking turns; printed are the medians of CPU time of one thread, and their ratios. Results
and gradients are compared before anything is timed.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.masks import NAMES, draw, masks
from mllm_compile.kernels.attention import op, reference

HEADS, KEY_HEADS, SIZE = 4, 2, 64


def drawn(tokens, dtype):
    g = torch.Generator().manual_seed(0)
    shapes = ((1, tokens, heads, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    return [torch.randn(s, generator=g).to(dtype).transpose(1, 2).requires_grad_() for s in shapes]


def both_ways(rows, tokens, dtype):
    """(ours, torch's): functions from (q, k, v) to the output."""
    intervals = torch.tensor(rows)[None, :, None]
    dense = reference.in_intervals(intervals, 0, tokens)
    scale = SIZE**-0.5

    def ours(q, k, v):
        return op.attention(q, k, v, intervals, None, None, False, scale, 0.0)[0]

    def torchs(q, k, v):
        return scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)

    return ours, torchs


def timed(run):
    start = time.thread_time()
    run()
    return time.thread_time() - start


def compare(rows, tokens, dtype, rounds):
    """Medians of (forward, forward and backward) for both ways."""
    ways, args = both_ways(rows, tokens, dtype), drawn(tokens, dtype)
    seed = torch.ones(1, HEADS, tokens, SIZE, dtype=dtype)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    results = [[way(*args)] for way in ways]
    for made in results:
        made += torch.autograd.grad(made[0].square().sum(), args)
    for one, other in zip(*results, strict=True):
        error = (one - other).double().norm() / other.double().norm()
        assert error <= tolerance, error.item()
    times = [([], []) for _ in ways]
    for _ in range(rounds):
        for way, (forward, whole) in zip(ways, times, strict=True):
            with torch.no_grad():
                forward.append(timed(lambda way=way: way(*args)))
            whole.append(timed(lambda way=way: torch.autograd.grad(way(*args), args, seed)))
    return [[statistics.median(each) for each in pair] for pair in times]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "names", nargs="*", default=["packed_mm", "packed", "gemma", "mm", "causal"]
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    assert set(options.names) <= set(NAMES), f"masks are {NAMES}"
    title = f"{options.tokens} tokens, {options.dtype}, CPU milliseconds of one thread"
    table = Table(
        "mask", "pairs", "ours", "SDPA", "ratio", "ours f+b", "SDPA f+b", "ratio", title=title
    )
    for name in options.names:
        for _, rows in masks(name, draw(name, options.tokens)):
            pairs = (rows[:, 1] - rows[:, 0]).sum() / options.tokens**2
            dtype = getattr(torch, options.dtype)
            ours, torchs = compare(rows, options.tokens, dtype, options.rounds)
            cells = [f"{pairs:.1%}"]
            for mine, its in zip(ours, torchs, strict=True):
                cells += [f"{mine * 1e3:.0f}", f"{its * 1e3:.0f}", f"{its / mine:.2f}"]
            table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
