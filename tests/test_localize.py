"""Graphs of one rank: the plain model's loss and gradients, whatever is divided."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from tests.localized import Decisions, assert_exact, counts, planned


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return (self.down(gelu(self.up(x))) ** 2).mean()


class Layer(nn.Module):
    """Grouped-query attention and an MLP, as every decoder has them."""

    def __init__(self, width=12, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, groups * self.size) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x, mask):
        h = self.norm1(x)
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (
            part(h).unflatten(-1, (count, self.size)).transpose(1, 2)
            for part, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token and position embeddings, layers, a head, the loss of the next token."""

    def __init__(self, layers=1, width=12, vocabulary=24, *, masked=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.masked = masked

    def forward(self, ids, labels):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.place(positions)
        mask = None
        if self.masked:
            near = (positions[:, None] - positions[None, :]).abs() < 3
            mask = near[None, None] & (ids != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def double(model, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def text(tokens=8, samples=2):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 24, (samples, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


MEGATRON = {
    r"(.*\.)?(up|q|k|v)\.(weight|bias)": "S(0,1,{n})",
    r"(.*\.)?(down|o).weight": "S(1,1,{n})",
    r"(embed|head).weight": "S(0,1,{n})",
}


def layouts(n, table=MEGATRON):
    return {name: text.format(n=n) for name, text in table.items()}


@pytest.mark.parametrize("ranks", [2, 3])
def test_column_then_row(ranks):
    model, batch = double(Mlp()), {"x": torch.randn(2, 4, 6, dtype=torch.float64)}
    plan, values = planned(model, batch, tensor=ranks)
    plan = Decisions(plan).agree("tensor", layouts(ranks)).plan_with()
    programs, logs = assert_exact(model, batch, plan, values)
    assert counts(programs[0, (0,)]) == {("tensor", "R", "P"): 1, ("tensor", "P", "R"): 1}
    assert [what for _, what, _ in logs[0]] == ["all_reduce sum"]


@pytest.mark.parametrize("masked", [False, True])
def test_tensor_parallel_decoder(masked):
    """Heads, hidden units, vocabulary and classes are divided; nothing is gathered."""
    model, batch = double(Decoder(2, masked=masked)), text()
    plan, values = planned(model, batch, tensor=2)
    plan = Decisions(plan).agree("tensor", layouts(2)).plan_with()
    programs, logs = assert_exact(model, batch, plan, values)
    print(counts(programs[0, (0,)]), counts(programs[0, (0,)], "weight_grad"), logs[0])


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_divided_tokens(split, masked, ranks):
    model, batch = double(Decoder(2, masked=masked)), text(7)
    plan, values = planned(model, batch, split, context=ranks)
    plan = Decisions(plan).context().plan_with()
    programs, logs = assert_exact(model, batch, plan, values)
    print(counts(programs[0, (0,)]), counts(programs[0, (0,)], "weight_grad"), logs[0])


def test_a_rank_without_tokens():
    model, batch = double(Decoder(1)), text(3)
    plan, values = planned(model, batch, context=4)
    plan = Decisions(plan).context().plan_with()
    assert_exact(model, batch, plan, values)


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_tokens_and_heads(split):
    model, batch = double(Decoder(2)), text(8)
    plan, values = planned(model, batch, split, context=2, tensor=2)
    plan = Decisions(plan).context().agree("tensor", layouts(2)).plan_with()
    programs, logs = assert_exact(model, batch, plan, values)
    print(counts(programs[0, (0, 0)]), counts(programs[0, (0, 0)], "weight_grad"), logs[0])
