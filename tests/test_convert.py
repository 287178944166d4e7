"""Every conversion and its adjoint, against indexing of a dense tensor."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.compiler.layout import P, R, S, V
from mllm_compile.compiler.split import Split
from mllm_compile.kernels.collective.convert import convert
from mllm_compile.kernels.collective.members import Member, member, members
from tests.layout_forms import Form
from tests.thread_ranks import run_ranks

SHAPE = (6, 12, 5)


def forms(ranks):
    """Whole layouts, and divided ones: both dims, factors of a dim, all kinds of splits."""
    uneven = Split(((*([(0, 1)] if ranks > 1 else [(0, 6)]),), *_tail(1, 6, ranks)))
    return {
        "R": Form(R),
        "V": Form(V),
        "P": Form(P),
        "rows": Form(S(0, 1, 6), Split.contiguous(6, ranks)),
        "skewed": Form(S(0, 1, 6), uneven),
        "tokens": Form(S(1, 1, 12), Split.zigzag(12, ranks)),
        "factor": Form(S(1, 3, 4), Split.zigzag(4, ranks)),
        "units": Form(S(1, 2, 2), Split.contiguous(2, ranks)),
        "one": Form(S(2, 1, 1), Split.contiguous(1, ranks)),
    }


def _tail(start, stop, ranks):
    """All the rest on the last rank: those between hold nothing."""
    return [() for _ in range(ranks - 2)] + ([((start, stop),)] if ranks > 1 else [])


NAMES = tuple(forms(2))


def arguments(have, want, axis="tensor", shape=SHAPE):
    units = [
        form.unit(shape[form.layout.dim]) if form.layout.divided else 0 for form in (have, want)
    ]
    (a, split_a), (b, split_b) = have.arguments, want.arguments
    return a, b, axis, split_a, split_b, *units


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("first", "second"), itertools.product(NAMES, NAMES))
def test_conversion_and_adjoint(first, second, ranks):
    have, want = forms(ranks)[first], forms(ranks)[second]
    torch.manual_seed(0)
    dense, cotangent = torch.randn(2, *SHAPE, dtype=torch.float64)
    values, gradients = have.parts(dense, ranks), want.dual.parts(cotangent, ranks)

    def body(places):
        x = values[places["tensor"]].requires_grad_()
        y = convert(x, *arguments(have, want))
        y.backward(gradients[places["tensor"]])
        with FakeTensorMode(allow_non_fake_inputs=True):
            promised = convert(torch.empty(x.shape, dtype=x.dtype), *arguments(have, want))
        assert (promised.shape, promised.stride()) == (y.shape, y.stride())
        assert y.is_contiguous()
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not y.numel()
        return y.detach(), x.grad

    results, logs = run_ranks({"tensor": ranks}, body)
    want.check([y for y, _ in results], dense)
    have.dual.check([grad for _, grad in results], cotangent)
    assert len({str([what for _, what, _ in log]) for log in logs}) == 1


COLLECTIVES = {
    ("R", "V"): ([], ["all_reduce sum"]),
    ("V", "R"): ([], []),
    ("V", "rows"): ([], []),
    ("R", "rows"): ([], ["all_gather"]),
    ("rows", "V"): (["all_gather"], ["reduce_scatter"]),
    ("P", "R"): (["all_reduce sum"], []),
    ("P", "rows"): (["reduce_scatter"], ["all_gather"]),
    ("rows", "tokens"): (["all_to_all"], ["all_to_all"]),
}


@pytest.mark.parametrize("pair", COLLECTIVES, ids=str)
def test_collectives_are_those_of_the_table(pair):
    have, want = (forms(2)[name] for name in pair)
    dense = torch.randn(SHAPE, dtype=torch.float64)
    values, gradients = have.parts(dense, 2), want.dual.parts(dense, 2)

    def body(places):
        x = values[places["tensor"]].requires_grad_()
        convert(x, *arguments(have, want)).backward(gradients[places["tensor"]])

    _, logs = run_ranks({"tensor": 2}, body)
    forward, backward = COLLECTIVES[pair]
    assert [what for _, what, _ in logs[0]] == forward + backward


@pytest.mark.parametrize("layout", ["rows", "tokens"])
def test_no_elements_at_all(layout):
    """A factor without elements: every rank holds nothing, and nothing is lost."""
    shape = (0, 3) if layout == "rows" else (3, 0)
    have = Form(S(0 if layout == "rows" else 1, 1, 0), Split.contiguous(0, 2))

    def body(places):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        y = convert(x, str(have.layout), "V", "tensor", str(have.split), "", 1, 0)
        y.sum().backward()
        return tuple(y.shape), tuple(x.grad.shape)

    assert run_ranks({"tensor": 2}, body)[0] == [(shape, shape)] * 2


def test_empty_unit_inside_an_empty_part():
    """An inner axis that divides a part without elements: its unit is 0."""

    def body(places):
        x = torch.zeros(0, 3, dtype=torch.float64)
        return tuple(convert(x, "R", "S(0,1,2)", "tensor", "", "0:1|1:2", 0, 0).shape)

    assert run_ranks({"tensor": 2}, body)[0] == [(0, 3)] * 2


def test_wrong_lengths_are_refused_while_tracing():
    with members({"tensor": Member(0, 2)}), FakeTensorMode():
        with pytest.raises(ValueError, match="expects 6 elements in dim 0"):
            convert(torch.empty(5, 2), "R", "S(0,1,6)", "tensor", "", "0:3|3:6", 0, 1)
        with pytest.raises(ValueError, match="expects 3 elements in dim 0"):
            convert(torch.empty(6, 2), "S(0,1,6)", "R", "tensor", "0:3|3:6", "", 1, 0)
        assert convert(torch.empty(6, 2), "R", "V", "tensor").shape == (6, 2)


def test_an_axis_without_members_and_values_without_a_group_are_refused():
    with pytest.raises(RuntimeError, match="'tensor'"):
        member("tensor")
    with members({"tensor": Member(0, 2)}):
        with pytest.raises(RuntimeError, match="no group"):
            convert(torch.ones(2), "P", "R", "tensor")
        with members({}), pytest.raises(RuntimeError, match="'tensor'"):
            member("tensor")
        assert member("tensor").size == 2


def test_registration():
    with members({"tensor": Member(0, 2)}):
        x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
        halves = ("tensor", "", "0:3|3:6", 0, 1)
        torch.library.opcheck(convert, (x, "V", "S(0,1,6)", *halves))
        with FlopCounterMode(display=False) as counter:
            convert(x, "V", "S(0,1,6)", *halves)
    assert counter.get_total_flops() == 0
