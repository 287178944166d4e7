"""The benchmark of attention on a GPU, as far as a machine without one can run it."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks import attention_gpu


@pytest.fixture
def tiny(monkeypatch):
    for name, value in {"DEVICE": "cpu", "SIZE": 16, "EXACT_TOKENS": 192}.items():
        monkeypatch.setattr(attention_gpu, name, value)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["attention_gpu.py", "causal"])
    attention_gpu.main()
    assert capsys.readouterr().out == "attention_gpu: there is no GPU here; nothing measured\n"


@pytest.mark.parametrize("way", ["ours", "SDPA"])
@pytest.mark.parametrize("name", ["causal", "packed", "packed_mm"])
def test_errors_are_those_of_bfloat16(tiny, name, way):
    found = list(map(float, attention_gpu.errors(attention_gpu.WAYS[way], name, 4, 2)))
    assert len(found) == 4
    assert all(0 < error < 2e-2 for error in found)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("way", ["ours", "SDPA"])
@pytest.mark.parametrize("name", ["causal", "packed_mm"])
def test_speeds_count_the_pairs_that_the_mask_allows(tiny, monkeypatch, name, way):
    def do_bench(run, return_mode):
        run()
        return 1e-6  # milliseconds: a TFLOP/s is then 1000 FLOPs

    monkeypatch.setattr("triton.testing.do_bench", do_bench)
    rows = attention_gpu.rows_of(name, 192)
    assert rows.shape == (192, 2)
    pairs = int((rows[:, 1] - rows[:, 0]).sum())
    if name == "causal":
        assert pairs == 192 * 193 // 2
    speeds = attention_gpu.speed(attention_gpu.WAYS[way], name, 192, 4, 2)
    flops = pairs * 4 * 16
    assert speeds == (f"{4 * flops / 1e3:.0f}", f"{10 * flops / 1e3:.0f}")


def test_what_does_not_fit_into_memory_has_no_speed(tiny, monkeypatch):
    def full(rows, causal):
        def run(q, k, v):
            raise torch.cuda.OutOfMemoryError

        return run

    monkeypatch.setattr("triton.testing.do_bench", lambda run, return_mode: run())
    assert attention_gpu.speed(full, "causal", 64, 4, 2) == ("-", "-")
