"""Which calls the Triton kernels take, and which configuration a launch takes; without a GPU."""

from importlib.util import find_spec

import pytest
import torch
from torch._subclasses import FakeTensorMode

from mllm_compile.kernels.attention.gpu import entry, table
from mllm_compile.kernels.attention.gpu.call import Call, streams
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


def test_a_gpu_without_triton_is_an_error(monkeypatch):
    monkeypatch.setattr(entry, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install \"triton>=3\.6\""):
        entry.attention(*on_gpu(), scale=0.1)


def a_call(dtype=torch.float32, size=64):
    q = torch.zeros(1, 2, 100, size, dtype=dtype)
    seen = visible(None, 100, 100, True, q.device)
    return Call(q, q, q, seen, None, None, Score(0.1, 0.0))


def test_tensors_that_descriptors_read():
    x = torch.zeros(2, 9, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert streams(x)
    assert not streams(x[..., 1:])  # starts between
    assert not streams(torch.zeros(2, 4, 9, 5, dtype=torch.bfloat16))  # rows of 10 bytes
    assert not streams(x[:, :1].expand(-1, 4, -1, -1))  # a stride of 0


@with_triton
def test_the_fastest_configuration_is_measured_once(monkeypatch):
    from mllm_compile.kernels.attention.gpu.launch import _FASTEST, Launch

    times = {table.Config(64, 64): 2.0, table.Config(32, 64): 1.0, table.Config(16, 64): 3.0}
    measured = []

    def time(self, config):
        measured.append(config)
        return times[config]

    monkeypatch.setattr(Launch, "_time", time)
    call = a_call()
    launch = Launch("forward", None, call, (call.k, call.v), ())
    before = dict(_FASTEST)
    assert launch._fastest("sm80", tuple(times)) == table.Config(32, 64)
    assert launch._fastest("sm80", tuple(times)) == table.Config(32, 64)
    assert measured == list(times)
    assert launch._fastest(table.INTERPRETER, tuple(times)) == table.Config(64, 64)
    assert len(measured) == len(times)
    _FASTEST.clear()
    _FASTEST.update(before)


@with_triton
def test_descriptors_are_used_where_they_can_read(monkeypatch):
    from mllm_compile.kernels.attention.gpu import launch as module

    taken = []
    monkeypatch.setattr(module.Launch, "with_config", lambda self, config: taken.append(config))
    call = a_call()
    odd = torch.zeros(1, 2, 100, 5)
    module.Launch("forward", None, call, (call.k, call.v), ()).run()
    module.Launch("forward", None, call, (call.k, odd), ()).run()
    assert [config.descriptors for config in taken] == [True, False]


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
    for module, names in ((launch, ("forward",)), (launch.backward, ("delta", "dq", "dkv"))):
        for name in names:
            kernel = Compiled(getattr(module, f"{name}_kernel"), done)
            monkeypatch.setattr(module, f"{name}_kernel", kernel)
    small = table.Config(64, 64, 4, 2, True), table.Config(64, 64, 4, 2)
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
