"""The attention operator against its definition: forward, log-sum-exp and every gradient."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.kernels.attention import cpu, op, rectangles, reference


@pytest.fixture(autouse=True)
def poisoned_empty():
    """Memory that nobody wrote reads as NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def inputs(queries, keys, heads=4, key_heads=4, size=16, value_size=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(queries * 1000 + keys + key_heads)

    def draw(h, s, d):  # [B, S, H, D] in memory, as models make them
        return torch.randn(2, s, h, d, generator=g, dtype=dtype).transpose(1, 2)

    q, k, v = (
        draw(heads, queries, size),
        draw(key_heads, keys, size),
        draw(key_heads, keys, value_size),
    )
    return [x.requires_grad_() for x in (q, k, v)]


def make_mask(kind, queries, keys, heads=4):
    g = torch.Generator().manual_seed(queries + keys)
    shape = {
        "none": None,
        "batch": (2, 1, queries, keys),
        "shared": (1, 1, queries, keys),
        "padding": (2, 1, 1, keys),
        "heads": (2, heads, queries, keys),
    }[kind]
    if shape is None:
        return None
    mask = torch.rand(shape, generator=g) > 0.6
    mask[0, :, queries // 2 if shape[2] > 1 else 0] = False  # rows that see nothing
    return mask


def agree(
    call,
    args,
    mask=None,
    bias=None,
    causal=False,
    scale=0.3,
    softcap=0.0,
    tolerance=1e-12,
    intervals=None,
):
    """out, lse and the gradients of q, k, v under random output gradients, both of out and lse."""
    q, k, v = args
    g = torch.Generator().manual_seed(5)
    out, lse = call(q, k, v, intervals, mask, bias, causal, scale, softcap)
    want, want_lse = reference.attention(
        *(x.double() for x in args), intervals, mask, bias, causal, scale, softcap
    )
    grad_out = torch.randn(want.shape, generator=g, dtype=torch.float64)
    grad_lse = torch.randn(want_lse.shape, generator=g, dtype=torch.float64)
    empty = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty)
    assert not out.masked_select(empty.unsqueeze(-1)).any()
    grads = torch.autograd.grad(
        [out, lse.masked_fill(empty, 0)], args, [grad_out.to(out.dtype), grad_lse.to(lse.dtype)]
    )
    want_grads = torch.autograd.grad(
        [want, want_lse.masked_fill(empty, 0)], args, [grad_out, grad_lse]
    )
    pairs = [(out, want), (lse.masked_fill(empty, 0), want_lse.masked_fill(empty, 0))]
    for got, expected in [*pairs, *zip(grads, want_grads, strict=True)]:
        assert got.shape == expected.shape
        assert torch.isfinite(got).all()
        error = (got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)
        assert error.item() <= tolerance


LENGTHS = [(57, 57), (33, 130), (130, 33), (1, 7), (283, 283)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["none", "batch", "shared", "padding", "heads"])
@pytest.mark.parametrize("causal", [False, True])
def test_operator_is_the_definition(queries, keys, key_heads, kind, causal):
    agree(
        op.attention,
        inputs(queries, keys, key_heads=key_heads),
        make_mask(kind, queries, keys),
        causal=causal,
    )


def draw_intervals(batch, queries, keys, count, seed=0):
    """[batch, queries, count, 2], ascending and disjoint; every third row sees nothing."""
    g = torch.Generator().manual_seed(seed + queries + keys)
    ends = torch.randint(0, keys + 1, (batch, queries, 2 * count), generator=g).sort(-1).values
    ends[:, ::3] = ends[:, ::3, :1]
    return ends.to(torch.int32).unflatten(-1, (count, 2))


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["none", "batch", "padding"])
@pytest.mark.parametrize("causal", [False, True])
def test_intervals(queries, keys, count, batch, kind, causal):
    agree(
        op.attention,
        inputs(queries, keys, key_heads=2),
        make_mask(kind, queries, keys),
        causal=causal,
        intervals=draw_intervals(batch, queries, keys, count),
    )


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of few rows, on calls of any size."""
    monkeypatch.setattr(cpu, "FEW_PAIRS", 0)
    monkeypatch.setattr(rectangles, "ROWS", 16)
    monkeypatch.setattr(rectangles, "LEAST_FULL", 8)


def smooth_intervals(kind, batch, length):
    """Masks as models have them: packed documents, a window, both beside keys that all see."""
    rows = torch.arange(length)
    document = rows * 3 // length * length // 3
    start, end = {
        "documents": (document, rows + 1),
        "window": ((rows - 20).clamp_min(0), rows + 1),
        "segments": (document, document + length // 3),
        "sinks": ((rows - 20).clamp_min(4), rows + 1),
        "late": (document, rows - 40),
    }[kind]
    pair = torch.stack([start, end.maximum(start)], -1)
    if kind == "sinks":
        first = torch.stack([torch.zeros_like(rows), (rows + 1).clamp_max(4)], -1)
        intervals = torch.stack([first, pair], 1)
    else:
        intervals = pair[:, None]
    samples = [intervals, intervals.flip(0).contiguous()][:batch]
    return torch.stack(samples).to(torch.int32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("drawn", ["documents", "window", "segments", "sinks", "late", 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["none", "batch", "padding", "heads"])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_the_definition(drawn, batch, kind, causal):
    """Forward and backward, with masks, biases and a gradient of the log-sum-exp."""
    length = 130
    named = isinstance(drawn, str)
    intervals = (smooth_intervals if named else draw_intervals)(
        *((drawn, batch, length) if named else (batch, length, length, drawn))
    )
    bias = torch.randn(1, 4, length, length, dtype=torch.float64) if kind == "heads" else None
    args = inputs(length, length, key_heads=2, value_size=12)
    agree(op.attention, args, make_mask(kind, length, length), bias, causal, intervals=intervals)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["documents", "sinks"])
def test_low_precision_in_blocks(dtype, kind):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    args, intervals = inputs(130, 130, key_heads=2, dtype=dtype), smooth_intervals(kind, 1, 130)
    agree(op.attention, args, tolerance=tolerance, intervals=intervals)


def test_pairs_outside_of_intervals_cost_nothing(monkeypatch):
    """The fused kernels are called for the rectangles alone, those that are full without a mask."""
    length, seen = 512, []

    def watched(kernel, keys_at):
        def call(*args, attn_mask=None, **kwargs):
            seen.append((args[0].shape[2], args[keys_at].shape[2], attn_mask is not None))
            return kernel(*args, attn_mask=attn_mask, **kwargs)

        return call

    monkeypatch.setattr(rectangles, "LEAST_FULL", 64)
    monkeypatch.setattr(cpu, "_forward", watched(cpu._forward, 1))
    monkeypatch.setattr(cpu, "_backward", watched(cpu._backward, 2))
    rows = torch.arange(length)
    start = rows // 256 * 256  # two documents of two blocks each
    intervals = torch.stack([start, rows + 1], -1)[None, :, None].int()
    args = inputs(length, length, key_heads=2)
    out, _ = op.attention(*args, intervals, None, None, False, 0.3, 0.0)
    per_document = [(128, 128, True), (128, 129, False), (128, 127, True)]
    assert seen == per_document * 2
    seen.clear()
    out.sum().backward()
    assert seen == per_document * 2


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_intervals_are_the_mask_that_they_say(softcap):
    """The reference against a mask written out by hand."""
    intervals = draw_intervals(2, 9, 11, 2)
    mask = torch.zeros(2, 1, 9, 11, dtype=torch.bool)
    for sample, query, at in itertools.product(range(2), range(9), range(2)):
        start, end = intervals[sample, query, at]
        mask[sample, 0, query, start:end] = True
    args = inputs(9, 11)
    want = reference.attention(*args, None, mask, None, False, 0.3, softcap)
    for call in (reference.attention, op.attention):
        got = call(*args, intervals, None, None, False, 0.3, softcap)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.long(),
        lambda x: x[:, :5],
        lambda x: x[0],
        lambda x: x[..., :1],
        lambda x: x.repeat(1, 1, 3, 1),
        lambda x: x.repeat(3, 1, 1, 1),
    ],
)
def test_wrong_intervals_are_refused(change):
    args, intervals = inputs(6, 9), draw_intervals(1, 6, 9, 1)
    op.attention(*args, intervals, None, None, False, 1.0, 0.0)
    with pytest.raises(ValueError, match=r"intervals must be int32 \[1 or 2, 6, 1 or 2, 2\]"):
        op.attention(*args, change(intervals), None, None, False, 1.0, 0.0)


@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (16, 24), (5, 3), (1, 1)])
@pytest.mark.parametrize("kind", ["none", "batch"])
def test_value_size_may_differ(size, value_size, kind):
    args = inputs(21, 34, key_heads=2, size=size, value_size=value_size)
    agree(op.attention, args, make_mask(kind, 21, 34))


@pytest.mark.parametrize("kind", ["none", "batch"])
def test_bias(kind):
    bias = torch.randn(1, 4, 19, 23, dtype=torch.float64)
    bias[0, :, 3] = float("-inf")
    agree(op.attention, inputs(19, 23), make_mask(kind, 19, 23), bias)


def test_strided_and_broadcast_bias():
    whole = torch.randn(1, 4, 23, 19, dtype=torch.float64).transpose(-1, -2)
    for bias in (whole, whole[..., :1], whole[:, :1, :1], whole[:, :, :, ::2].repeat(1, 1, 1, 2)):
        agree(op.attention, inputs(19, 23), None, bias[..., :23])
    agree(
        op.attention, inputs(19, 23), torch.tensor([True, False] * 9 + [True])[None, None, :, None]
    )


@pytest.mark.parametrize("causal", [False, True])
def test_softcap(causal):
    args = inputs(19, 23, key_heads=2)
    agree(op.attention, args, make_mask("batch", 19, 23), causal=causal, softcap=0.7)


def test_softcap_matters():
    args = inputs(9, 9)
    capped, _ = op.attention(*args, None, None, None, False, 0.3, 0.5)
    assert not torch.allclose(capped, op.attention(*args, None, None, None, False, 0.3, 0.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    args = inputs(57, 57, key_heads=2, dtype=dtype)
    agree(op.attention, args, make_mask("batch", 57, 57), causal=True, tolerance=tolerance)


def test_plain_backward_is_the_chain_rule():
    """The formula used where no fused kernel fits, on all its branches."""
    for key_heads, softcap, causal in itertools.product([4, 2], [0.0, 0.8], [False, True]):
        q, k, v = args = inputs(13, 17, key_heads=key_heads, value_size=6)
        mask, bias = make_mask("batch", 13, 17), torch.randn(1, 1, 13, 17, dtype=torch.float64)
        out, lse = reference.attention(q, k, v, None, mask, bias, causal, 0.3, softcap)
        finite = lse.masked_fill(lse == float("-inf"), 0)
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        want = torch.autograd.grad([out, finite], args, [grad_out, grad_lse])
        with torch.no_grad():
            got = reference.attention_backward(
                grad_out, grad_lse, q, k, v, out, lse, None, mask, bias, causal, 0.3, softcap
            )
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_no_queries_or_no_keys(queries, keys):
    args = inputs(queries, keys)
    out, lse = op.attention(*args, None, None, None, False, 1.0, 0.0)
    assert out.shape == (2, 4, queries, 16)
    assert not out.any()
    assert (lse == float("-inf")).all()
    for grad in torch.autograd.grad(out.sum(), args):
        assert not grad.any()


def strides(kind):
    q, k, v = (x.detach() for x in inputs(12, 12, key_heads=2))
    if kind == "contiguous":
        return [x.contiguous() for x in (q, k, v)]
    if kind == "sliced":
        return [torch.cat([x, x], -1)[..., ::2] for x in (q, k, v)]
    if kind == "expanded":
        return [q[:, :1].expand(-1, 4, -1, -1), k, v]
    return [q, k, v]


@pytest.mark.parametrize("kind", ["by_token", "contiguous", "sliced", "expanded"])
def test_strided_inputs_and_promised_strides(kind):
    args = [x.requires_grad_() for x in strides(kind)]
    agree(op.attention, args, make_mask("batch", 12, 12))
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in args]
        promised = op.attention(*fakes, None, None, None, True, 0.3, 0.0)
        grads = op.attention_backward(
            promised[0], None, *fakes, *promised, None, None, None, True, 0.3, 0.0
        )
    real = op.attention(*args, None, None, None, True, 0.3, 0.0)
    real_grads = op.attention_backward(
        real[0], None, *args, *real, None, None, None, True, 0.3, 0.0
    )
    for fake, value in zip([*promised, *grads], [*real, *real_grads], strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (value.shape, value.stride(), value.dtype)


def test_gradcheck():
    q, k, v = inputs(5, 7, heads=2, key_heads=1, size=4, value_size=3)
    mask = make_mask("shared", 5, 7)

    def call(q, k, v):
        out, lse = op.attention(q, k, v, None, mask, None, False, 0.5, 0.0)
        return out, lse.masked_fill(lse == float("-inf"), 0)

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("case", ["plain", "mask", "bias", "softcap"])
def test_opcheck(case):
    q, k, v = inputs(6, 9, key_heads=2, value_size=8)
    mask = make_mask("batch", 6, 9) if case == "mask" else None
    bias = torch.randn(1, 4, 6, 9, dtype=torch.float64) if case == "bias" else None
    torch.library.opcheck(
        op.attention,
        (q, k, v, None, mask, bias, case == "plain", 0.3, 0.9 if case == "softcap" else 0.0),
    )


def test_bias_that_requires_grad_is_refused():
    q, k, v = inputs(4, 4)
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="no gradient for bias"):
        op.attention(q, k, v, None, None, bias, False, 1.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, m: (q[0], k, v, m), "batch, heads, length, size"),
        (lambda q, k, v, m: (q, k[:1], v, m), "must agree"),
        (lambda q, k, v, m: (q[:, :3], k, v, m), "must divide"),
        (lambda q, k, v, m: (q, k, v, m.long()), "boolean"),
        (lambda q, k, v, m: (q, k, v, m[..., :3]), "no broadcast"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    q, k, v = inputs(6, 9, key_heads=2)
    q, k, v, mask = change(q, k, v, make_mask("batch", 6, 9))
    with pytest.raises(ValueError, match=message):
        op.attention(q, k, v, None, mask, None, False, 1.0, 0.0)


def test_unused_log_sum_exp_costs_nothing():
    """No gradient of zeros is made for it: the fused backward runs without the extra column."""
    seen = []
    q, k, v = inputs(4, 4)
    original = cpu.attention_backward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "attention_backward", lambda *a: (seen.append(a[1]), original(*a))[1])
        op.attention(q, k, v, None, None, None, True, 0.5, 0.0)[0].sum().backward()
    assert seen == [None]


def test_flops_are_torchs_own():
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = inputs(12, 20, size=8, value_size=6)
    with FlopCounterMode(display=False) as counter:
        out = op.attention(q, k, v, None, None, None, False, 0.5, 0.0)[0]
        forward = counter.get_total_flops()
        out.sum().backward()
    shapes = [x.shape for x in (q, k, v)]
    assert forward == sdpa_flop_count(*shapes)
    assert counter.get_total_flops() - forward == sdpa_backward_flop_count(out.shape, *shapes)
