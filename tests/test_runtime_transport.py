"""What crosses a channel, over threads and over processes."""

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RunError
from mllm_compile.runtime.launch import launch
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from tests.three_stages import HELD_BY, batches, model, plain

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)
SHAPES = ((3, 2), (), (0, 4), (1,), (257, 129))


def samples() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 2, shape, generator=generator).to(dtype)
        for dtype in DTYPES
        for shape in SHAPES
    ]


def equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    same = one.dtype == two.dtype and one.shape == two.shape
    return same and one.tolist() == two.tolist()


def test_every_dtype_and_shape_between_processes() -> None:
    results = launch("tests.rank_targets:transfers", samples(), 2)
    for rank in range(2):
        *got, first, second = results[rank]
        assert all(map(equal, got, samples()))
        assert (first.item(), second.item()) == (0.0, 1.0)


def test_every_dtype_and_shape_between_threads() -> None:
    def rank_main(transport: LocalTransport) -> list[torch.Tensor]:
        if transport.rank == 0:
            handles = [transport.send(tensor, 1) for tensor in samples()]
            got = []
        else:
            got = [torch.empty_like(tensor) for tensor in samples()]
            handles = [transport.receive(buffer, 0) for buffer in got]
        for handle in handles:
            handle.wait()
        return got

    assert all(map(equal, run_threads(2, rank_main)[1], samples()))


@pytest.mark.parametrize("rows", [[3, 1, 4], [2, None, 0, 3]])
def test_processes_give_the_gradients_of_one(rows: list[int | None]) -> None:
    results = launch("tests.rank_targets:pipeline", rows, 3)
    parameters, work = model(), batches(rows)
    losses = plain(parameters, work)
    for microbatch, loss in enumerate(losses):
        torch.testing.assert_close(results[2][0][microbatch], loss, rtol=1e-12, atol=0)
    norm = nn.utils.get_total_norm([value.grad for value in parameters.values()])
    for rank, names in HELD_BY.items():
        torch.testing.assert_close(results[rank][3], norm, rtol=1e-12, atol=0)
        for name in names:
            expected = parameters[name].grad
            torch.testing.assert_close(results[rank][1][name], expected, rtol=1e-12, atol=1e-13)


def test_wrong_shape_is_an_error_not_a_hang() -> None:
    def rank_main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.send(torch.zeros(3), 1).wait()
        else:
            transport.receive(torch.zeros(4), 0).wait()

    with pytest.raises(RunError, match=r"transfer from rank 0 to 1: expected .*\[4\].*got .*\[3\]"):
        run_threads(2, rank_main)


def test_a_failing_thread_ends_the_others() -> None:
    def rank_main(transport: LocalTransport) -> None:
        if transport.rank == 0:
            raise ValueError("broken")
        transport.receive(torch.zeros(4), 0).wait()

    with pytest.raises(ValueError, match="broken"):
        run_threads(3, rank_main)
