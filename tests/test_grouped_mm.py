"""Grouped products against a loop over runs, in every dtype and without host reads on devices."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.kernels import grouped_mm as grouped
from tests.families import FAMILIES
from tests.test_families import doubled

OFFSETS = [[3, 7, 12], [0, 0, 12], [5, 5, 9], [0, 0, 0], [12, 12, 12]]


def operands(ends, dtype=torch.float64):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(12, 5, generator=g, dtype=dtype, requires_grad=True)
    w = torch.randn(3, 5, 4, generator=g, dtype=dtype, requires_grad=True)
    return x, w, torch.tensor(ends, dtype=torch.int32)


def definition(x, w, ends):
    """Row t belongs to the first run that ends behind it."""
    rows = []
    for t in range(x.shape[0]):
        owner = next((e for e, end in enumerate(ends.tolist()) if t < end), None)
        rows.append(x.new_zeros(w.shape[2]) if owner is None else x[t] @ w[owner])
    return torch.stack(rows)


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
@pytest.mark.parametrize("call", [grouped.grouped_mm, grouped.multiply_masked])
def test_forward_and_gradients(ends, call):
    x, w, offsets = operands(ends)
    out, want = call(x, w, offsets), definition(x, w, offsets)
    torch.testing.assert_close(out, want, rtol=1e-13, atol=1e-13)
    if want.requires_grad:
        grad = torch.randn_like(out)
        for got, expected in zip(
            torch.autograd.grad(out, (x, w), grad),
            torch.autograd.grad(want, (x, w), grad, materialize_grads=True),
            strict=True,
        ):
            torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
def test_outer_products(ends):
    x, _, offsets = operands(ends)
    y = torch.randn(12, 4, dtype=torch.float64)
    starts = [0, *ends]
    want = torch.stack([x[a:b].T @ y[a:b] for a, b in zip(starts, ends, strict=False)])
    for call in (grouped.grouped_outer, grouped.outer_masked):
        torch.testing.assert_close(call(x, y, offsets), want, rtol=1e-13, atol=1e-13)


def test_frozen_operands_get_no_gradient():
    """Neither product runs for an operand that needs none."""
    x, w, offsets = operands([3, 7, 12])
    for frozen in (0, 1):
        args = [t.detach().requires_grad_(i != frozen) for i, t in enumerate((x, w))]
        names = []

        class Calls(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, names=names):
                names.append(str(func.overloadpacket))
                return func(*args, **(kwargs or {}))

        with Calls():
            grouped.grouped_mm(*args, offsets).sum().backward()
        products = [name for name in names if "grouped" in name]
        assert products == ["mllm.grouped_mm", ["mllm.grouped_outer", "mllm.grouped_mm"][frozen]]
        assert args[frozen].grad is None


def test_device_paths_read_nothing():
    """Fake tensors have no values to read."""
    with FakeTensorMode():
        x, w, offsets = torch.empty(12, 5), torch.empty(3, 5, 4), torch.empty(3, dtype=torch.int32)
        assert grouped.multiply_masked(x, w, offsets).shape == (12, 4)
        assert grouped.outer_masked(x, x, offsets).shape == (3, 5, 5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    x, w, offsets = operands([3, 7, 12], dtype)
    torch.library.opcheck(grouped.grouped_mm, (x, w, offsets))
    torch.library.opcheck(grouped.grouped_outer, (x.detach(), x.detach(), offsets))


@pytest.mark.parametrize("start", [0, 2, 3])
def test_rows_before_the_start_give_zeros(start):
    """Both paths, forward and in every gradient: as if those rows were zero."""
    x, w, offsets = operands([3, 7, 10])
    first = torch.tensor([start], dtype=offsets.dtype)
    kept = x * (torch.arange(12) >= start).unsqueeze(1)
    want = definition(kept, w, offsets)
    wanted = torch.autograd.grad(want.square().sum(), (x, w))
    got = grouped.grouped_mm(x, w, offsets, first)
    grads = torch.autograd.grad(got.square().sum(), (x, w))
    for a, b in zip([got, *grads], [want, *wanted], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    masked = grouped.multiply_masked(x, w, offsets, first)
    torch.testing.assert_close(masked, want, rtol=1e-12, atol=1e-12)
    outer = grouped.outer_masked(x, 2 * want, offsets, first)
    torch.testing.assert_close(outer, wanted[1], rtol=1e-12, atol=1e-12)


def test_flops_are_those_of_one_matrix_per_row():
    x, w, offsets = operands([3, 7, 12])
    with FlopCounterMode(display=False) as counter:
        grouped.grouped_mm(x, w, offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 12 * 5 * 4


@pytest.mark.parametrize("ends", [[4, 8, 12], [0, 8, 12]], ids=str)
def test_torchs_operator_on_ours(ends):
    """Forward and backward of aten's own, in float32 and in a dtype that it does not have."""
    offsets = torch.tensor(ends, dtype=torch.int32)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
        x = torch.randn(12, 8, dtype=dtype, requires_grad=True)
        w = torch.randn(3, 8, 16, dtype=dtype, requires_grad=True)
        want = definition(x, w, offsets)
        wanted = torch.autograd.grad(want.square().sum(), (x, w))
        with grouped.GroupedProducts():
            got = torch._grouped_mm(x, w, offs=offsets)
            grads = torch.autograd.grad(got.square().sum(), (x, w))
        for a, b in zip([got, *grads], [want, *wanted], strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_other_forms():
    x, w, _ = operands([3, 7, 12])
    batch = w.transpose(1, 2)
    assert torch.equal(grouped.from_aten(w, batch), torch.bmm(w, batch))
    with pytest.raises(ValueError, match="expected"):
        grouped.from_aten(x, w)
    with pytest.raises(ValueError, match="bias"):
        grouped.from_aten(x, w, None, x)


def test_experts_in_float64_equal_the_loop():
    """A mixture model runs in float64 as it is, and agrees with its own loop over experts."""
    workload = FAMILIES["qwen3_vl_moe"]()
    model, batch = workload.model.double(), doubled(workload.collate(list(workload.samples)[:3]))
    with pytest.raises(RuntimeError), torch.no_grad():
        model(**batch)
    with grouped.GroupedProducts():
        model(**batch).loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    model.set_experts_implementation("eager")
    model(**batch).loss.backward()
    for got, parameter in zip(grads, model.parameters(), strict=True):
        scale = parameter.grad.abs().max()
        assert (got - parameter.grad).abs().max() <= 1e-6 * scale
