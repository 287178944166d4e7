"""Sharded plans of small models, and what they imply."""

from collections import Counter
from functools import lru_cache
from math import prod

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.meta import parameters_on_meta
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.sharding.conversions import conversions
from mllm_compile.passes.sharding.price import share_of


@lru_cache(maxsize=8)
def decoder(
    layers=2, *, tied=False, heads=4, kv=4, hidden=64, vocabulary=128, tokens=16, meta=False
):
    """The captured program of a decoder; on meta also of one that no machine here could hold."""
    model = build(
        layers, tied=tied, heads=heads, kv=kv, hidden=hidden, vocabulary=vocabulary, meta=meta
    )
    return capture(model, batch(vocabulary, tokens))


def build(layers=2, *, tied=False, heads=4, kv=4, hidden=64, vocabulary=128, meta=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )
    if not meta:
        return LlamaForCausalLM(config)
    with parameters_on_meta():
        return LlamaForCausalLM(config)


def batch(vocabulary=128, tokens=16):
    ids = torch.randint(0, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


class Mixture(nn.Module):
    """A mixture of experts without attention: every expert sees every row, weighed by a router."""

    def __init__(self, experts=4, width=8):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 4)
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids).flatten(0, 1)
        weights = self.router(x).softmax(-1).t().unsqueeze(-1)
        found = torch.bmm(torch.bmm(x.expand(len(self.up), -1, -1), self.up).tanh(), self.down)
        logits = self.head(x + (found * weights).sum(0))
        return nn.functional.cross_entropy(logits, ids.flatten())


class Plain(nn.Module):
    """Attention written out, its softmax too unless ``fused``."""

    def __init__(self, fused, width=8):
        super().__init__()
        self.fused = fused
        self.embed = nn.Embedding(32, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        scores = torch.bmm(self.q(x), self.k(x).transpose(1, 2))
        if self.fused:
            seen = scores.softmax(-1)
        else:
            seen = (scores - scores.detach().amax(-1, keepdim=True)).exp()
            seen = seen / seen.sum(-1, keepdim=True)
        logits = self.head(x + torch.bmm(seen, self.v(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def sharded(program, split="contiguous", given=None, exchange="auto", shown=None, **sizes):
    """The plan of a program that is one module, with these sizes of axes; ``shown``: intervals."""
    parallel = Parallel(**sizes)
    ranks = tuple(range(parallel.size))
    module = ModuleSpec(("",), ranks, parallel, context_split=split, kv_exchange=exchange)
    request = Request((module,), microbatches=4)
    return make_plan(request, program, layouts=given, intervals=shown, stop_after="shard")


def collectives(plan, axis, module=0):
    """How often every collective stands in (forward, backward) along an axis."""
    found = [each for each in conversions(plan, module) if each.axis == axis]
    forward = Counter(each.forward for each in found)
    backward = Counter(each.backward for each in found)
    return tuple(Counter({k: n for k, n in each.items() if k}) for each in (forward, backward))


def flops_per_rank(plan, module=0):
    """FLOPs of the busiest rank, as a part of those of the whole module."""
    sharding = plan.shardings[module]
    whole = mine = 0.0
    for name, own in sharding.strategies.items():
        work = plan.costs[name].total
        whole += work
        pairs = zip(sharding.axes, own, strict=True)
        mine += work * prod(share_of(each, axis) for axis, each in pairs)
    return mine / whole


def layout_of(plan, parameter, module=0):
    """The texts of a parameter's layouts."""
    return [str(layout) for layout in plan.parameter_layouts[module, parameter]]
