"""Data lanes: what they may do to buffers, and what must be global."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.verify import verify
from mllm_compile.workload import Workload


class Counting(nn.Module):
    """Keeps something in a buffer that the loss does not read."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.kept = kept
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        more = {"calls": torch.ones(()), "sum": x.sum()}[self.kept]
        self.seen = self.seen + more.to(self.seen.dtype)
        return functional.mse_loss(self.layer(x), y)


def workload(kept: str) -> Workload:
    torch.manual_seed(0)
    samples = [(torch.randn(4), torch.randn(3)) for _ in range(6)]
    return Workload(
        Counting(kept),
        samples,
        lambda part: {
            "x": torch.stack([x for x, _ in part]),
            "y": torch.stack([y for _, y in part]),
        },
    )


def request(**sizes: int) -> Request:
    spec = ModuleSpec(("",), tuple(range(2)), Parallel(**sizes))
    return Request((spec,), microbatches=2, microbatch_size=3, dtype="float64")


def test_a_buffer_that_all_lanes_update_alike_is_kept() -> None:
    assert verify(request(data=2), workload("calls"), in_process=True).passed


def test_a_buffer_that_lanes_update_differently_is_refused() -> None:
    with pytest.raises(RunError, match="buffer seen: expected the same new value"):
        verify(request(data=2), workload("sum"), in_process=True)
