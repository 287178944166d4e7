"""Whole models: gradients are autograd's, FLOPs the counter's, every parameter has one place."""

from functools import cache, partial

import pytest
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.compiler.cost import costs
from mllm_compile.compiler.flow import flow
from mllm_compile.compiler.graph import Graph
from mllm_compile.passes.capture.capture import capture, loss_of
from mllm_compile.passes.capture.programs import prepare
from mllm_compile.passes.pipeline import make_plan
from tests.agreement import agree, patterns, with_trainable
from tests.families import FAMILIES, MODULES
from tests.requests import request
from tests.watch import Watch

OFTEN = (
    "blip_2",
    "gemma3",
    "llava",
    "mllama",
    "phi4_multimodal",
    "qwen2_5_vl",
    "qwen3_vl",
    "vision_audio_llm",
)
DROPS = ("llava", "phi4_multimodal")
"""Models that run layers whose results they drop."""
EVERY = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow, id=name)
    for name in FAMILIES
]


@cache
def program(name):
    """(model, batch, captured program) of a family."""
    workload = FAMILIES[name]()
    batch = workload.collate([workload.samples[k] for k in range(2)])
    return workload.model, batch, capture(workload.model, batch)


def values(captured, model, batch):
    """Real values of main's placeholders; parameters are fresh leaves."""
    prepared = prepare(captured, batch, dict(model.named_buffers()))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = []
    for item in captured.inputs:
        held = item.kind in ("parameter", "buffer")
        value = state[item.name] if held else prepared.values[item.kind, item.name]
        found.append(value.detach().clone().requires_grad_(item.trainable))
    return found


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_autograd(name):
    model, batch, captured = program(name)
    agree(captured, values(captured, model, batch))
    for trainable in patterns(model, 2):
        frozen = with_trainable(captured, trainable)
        agree(frozen, values(frozen, model, batch))


@pytest.mark.parametrize("name", EVERY)
def test_flops_are_those_of_the_counter(name):
    model, batch, captured = program(name)
    for trainable in [{n for n, _ in model.named_parameters()}, *patterns(model, 2)]:
        frozen = with_trainable(captured, trainable)
        graph = Graph(frozen)
        found = costs(graph, flow(graph)).values()
        forward, backward = counted(partial(first, Watch(frozen), values(frozen, model, batch)))
        assert sum(cost.forward for cost in found) == forward
        assert sum(cost.input_grad + cost.weight_grad for cost in found) == backward


@pytest.mark.parametrize("name", OFTEN)
def test_flops_are_those_of_the_plain_model(name):
    """But for our own operators (it counts neither attention on CPU nor grouped products)."""
    model, batch, captured = program(name)
    graph = Graph(captured)
    found = costs(graph, flow(graph))
    plain = [found[n.name] for n in graph.live if not str(n.target).startswith("mllm")]
    forward, backward = counted(lambda: loss_of(model(**batch))[0])
    model.zero_grad()
    compute = sum(cost.forward for cost in plain)
    assert compute < forward if name in DROPS else compute == forward
    assert sum(cost.input_grad + cost.weight_grad for cost in plain) == backward


def first(program, given):
    """The loss of a program that an interpreter runs."""
    return program.run(*given)[0]


def counted(run):
    """FLOPs of a forward that gives a loss, and of its backward."""
    with FlopCounterMode(display=False) as counter:
        loss = run()
        forward = counter.get_total_flops()
        if loss.requires_grad:
            loss.backward()
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_is_accounted_for_once(name):
    model, _, captured = program(name)
    modules = [(paths, 1) for paths in MODULES[name][:-1]] + [(MODULES[name][-1], 2)]
    plan = make_plan(request(*modules), captured)
    assert set(plan.home) == {name for name, _ in model.named_parameters()}
    for parameter, home in plan.home.items():
        readers = [stage.index for stage in plan.stages if parameter in stage.parameters]
        assert not readers or home == readers[0]
    last = [b for b in plan.boundaries if (b.source, b.target) == plan_cut(plan)]
    assert [len(b.values) for b in last] == [CROSSING.get(name, 1)]


CROSSING = {
    "florence2": 2,  # what the decoder begins with, beside the state of the encoder
    "gemma4": 2,  # what each layer takes of the tokens, beside the hidden state
}
"""Values that cross a cut in the language model, where it is not the hidden state alone."""


def plan_cut(plan):
    count = len(plan.stages)
    return count - 2, count - 1


def test_deep_stack_crosses_from_the_encoder_to_several_stages():
    """Cut between decoder layers 0 | 1 | 2: features enter after layers 0 and 1."""
    model, _, captured = program("qwen3_vl")
    encoder, decoder = MODULES["qwen3_vl"]
    layers = len(model.model.language_model.layers)
    placement = {
        (owner, name, occurrence): 1 + int(owner.split(".layers.")[1].split(".")[0])
        for owner, name, occurrence in Graph(captured).sites
        if owner.startswith("model.language_model.layers.")
    }
    plan = make_plan(request((encoder, 1), (decoder, layers)), captured, placement)
    crossing = {(b.source, b.target): len(b.values) for b in plan.boundaries}
    assert len([target for source, target in crossing if source == 0]) >= 2
    assert all(crossing[k, k + 1] == 1 for k in range(1, layers))
    assert all(b.gradients == b.values for b in plan.boundaries)


def test_a_tower_that_merges_by_itself_leaves_the_merge_to_the_decoder():
    _, _, captured = program("phi4_multimodal")
    modules = MODULES["phi4_multimodal"]
    plan = make_plan(request(*((paths, 1) for paths in modules)), captured)
    nodes = Graph(captured).by_name
    owners = {nodes[name].meta["owner"] for name in plan.stages[-1].nodes}
    assert "model.embed_tokens_extend.image_embed" in owners
    assert all(b.target == len(modules) - 1 for b in plan.boundaries)
