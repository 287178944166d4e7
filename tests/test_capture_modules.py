"""Modules of torch that keep state, fuse operators or hold weights in their own way."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from mllm_compile.passes.capture.capture import capture
from tests.captures import Outcome, outcome


class Around(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.first, self.inner, self.call = nn.Linear(8, 8), inner, call

    def forward(self, x):
        return self.call(self.inner, self.first(x)).pow(2).mean()


def plain(inner, x):
    return inner(x)


MODULES = {
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), plain),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), plain),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), plain),
    "lstm": (lambda: nn.LSTM(8, 8, batch_first=True), lambda inner, x: inner(x)[0]),
    "gru": (lambda: nn.GRU(8, 8, 2, batch_first=True), lambda inner, x: inner(x)[0]),
    "multihead": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda inner, x: inner(x, x, x, need_weights=False)[0],
    ),
    "multihead_weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda inner, x: inner(x, x, x)[0],
    ),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), plain),
    "encoder_layer_eval": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval(),
        plain,
    ),
    "instance_norm": (
        lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
        plain,
    ),
    "group_norm": (lambda: nn.GroupNorm(5, 5), plain),
    "sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), plain),
    "convolution": (lambda: nn.Conv1d(5, 4, 3, padding="same", padding_mode="circular"), plain),
    "bilinear": (lambda: nn.Bilinear(8, 8, 4), lambda inner, x: inner(x, x)),
    "prelu": (lambda: nn.PReLU(), plain),
}


@pytest.mark.parametrize("name", MODULES)
def test_exact(name):
    torch.manual_seed(0)
    make, call = MODULES[name]
    model = Around(make(), call).double()
    batches = [{"x": torch.randn(3, 5, 8, dtype=torch.float64)} for _ in range(3)]
    program = capture(model, batches[0])
    assert [outcome(model, program, batch) for batch in batches] == [Outcome.EXACT] * 3


class Filled(nn.Module):
    """A buffer that only forward fills."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.register_buffer("seen", None)

    def forward(self, x):
        self.seen = self.first(x)
        return self.seen.pow(2).mean()


def test_a_buffer_that_forward_fills_does_not_stay():
    model, batch = Filled().double(), {"x": torch.randn(3, 5, 8, dtype=torch.float64)}
    program = capture(model, batch)
    assert program.updates == ()
    assert model.seen is None
    assert not dict(model.named_buffers())


class Shared(nn.Module):
    """One layer that stands in two places."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5))
        self.second = nn.Sequential(*self.first, nn.Linear(8, 8))

    def forward(self, x):
        return self.second(self.first(x)).pow(2).mean()


def test_a_layer_in_two_places_keeps_its_own_tensors():
    model = Shared().double()
    state = {**model.state_dict(keep_vars=True)}
    batch = {"x": torch.randn(3, 5, 8, dtype=torch.float64)}
    program = capture(model, batch)
    assert all(state[name] is value for name, value in model.state_dict(keep_vars=True).items())
    assert outcome(model, program, batch) is Outcome.EXACT
