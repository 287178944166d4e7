"""Small models that are easy to reason about: towers, projectors, a decoder, adapters."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).unsqueeze(1) for part in (self.q, self.k, self.v))
        x = x + self.o(scaled_dot_product_attention(q, k, v).squeeze(1))
        return x + self.down(gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self, width, layers, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x, extra=()):
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place < len(extra):
                x = x + extra[place]
        return self.norm(x)


class Encoder(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.patch = nn.Linear(12, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, pixels):
        x = self.patch(pixels)
        seen = []
        for layer in self.layers:
            x = layer(x)
            seen.append(x)
        return x, seen


class Multimodal(nn.Module):
    """Encoders whose tokens stand before the text; a projector each; a head that may be tied."""

    def __init__(self, encoders=1, layers=4, width=16, *, tied=False, deep=0, depth=2):
        super().__init__()
        names = ["vision", "audio", "depth"][:encoders]
        self.towers = nn.ModuleDict({name: Encoder(width, depth) for name in names})
        self.projectors = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.language = Decoder(width, layers)
        self.head = nn.Linear(width, 32, bias=False)
        self.deep = deep
        if tied:
            self.head.weight = self.language.embed.weight

    def forward(self, ids, **pixels):
        parts, seen = [self.language.embed(ids)], []
        for name, values in pixels.items():
            tokens, seen = self.towers[name](values)
            parts.insert(0, self.projectors[name](tokens))
        length = sum(part.shape[1] for part in parts)
        extra = [pad(x, (0, 0, 0, length - x.shape[1])) for x in seen[: self.deep]]
        x = self.language(torch.cat(parts, 1), extra)[:, -ids.shape[1] :]
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(*encoders):
    generator = torch.Generator().manual_seed(0)
    pixels = {name: torch.randn(2, 6, 12, generator=generator) for name in encoders}
    return {"ids": torch.randint(0, 32, (2, 8), generator=generator), **pixels}


class Adapted(nn.Module):
    """A frozen linear map with a trainable low-rank one beside it."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(model):
    """Freeze everything and put adapters on the query and value maps of the decoder."""
    model.requires_grad_(False)
    for layer in model.language.layers:
        layer.q, layer.v = Adapted(layer.q), Adapted(layer.v)
    return model
