"""Stages: cuts of any granularity, glue, replicas, skip edges, tied weights, placement."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.passes.pipeline import make_plan
from tests.small_graphs import capture


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
        parts, extra = [self.language.embed(ids)], []
        for name, values in pixels.items():
            tokens, seen = self.towers[name](values)
            parts.insert(0, self.projectors[name](tokens))
            extra = [nn.functional.pad(x, (0, 0, 0, ids.shape[1])) for x in seen[: self.deep]]
        x = self.language(torch.cat(parts, 1), extra)[:, -ids.shape[1] :]
        return cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def batch(*encoders):
    generator = torch.Generator().manual_seed(0)
    pixels = {name: torch.randn(2, 6, 12, generator=generator) for name in encoders}
    return {"ids": torch.randint(0, 32, (2, 8), generator=generator), **pixels}


def request(*modules, microbatches=4):
    """Modules as (paths, pipeline), on consecutive ranks."""
    specs, first = [], 0
    for paths, pipeline in modules:
        ranks = tuple(range(first, first + pipeline))
        first += pipeline
        paths = (paths,) if isinstance(paths, str) else paths
        specs.append(ModuleSpec(paths, ranks, Parallel(pipeline=pipeline)))
    return Request(tuple(specs), microbatches=microbatches)


def crossings(plan):
    return {(b.source, b.target): b.values for b in plan.boundaries}


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6])
def test_one_hidden_state_crosses_every_cut(pipeline):
    program = capture(Multimodal(0, layers=6), batch())
    plan = make_plan(request(("", pipeline)), program)
    assert crossings(plan).keys() == {(s, s + 1) for s in range(pipeline - 1)}
    assert all(len(values) == 1 for values in crossings(plan).values())


def test_projector_and_head_sink_to_the_language_model():
    plan = make_plan(
        request(("towers.vision", 1), ("language", 2)), capture(Multimodal(), batch("vision"))
    )
    encoder, first, last = plan.stages
    assert "projectors.vision.weight" in first.parameters
    assert "head.weight" in last.parameters
    assert {name.split(".")[0] for name in encoder.parameters} == {"towers"}
    assert set(crossings(plan)) == {(0, 1), (1, 2)}


def test_unknown_paths_are_refused_with_close_matches():
    with pytest.raises(RequestError, match=r"did you mean.*towers\.vision"):
        make_plan(request(("tower.vision", 1)), capture(Multimodal(), batch("vision")))
