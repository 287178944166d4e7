"""A program means the same whatever torch's default dtype is when it runs."""

import pytest
import torch
from torch import nn

from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.programs import prepare, run

MAKERS = {
    "subtract": lambda ids: 1.0 - ids,
    "divide": lambda ids: ids / (ids + 3),
    "scale": lambda ids: ids * 0.1,
    "root": lambda ids: ids.sqrt(),
    "power": lambda ids: torch.pow(1.1, ids),
    "choose": lambda ids: torch.where(ids > 2, 0.1, 0.7),
    "choose_scalar": lambda ids: torch.where(ids > 2, 0.1, ids),
    "choose_other": lambda ids: torch.where(ids > 2, ids, 0.3),
    "full": lambda ids: torch.full(ids.shape, 0.1, device=ids.device),
    "zeros": lambda ids: torch.zeros(ids.shape, device=ids.device) + 0.1,
    "steps": lambda ids: torch.linspace(0.1, 0.7, ids.shape[1]),
    "range": lambda ids: torch.arange(0.1, ids.shape[1], 1.0),
    "written": lambda ids: torch.ones(ids.shape).mul_(0.1),
    "lowest": lambda ids: (1.0 - ids).masked_fill(ids > 2, torch.finfo(torch.float32).min).tanh(),
}


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, ids):
        return (self.make(ids) * self.weight).square().mean()


@pytest.mark.parametrize("name", MAKERS)
def test_lifted_program_runs_under_another_default(name):
    torch.manual_seed(0)
    model = Net(MAKERS[name]).double()
    batch = {"ids": torch.tensor([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]])}
    program = capture(model, batch, lift=torch.float64)
    with lifted(torch.float64):
        want = model(**batch)
    prepared = prepare(program, batch, {})
    for default in (torch.float32, torch.float64, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            (got,) = run(program, dict(model.named_parameters()), prepared)
        finally:
            torch.set_default_dtype(torch.float32)
        assert got.dtype is torch.float64
        assert got.item() == pytest.approx(want.item(), rel=1e-14)


def test_floats_that_follow_their_operands_are_left_alone():
    model = Net(lambda ids: ids.float().add(0.1).div(3.0)).double()
    program = capture(model, {"ids": torch.zeros(1, 5, dtype=torch.long)})
    targets = [str(node.target) for node in program.main.graph.nodes]
    assert sum("_to_copy" in target for target in targets) == 1
