"""Operators on their part of a vocabulary, of classes or experts, against the plain ones."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import mllm_compile.kernels.collective.divided  # noqa: F401
from mllm_compile.compiler.layout import P, S, V
from mllm_compile.compiler.split import Split
from mllm_compile.kernels.collective.members import Member, members
from mllm_compile.kernels.grouped_mm import grouped_mm
from tests.layout_forms import Form
from tests.thread_ranks import run_ranks

aten, ours = torch.ops.aten, torch.ops.mllm
RANKS = (1, 2, 3, 4)
RANDOM = torch.Generator().manual_seed(0)


def even(dim, ranks):
    return Form(S(dim, 1, ranks), Split.contiguous(ranks, ranks))


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=RANDOM)


def compare(plain, local, operands, have, want, ranks):
    """``local(places of the axis' parts)`` against ``plain``, forward and adjoint.

    ``operands`` are dense; ``have`` and ``want`` are forms of floating operands and results (None
    for operands without gradient).
    """
    dense = [x.clone().requires_grad_(f is not None) for x, f in zip(operands, have, strict=True)]
    outs = plain(*dense)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    live = [k for k, out in enumerate(outs) if out.requires_grad]
    cotangents = {k: normal(*outs[k].shape) for k in live}
    leaves = [x for x in dense if x.requires_grad]
    expected = torch.autograd.grad([outs[k] for k in live], leaves, list(cotangents.values()))
    parts = [
        [x] * ranks if f is None else f.parts(x, ranks) for x, f in zip(operands, have, strict=True)
    ]
    seeds = {k: want[k].dual.parts(cotangents[k], ranks) for k in live}

    def body(places):
        r = places["tensor"]
        mine = [
            p[r].clone().requires_grad_(f is not None) for p, f in zip(parts, have, strict=True)
        ]
        got = local(*mine)
        got = list(got) if isinstance(got, tuple) else [got]
        wanted = [x for x in mine if x.requires_grad]
        grads = torch.autograd.grad([got[k] for k in live], wanted, [seeds[k][r] for k in live])
        return [x.detach() for x in got], grads

    results, _ = run_ranks({"tensor": ranks}, body)
    for k, out in enumerate(outs):
        want[k].check([got[k] for got, _ in results], out.detach())
    forms = [f for f in have if f is not None]
    for i, (form, grad) in enumerate(zip(forms, expected, strict=True)):
        form.dual.check([grads[i] for _, grads in results], grad)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("padding", [-1, 0, 7])
def test_embedding(ranks, padding):
    indices = torch.tensor([[0, 7, 11], [4, 7, 7]])
    compare(
        lambda w, i: aten.embedding(w, i, padding),
        lambda w, i: ours.divided_embedding(w, i, padding, False, False, "tensor"),
        (normal(12, 5), indices),
        (even(0, ranks), None),
        (Form(P),),
        ranks,
    )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(ranks, name, dim):
    divided = even(dim % 3, ranks)
    x = 30 * normal(12, 12, 12)
    compare(
        lambda x: getattr(aten, f"_{name}")(x, dim, False),
        lambda x: getattr(ours, f"divided_{name}")(x, dim, False, "tensor"),
        (x,),
        (divided,),
        (divided,),
        ranks,
    )


def test_softmax_of_masked_blocks():
    """A rank whose part is hidden altogether takes nothing from the others."""
    x = normal(3, 4)
    x[:, 2:] = float("-inf")
    compare(
        lambda x: aten._softmax(x, 1, False),
        lambda x: ours.divided_softmax(x, 1, False, "tensor"),
        (x,),
        (even(1, 2),),
        (even(1, 2),),
        2,
    )


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_keeps_or_widens_the_dtype(name):
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    want = getattr(torch, name)(x.double(), 1)

    def body(places):
        mine = x.chunk(2, 1)[places["tensor"]]
        operator = getattr(ours, f"divided_{name}")
        return operator(mine, 1, False, "tensor"), operator(mine, 1, True, "tensor")

    results, _ = run_ranks({"tensor": 2}, body)
    narrow, wide = (torch.cat(parts, 1) for parts in zip(*results, strict=True))
    assert (narrow.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(narrow.double(), want, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(wide.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_nll_loss(ranks, reduction, ignored):
    target = torch.tensor([0, 3, 11, ignored, 5, 8])
    compare(
        lambda x, t: aten.nll_loss_forward(x, t, None, reduction, ignored),
        lambda x, t: ours.divided_nll_loss(x, t, None, reduction, ignored, "tensor"),
        (normal(6, 12), target),
        (even(1, ranks), None),
        (Form(P), Form(P)),
        ranks,
    )


def test_nll_loss_of_one_row():
    compare(
        lambda x, t: aten.nll_loss_forward(x, t, None, 2, -100),
        lambda x, t: ours.divided_nll_loss(x, t, None, 2, -100, "tensor"),
        (normal(12), torch.tensor(9)),
        (even(0, 3), None),
        (Form(P), Form(P)),
        3,
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_grouped_mm(ranks):
    """Runs of all lengths, none among them, and rows behind the last."""
    ends = [0, 3, 3, 4, 9, 9, 9, 10, 12, 12, 13, 14]
    compare(
        grouped_mm,
        lambda x, w, o: ours.divided_grouped_mm(x, w, o, "tensor"),
        (normal(16, 3), normal(12, 3, 4), torch.tensor(ends, dtype=torch.int32)),
        (Form(V), even(0, ranks), None),
        (Form(P),),
        ranks,
    )


def test_what_has_no_divided_form_is_refused():
    x, t = normal(2, 3), torch.tensor([0, 1])
    with members({"tensor": Member(0, 2)}):
        with pytest.raises(ValueError, match="class weights"):
            ours.divided_nll_loss(x, t, normal(3), 2, -100, "tensor")
        with pytest.raises(ValueError, match="sparse"):
            ours.divided_embedding(x, t, -1, False, True, "tensor")


def test_composites_dissolve_when_traced():
    """No operator without a backward of its own remains in a traced program."""

    def body(w, i):
        return ours.divided_embedding(w, i, -1, False, False, "tensor")

    with members({"tensor": Member(1, 2)}):
        traced = make_fx(body, tracing_mode="fake")(normal(3, 2), torch.tensor([4]))
    targets = {str(node.target) for node in traced.graph.nodes if node.op == "call_function"}
    assert "aten.embedding.default" in targets
    assert not any("mllm" in target for target in targets)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_registration(name):
    def body(places):
        x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
        operator = getattr(ours, f"divided_{name}").default
        torch.library.opcheck(operator, (x, 1, False, "tensor"))

    run_ranks({"tensor": 1}, body)
