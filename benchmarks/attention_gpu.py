"""Attention on a GPU: the Triton kernels against FlexAttention and SDPA.

    python benchmarks/attention_gpu.py [NAME ...] [--tokens S ...] [--heads H] [--key-heads G]

Masks are those of ``masks.py``; bfloat16, head size 128. Printed are TFLOP/s of the forward and of
the backward, medians, counting the pairs that the mask allows and no others: 4 FLOPs a pair, head
and element forward, 10 backward. SDPA is given the causal flag where that is the mask, and a dense
boolean mask where it is not; "-" is out of memory. Errors are those of 2048 tokens against the
definition in float64, as norms. Where there is no GPU it says so and stops.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.masks import draw, masks
from mllm_compile.kernels.attention import op, reference

DEVICE, SIZE, EXACT_TOKENS = "cuda", 128, 2048
SCALE = SIZE**-0.5


def inputs(tokens, heads, key_heads):
    g = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(1, tokens, count, SIZE) for count in (heads, key_heads, key_heads, heads)]
    drawn = (torch.randn(s, generator=g, device=DEVICE, dtype=torch.bfloat16) for s in shapes)
    q, k, v, grad = (x.transpose(1, 2) for x in drawn)
    return [x.detach().requires_grad_() for x in (q, k, v)], grad


def ours(rows, causal):
    intervals = None if causal else rows[None, :, None].contiguous()

    def run(q, k, v):
        return op.attention(q, k, v, intervals, None, None, causal, SCALE, 0.0)[0]

    return run


def flex(rows, causal):
    start, end = rows.unbind(-1)
    tokens = rows.shape[0]

    def seen(b, h, q, k):
        return (k >= start[q]) & (k < end[q])

    blocks = create_block_mask(seen, None, None, tokens, tokens, device=DEVICE, _compile=True)
    call = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: call(q, k, v, block_mask=blocks, scale=SCALE, enable_gqa=True)


def sdpa(rows, causal):
    mask = None if causal else reference.in_intervals(rows[None, :, None], 0, rows.shape[0])

    def run(q, k, v):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=SCALE, enable_gqa=True
        )

    return run


WAYS = {"ours": ours, "FlexAttention": flex, "SDPA": sdpa}


def rows_of(name, tokens):
    (_, rows), *_ = masks(name, draw(name, tokens, 0))
    return torch.tensor(rows, device=DEVICE)


def speed(make, name, tokens, heads, key_heads):
    """(forward, backward) in TFLOP/s as text."""
    from triton.testing import do_bench

    rows = rows_of(name, tokens)
    pairs = float((rows[:, 1] - rows[:, 0]).sum()) * heads * SIZE
    try:
        args, grad = inputs(tokens, heads, key_heads)
        run = make(rows, name == "causal")
        out = run(*args)
        forward = do_bench(lambda: run(*args), return_mode="median")
        backward = do_bench(
            lambda: torch.autograd.grad(out, args, grad, retain_graph=True), return_mode="median"
        )
    except torch.cuda.OutOfMemoryError:
        return "-", "-"
    return f"{4 * pairs / forward / 1e9:.0f}", f"{10 * pairs / backward / 1e9:.0f}"


def errors(make, name, heads, key_heads):
    """Relative errors of out, dq, dk and dv against float64, as text."""
    rows = rows_of(name, EXACT_TOKENS)
    args, grad = inputs(EXACT_TOKENS, heads, key_heads)
    out = make(rows, name == "causal")(*args)
    got = [out, *torch.autograd.grad(out, args, grad)]
    exact = [x.detach().double().requires_grad_() for x in args]
    want = reference.attention(*exact, rows[None, :, None], scale=SCALE)[0]
    wanted = [want, *torch.autograd.grad(want, exact, grad.double())]
    pairs = zip(got, wanted, strict=True)
    return [f"{((x.double() - y).norm() / y.norm()).item():.1e}" for x, y in pairs]


def main() -> None:
    """Print a table of speeds and one of errors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["causal", "packed", "packed_mm"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768, 65536])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_gpu: there is no GPU here; nothing measured")
        return
    heads = (options.heads, options.key_heads)
    speeds = Table("mask", "tokens", "way", "forward TFLOP/s", "backward TFLOP/s")
    exact = Table("mask", "way", "out", "dq", "dk", "dv")
    for name in options.names:
        for way, make in WAYS.items():
            exact.add_row(name, way, *errors(make, name, *heads))
            for tokens in options.tokens:
                speeds.add_row(name, str(tokens), way, *speed(make, name, tokens, *heads))
    Console().print(torch.cuda.get_device_name(), speeds, exact)


if __name__ == "__main__":
    main()
