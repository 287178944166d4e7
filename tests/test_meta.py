"""Models without storage."""

import torch
from torch import nn

from mllm_compile.meta import parameters_on_meta


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("positions", torch.arange(3))


def test_only_parameters_lose_their_storage() -> None:
    with parameters_on_meta():
        model = Tied()
        sample = torch.ones(2)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model.positions.tolist() == [0, 1, 2]
    assert sample.tolist() == [1, 1]
    assert model.head.weight is model.table.weight
    assert not model.frozen.requires_grad
    assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_a_model_may_be_larger_than_memory() -> None:
    with parameters_on_meta():
        layers = [nn.Linear(2**14, 2**14) for _ in range(1000)]  # a terabyte
    assert sum(layer.weight.nbytes for layer in layers) == 2**40 * 1000 // 1024
