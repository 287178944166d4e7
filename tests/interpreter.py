"""The Triton kernels in Triton's interpreter: what runs in a process of its own.

The interpreter is chosen when triton is imported, so this module must be the first to import it,
with TRITON_INTERPRET=1; ``tests/test_attention_gpu.py`` starts such a process. Two faults of the
interpreter are put right: products of bfloat16 (it multiplies the bit patterns), and patching the
language for every call of a device function (it costs as much as the kernel; here it stays so).
"""

from inspect import ismodule
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from benchmarks import attention_gpu
from mllm_compile.kernels.attention import kernel, reference
from mllm_compile.kernels.attention.gpu import entry
from mllm_compile.kernels.attention.gpu.forward import forward_kernel
from mllm_compile.kernels.attention.gpu.table import Config
from mllm_compile.kernels.attention.site import Site
from tests.interval_masks import dense, draw

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # and so torch.empty is full of NaN
torch.utils.deterministic.fill_uninitialized_memory = True
np.seterr(divide="ignore")

assert isinstance(forward_kernel, interpreter.InterpretedFunction)

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


def _wide(x):
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _repair():
    dot, patch = interpreter.InterpreterBuilder.create_dot, interpreter._patch_lang
    patched = set()

    def patch_once(function):
        modules = frozenset(
            id(x) for x in function.__globals__.values() if ismodule(x) and x in (tl, tl.core)
        )
        if modules not in patched:
            patched.add(modules)
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(
        self, _wide(a), _wide(b), *rest
    )


_repair()


def inputs(queries, keys, heads, key_heads, size, value_size, dtype, batch):
    g = torch.Generator().manual_seed(queries * 1000 + keys + heads)

    def draw_one(h, s, d):  # [B, S, H, D] in memory, as models make them
        return torch.randn(batch, s, h, d, generator=g).to(getattr(torch, dtype)).transpose(1, 2)

    q, k, v = (
        draw_one(heads, queries, size),
        draw_one(key_heads, keys, size),
        draw_one(key_heads, keys, value_size),
    )
    return q, k, v, draw_one(heads, queries, value_size), g


def error(got, want):
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-9)).item()


def expected(args, grads, pairs, bias, causal, scale, softcap):
    """out, lse and gradients by the definition in float64."""
    wide = [x.double().requires_grad_() for x in args]
    out, lse = reference.attention(*wide, None, pairs, bias, causal, scale, softcap)
    finite = lse.masked_fill(lse == float("-inf"), 0)
    return out, lse, torch.autograd.grad([out, finite], wide, [x.double() for x in grads])


def dense_tensors(mask, bias, batch, heads, queries, keys, g):
    """A boolean mask and an additive bias, of the shapes named."""
    shapes = {
        "none": None,
        "whole": (batch, heads, queries, keys),
        "padding": (batch, 1, 1, keys),
        "heads": (1, heads, queries, 1),
    }
    seen = None if mask == "none" else torch.rand(shapes[mask], generator=g) > 0.4
    added = None if bias == "none" else torch.randn(shapes[bias], generator=g)
    if added is not None:
        added[0, 0, 0] = float("-inf")
    return seen, added


def agree(
    kind, queries, keys, heads=2, key_heads=1, size=16, value_size=16, dtype="float32", batch=1,
    mask="none", bias="none", causal=False, softcap=0.0, repeat=False, strided=False, tiles=(),
):  # fmt: skip
    """Forward, log-sum-exp and gradients are those of the definition; and again the same bits."""
    q, k, v, grad_out, g = inputs(queries, keys, heads, key_heads, size, value_size, dtype, batch)
    if strided:
        q, k, v = (torch.cat([x, x], -1)[..., ::2] for x in (q, k, v))
    intervals = None if kind is None else draw(kind, queries, keys, g, batch)
    seen, added = dense_tensors(mask, bias, batch, heads, queries, keys, g)
    pairs = seen if kind is None else dense(intervals, keys)
    pairs = pairs if seen is None or kind is None else pairs & seen
    grad_lse = torch.randn(q.shape[:3], generator=g)
    options = (seen, added, causal, 0.3, softcap, parsed(tiles))
    out, lse, grads = run((q, k, v), (grad_out, grad_lse), intervals, options)
    terms = options[1:5]
    want, want_lse, want_grads = expected((q, k, v), (grad_out, grad_lse), pairs, *terms)
    blind = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), blind)
    assert not out.masked_select(blind[..., None]).any()
    assert not grads[0].masked_select(blind[..., None]).any()
    names = ("out", "lse", "dq", "dk", "dv")
    wanted = (want, want_lse.masked_fill(blind, 0), *want_grads)
    for name, x, y in zip(names, (out, lse.masked_fill(blind, 0), *grads), wanted, strict=True):
        assert error(x, y) <= TOLERANCE[dtype], (name, error(x, y))
    if repeat:
        again = run((q, k, v), (grad_out, grad_lse), intervals, options)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
        assert all(torch.equal(x, y) for x, y in zip(again[2], grads, strict=True))


def parsed(tiles):
    """Configurations to run, by kernel, from their text."""
    return tuple((kernel, (Config.parse(text),)) for kernel, text in dict(tiles).items())


def run(args, grads, intervals, options):
    out, lse = entry.attention(*args, intervals, *options)
    return out, lse, entry.attention_backward(*grads, *args, out, lse, intervals, *options)


def needed(intervals, keys):
    """Which keys the rows see, and the rows' intervals in the order of those keys alone."""
    seen = dense(intervals, keys).flatten(0, 2).any(0)
    place = torch.cat([torch.zeros(1, dtype=torch.int32), seen.cumsum(0).int()])
    return seen.nonzero().squeeze(1), place[intervals.long()]


def context_parallel(kind, length, ranks, unit):
    """Ranks with some of the queries each, in units dealt in turn, and the keys that those see."""
    q, k, v, grad_out, g = inputs(length, length, 4, 2, 16, 16, "float32", 1)
    intervals = draw(kind, length, length, g)
    options = (None, None, False, 0.3, 0.0)
    out, _, grads = run((q, k, v), (grad_out, None), intervals, options)
    total = [torch.full_like(out, float("nan")), torch.full_like(q, float("nan"))]
    sums = [torch.zeros_like(k), torch.zeros_like(v)]
    for rank in range(ranks):
        rows = ((torch.arange(length) // unit) % ranks == rank).nonzero().squeeze(1)
        at, local = needed(intervals[:, rows], length)
        part = (q[:, :, rows], k[:, :, at], v[:, :, at])
        mine = run(part, (grad_out[:, :, rows], None), local, options)
        total[0][:, :, rows], total[1][:, :, rows] = mine[0], mine[2][0]
        for whole, piece in zip(sums, mine[2][1:], strict=True):
            whole.index_add_(2, at, piece)
    pairs = zip((*total, *sums), (out, *grads), strict=True)
    assert all(error(got, want.double()) <= 1e-6 for got, want in pairs)


def own_keys_first(kind, length, split):
    """A rank's own keys, then the remote ones, merged by log-sum-exp in float32."""
    q, k, v, grad_out, g = inputs(length, length, 4, 2, 16, 16, "float32", 1)
    intervals = draw(kind, length, length, g)
    options = (None, None, False, 0.3, 0.0)
    want, want_lse, want_grads = expected(
        (q, k, v), (grad_out, torch.zeros(q.shape[:3])), dense(intervals, length), *options[1:]
    )
    parts = [slice(split, None), slice(None, split)]
    limits = [(split, length), (0, split)]
    cut = [intervals.clamp(*limit) - limit[0] for limit in limits]
    done = [
        entry.attention(q, k[:, :, part], v[:, :, part], rows, *options)
        for part, rows in zip(parts, cut, strict=True)
    ]
    lse = torch.logaddexp(done[0][1], done[1][1])
    shares = [torch.exp(each - lse).nan_to_num(0.0)[..., None] for _, each in done]
    out = sum(x * share for (x, _), share in zip(done, shares, strict=True))
    assert error(out, want) <= 2e-6
    seeing = want_lse > float("-inf")
    assert error(lse[seeing], want_lse[seeing]) <= 2e-6
    grads = [
        entry.attention_backward(
            grad_out, None, q, k[:, :, part], v[:, :, part], out, lse, rows, *options
        )
        for part, rows in zip(parts, cut, strict=True)
    ]
    assert error(grads[0][0] + grads[1][0], want_grads[0]) <= 2e-6
    for index in (1, 2):
        assert error(torch.cat([grads[1][index], grads[0][index]], 2), want_grads[index]) <= 2e-6


def rounded_once(length, split, dtype):
    """Parts in float32, joined and then rounded, are as near to float64 as all keys at once."""
    q, k, v, grad_out, g = inputs(length, length, 4, 2, 32, 32, dtype, 1)
    intervals = draw("multimodal", length, length, g)
    options = (None, None, False, 0.3, 0.0)
    want, _, want_grads = expected(
        (q, k, v), (grad_out, torch.zeros(q.shape[:3])), dense(intervals, length), *options[1:]
    )
    single, _, single_grads = run((q, k, v), (grad_out, None), intervals, options)
    parts = [
        ((q, k[:, :, at], v[:, :, at]), intervals.clamp(at.start, at.stop) - at.start)
        for at in (slice(0, split), slice(split, length))
    ]
    done = [entry.attention(*args, rows, *options, dtype=torch.float32) for args, rows in parts]
    out, lse = reference.merged(done)
    assert {out.dtype, *(x.dtype for x, _ in done)} == {torch.float32}
    assert error(out.to(q.dtype), want) <= 1.01 * error(single, want)
    grads = [
        entry.attention_backward(
            grad_out, None, *args, out.to(q.dtype), lse, rows, *options, dtype=torch.float32
        )
        for args, rows in parts
    ]
    assert {x.dtype for each in grads for x in each} == {torch.float32}
    total = (grads[0][0] + grads[1][0], *(torch.cat(x, 2) for x in [*zip(*grads, strict=True)][1:]))
    for got, one, want_one in zip(total, single_grads, want_grads, strict=True):
        assert error(got.to(q.dtype), want_one) <= 1.01 * error(one, want_one)


def benchmarked(mask):
    """The benchmark's own check of the kernels against float64, by the operator."""

    def triton(target, names, q, k, v, intervals, mask, bias, scale, softcap):
        return kernel.Kernel(kernel.TRITON, target, Site.of(q, v, intervals, mask, bias, softcap))

    tiny = {"DEVICE": "cpu", "SIZE": 32, "EXACT_TOKENS": 150}
    with patch.multiple(attention_gpu, **tiny), patch.object(kernel, "chosen", triton):
        found = attention_gpu.errors(attention_gpu.ours, mask, 4, 2)
    assert all(0 < float(error) < 2e-2 for error in found), found
