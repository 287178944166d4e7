"""A workload that has something for every axis: heads, tokens, samples and experts."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, softmax

from mllm_compile.workload import Workload

WIDTH, HEADS, EXPERTS, VOCABULARY, TOKENS, PATCHES = 16, 4, 4, 32, 12, 4


class Experts(nn.Module):
    """Every expert sees every token; a gate weighs what they say."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(EXPERTS, WIDTH, 1))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, x):
        rows = x.flatten(0, 1).unsqueeze(0).expand(EXPERTS, -1, -1)
        said = torch.bmm(gelu(torch.bmm(rows, self.up)), self.down)
        weights = softmax(torch.bmm(rows, self.gate), 0)
        return (said * weights).sum(0).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, mlp, *, causal):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        # No biases: a key's has a gradient of zero, so that float32 would compare noise.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.mlp, self.causal = mlp, causal

    def forward(self, x):
        h = self.norms[0](x)
        q, k, v = (
            part(h).reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


def _dense():
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Linear(6, WIDTH)
        self.block = Block(_dense(), causal=False)

    def forward(self, pixels):
        return self.block(self.patch(pixels))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(make(), causal=True) for make in (_dense, Experts))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, features):
        x = self.embed(ids)
        x = torch.cat([features, x[:, features.shape[1] :]], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(nn.Module):
    """The first tokens of a text are its image."""

    def __init__(self):
        super().__init__()
        self.vision, self.language = Vision(), Language()

    def forward(self, input_ids, pixels, labels):
        logits = self.language(input_ids, self.vision(pixels))
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def small() -> Workload:
    """Eight samples of 12 tokens, of which the first four are an image."""
    torch.manual_seed(0)
    samples = []
    for _ in range(8):
        ids = torch.randint(0, VOCABULARY, (TOKENS,))
        labels = ids.roll(-1).index_fill(0, torch.arange(PATCHES), -100)
        samples.append({"input_ids": ids, "labels": labels, "pixels": torch.randn(PATCHES, 6)})
    return Workload(Model(), samples, collate)


def collate(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
