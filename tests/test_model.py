"""Making a user's model ready keeps what a dtype must not touch."""

import pytest
import torch
from torch import nn

from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.model import ready_model


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("count", torch.tensor(4))


def test_dtype_reaches_real_floats_alone():
    request = Request((ModuleSpec(("",), (0,)),), dtype="float64")
    model = ready_model(request, Rotary())
    assert model.weight.dtype is torch.float64
    assert model.count.dtype is torch.int64
    assert torch.equal(model.angles, Rotary().angles)


@pytest.mark.parametrize(
    ("whole", "part", "expected"), [(True, False, False), (False, False, True)]
)
def test_a_part_in_evaluation_mode_stays_so_in_a_model_that_trains(whole, part, expected):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)).train(whole)
    model[0].train(part)
    made = ready_model(Request((ModuleSpec(("",), (0,)),)), model)
    assert made.training
    assert made[0].training is expected
