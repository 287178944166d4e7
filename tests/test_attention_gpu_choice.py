"""Which calls the Triton kernels take, and which configuration a launch takes; without a GPU."""

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mllm_compile.kernels.attention.gpu import entry, table
from mllm_compile.kernels.attention.gpu.call import Call
from mllm_compile.kernels.attention.gpu.operands import readable, split
from mllm_compile.kernels.attention.gpu.spec import Score
from mllm_compile.kernels.attention.shared_runs import visible

with_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason='triton is not installed (pip install "triton>=3.6")'
)


def on_gpu(size=64, value_size=64, dtype=torch.bfloat16, length=8):
    with FakeTensorMode():
        q = torch.empty(1, 4, length, size, dtype=dtype, device="cuda")
        k = torch.empty(1, 2, length, size, dtype=dtype, device="cuda")
        return q, k, torch.empty(1, 2, length, value_size, dtype=dtype, device="cuda")


@with_triton
def test_what_the_kernels_take():
    assert entry.computes(*on_gpu(), None, None, 0.1)
    assert entry.computes(*on_gpu(256, 5), None, None, 0.1)
    assert entry.computes(*on_gpu(128, 40, torch.float32), None, None, 0.1)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    assert entry.computes(*on_gpu(64, 40, torch.float32), mask, None, 0.1)
    assert not entry.computes(*on_gpu(65, 40, torch.float32), mask, None, 0.1)
    assert not entry.computes(*on_gpu(40, 65, torch.float32), None, mask.float(), 0.1)
    assert entry.computes(*on_gpu(64, 40, torch.float32), None, None, 0.1, 2.0)
    assert not entry.computes(*on_gpu(65, 40, torch.float32), None, None, 0.1, 2.0)
    assert entry.computes(*on_gpu(256), mask, mask.float(), 0.1)
    assert not entry.computes(*on_gpu(257), None, None, 0.1)
    assert not entry.computes(*on_gpu(129, dtype=torch.float32), None, None, 0.1)
    assert not entry.computes(*on_gpu(dtype=torch.float64), None, None, 0.1)
    assert not entry.computes(*on_gpu(), None, None, -0.1)
    assert not entry.computes(*on_gpu(length=0), None, None, 0.1)


@with_triton
def test_a_dense_mask_of_2_to_31_elements_a_head_is_left_to_the_definition():
    reaches = torch.empty(1, 1, 1 << 15, 1 << 16, dtype=torch.bool, device="meta")
    assert entry.computes(*on_gpu(), reaches, None, 0.1)
    too_far = torch.empty(1, 1, (1 << 15) + 1, 1 << 16, dtype=torch.bool, device="meta")
    assert not entry.computes(*on_gpu(), too_far, None, 0.1)
    assert not entry.computes(*on_gpu(), None, too_far, 0.1)
    q, k, v = (torch.empty(1, 1, 1 << 16, 64, device="meta", dtype=torch.float16),) * 3
    rows, columns = (
        torch.empty(1, 1, *shape, device="meta") for shape in ((q.shape[2], 1), (1, k.shape[2]))
    )
    assert entry.computes(q, k, v, rows, None, 0.1)
    assert not entry.computes(q, k, v, rows, columns, 0.1)  # which are added to one


def test_a_gpu_without_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(entry, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install \"triton>=3\.6\""):
        entry.attention(*on_gpu(), scale=0.1)


def test_tensors_that_descriptors_read():
    x = torch.zeros(2, 9, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert readable(x) is x
    between = torch.zeros(2, 4, 9, 65, dtype=torch.bfloat16)[..., 1:]
    rows_of_10_bytes = torch.zeros(2, 4, 9, 5, dtype=torch.bfloat16)
    repeated = x[:, :1].expand(-1, 4, -1, -1)
    strided = x[..., ::2]
    for other in (between, rows_of_10_bytes, repeated, strided):
        copy = readable(other)
        assert copy is not other
        assert torch.equal(copy, other)
        assert readable(copy) is copy


def test_float32_in_three_parts_of_bfloat16():
    generator = torch.Generator().manual_seed(0)  # the third part of 1e-33 would be subnormal
    x = torch.randn(2, 3, 50, 5, generator=generator) * torch.logspace(-25, 30, 5)
    parts = split(x)
    assert (parts.dtype, parts.shape) == (torch.bfloat16, (2, 9, 50, 5))
    assert readable(parts) is parts
    first, second, third = parts.double().chunk(3, 1)
    assert torch.equal(first + second + third, x.double())
    assert (second.abs() <= first.abs() / 256).all()


def a_launch(target="sm80"):
    from mllm_compile.kernels.attention.gpu.launch import Launch

    q = torch.zeros(1, 2, 100, 64)
    call = Call(q, q, q, visible(None, 100, 100, True, q.device), None, None, Score(0.1, 0), target)
    return Launch("forward", None, call, (q, q, q), (q, q), ())


class Done:
    """A kernel as it was compiled, as Triton tells of it."""

    def __init__(self, n_spills):
        self.n_spills = n_spills


@pytest.fixture
def device(monkeypatch):
    """(spills, milliseconds) by configuration, of a device that is not there; what was measured."""
    from mllm_compile.kernels.attention.gpu import launch

    told, measured = {}, []

    def launched(self, config):
        spills, _ = told[config]
        if spills is None:
            raise launch.triton.runtime.errors.OutOfResources(240000, 232448, "shared memory")
        yield Done(0)
        yield Done(spills)

    def time(self, config):
        measured.append(config)
        return told[config][1]

    monkeypatch.setattr(launch.Launch, "with_config", launched)
    monkeypatch.setattr(launch.Launch, "_time", time)
    monkeypatch.setattr(launch, "_FASTEST", {})
    return told, measured


SMALL, MIDDLE, LARGE = table.Config(16, 64), table.Config(32, 64), table.Config(64, 64)


@with_triton
def test_the_fastest_configuration_is_measured_once(device):
    told, measured = device
    told.update({LARGE: (0, 2.0), MIDDLE: (0, 1.0), SMALL: (0, 3.0)})
    assert [a_launch()._fastest(tuple(told)) for _ in range(2)] == [MIDDLE, MIDDLE]
    assert measured == list(told)
    assert a_launch(table.INTERPRETER)._fastest(tuple(told)) == LARGE
    assert len(measured) == len(told)


@with_triton
def test_configurations_that_spill_or_exceed_memory_are_not_measured(device):
    told, measured = device
    told.update({LARGE: (None, 1.0), MIDDLE: (4, 1.0), SMALL: (0, 3.0)})
    assert a_launch()._fastest(tuple(told)) == SMALL
    assert measured == []  # it alone is left


@with_triton
def test_a_site_without_a_sound_configuration_is_refused(device):
    told, _ = device
    told.update({LARGE: (None, 1.0), MIDDLE: (4, 1.0)})
    with pytest.raises(RuntimeError) as refused:
        a_launch()._fastest(tuple(told))
    for part in ("forward", "float32 64x64 i1", "sm80", "shared memory", "32x64w4s2: 4 spilled"):
        assert part in str(refused.value)
    told[MIDDLE] = 0, 1.0  # and it is tried again
    assert a_launch()._fastest(tuple(told)) == MIDDLE


class Device:
    """A driver of a GPU that is not there: kernels are compiled for it and not run."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiled:
    """A kernel whose launches only compile, as a launch would."""

    def __init__(self, kernel, done):
        self.kernel, self.done = kernel, done

    def __getitem__(self, grid):
        def compile_it(*args, **options):
            self.kernel.warmup(*args, grid=grid, **options)
            self.done.append(self.kernel.__name__)

        return compile_it


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that were launched, and so compiled."""
    from triton.runtime import driver

    from mllm_compile.kernels.attention.gpu import launch

    done = []
    monkeypatch.setattr(driver, "_active", Device())
    for module, names in ((launch, ("forward",)), (launch.kernels, ("delta", "dq", "dkv"))):
        for name in names:
            kernel = Compiled(getattr(module, f"{name}_kernel"), done)
            monkeypatch.setattr(module, f"{name}_kernel", kernel)
    small = (table.Config(64, 64, 4, 2, True),)
    monkeypatch.setattr(table, "INTERPRETED", dict.fromkeys(("forward", "dq", "dkv"), small))
    return done


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
@pytest.mark.parametrize("lengths", [(100, 90), (1, 1)])
@pytest.mark.parametrize("kinds", ["none", "bias", "all"])
def test_launches_compile(compiled, heads, lengths, kinds):
    """Arguments as a launch has them: strides and sizes of 1 become constants, some are None."""
    shapes = ((heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1]))
    q, k, v = (
        torch.zeros(2, length, count, 64, dtype=torch.bfloat16).transpose(1, 2)
        for count, length in shapes
    )
    mask = torch.ones(1, 1, *lengths, dtype=torch.bool) if kinds == "all" else None
    bias = None if kinds == "none" else torch.zeros(1, 1, lengths[0], 1)
    options = (None, mask, bias, True, 0.1, 2.0 if kinds == "all" else 0.0)
    out, lse = entry.attention(q, k, v, *options)
    grad_lse = None if kinds == "bias" else torch.zeros_like(lse)
    entry.attention_backward(torch.zeros_like(out), grad_lse, q, k, v, out, lse, *options)
    assert compiled == ["forward_kernel", "delta_kernel", "dq_kernel", "dkv_kernel"]
