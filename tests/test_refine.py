"""Factors that operators of a graph have in common."""

import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import LlamaConfig, LlamaForCausalLM

from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.sharding.refine import refine
from mllm_compile.passes.sharding.rules import name_of
from mllm_compile.passes.sharding.values import operands


def graph_of(function, *inputs):
    return list(make_fx(function, tracing_mode="fake")(*inputs).graph.nodes)


def only(nodes, target):
    (node,) = [node for node in nodes if node.target is target]
    return node


def project(x, weight):
    """[2, 5, 8] x [8, 12] -> [2, 3, 5, 4]: heads of size four."""
    rows = x.reshape(10, 8) @ weight
    return rows.view(2, 5, 3, 4).transpose(1, 2)


def test_a_product_learns_from_the_views_around_it():
    nodes = graph_of(project, torch.ones(2, 5, 8), torch.ones(8, 12))
    product = only(nodes, torch.ops.aten.mm.default)
    found = refine(nodes)
    factors = found.factors[product]
    assert factors.results == ((("m.0", "m.1"), ("n.0", "n.1")),)
    assert [factors.sizes[name] for name in ("m.0", "m.1", "n.0", "n.1")] == [2, 5, 3, 4]
    assert found.parts((nodes[1], 0)) == ((8,), (3, 4))
    assert found.parts((product, 0)) == ((2, 5), (3, 4))


def test_factors_that_run_together_are_one_class():
    nodes = graph_of(project, torch.ones(2, 5, 8), torch.ones(8, 12))
    product = only(nodes, torch.ops.aten.mm.default)
    found = refine(nodes)
    tokens = found.part_class((nodes[0], 0), 1, 1, 5)
    assert tokens == found.factor_class(product, "m.1")
    assert tokens != found.factor_class(product, "m.0")
    assert tokens != found.part_class((nodes[1], 0), 0, 1, 8)
    heads = only(nodes, torch.ops.aten.transpose.int)
    assert found.part_class((heads, 0), 1, 1, 3) == found.part_class((nodes[1], 0), 1, 1, 3)


def test_points_that_do_not_divide_each_other_are_dropped():
    def conflicting(x):
        return x.view(2, 6), x.view(3, 4), x.exp()

    nodes = graph_of(conflicting, torch.ones(12))
    found = refine(nodes)
    assert found.parts((nodes[0], 0)) == ((2, 6),)
    views = [node for node in nodes if node.target is torch.ops.aten.view.default]
    assert [list(found.factors[view].sizes.values()) for view in views] == [[2, 6], [3, 4]]


def test_points_do_not_cross_a_whole_factor():
    def normalized(x):
        return torch.softmax(x.view(4, 12), 1).view(4, 3, 4), x.view(2, 2, 12)

    nodes = graph_of(normalized, torch.ones(48))
    softmax = only(nodes, torch.ops.aten._softmax.default)
    assert list(refine(nodes).factors[softmax].sizes.values()) == [2, 2, 12]


def test_elements_of_tuples_are_seen_through():
    def halves(x):
        a, b = x.view(6, 8).split(4, 1)
        return a.view(2, 3, 4) * 2, b

    nodes = graph_of(halves, torch.ones(48))
    split = only(nodes, torch.ops.aten.split.Tensor)
    found = refine(nodes)
    sizes = found.factors[split].sizes
    assert [sizes[name] for dim in found.factors[split].results[0] for name in dim] == [2, 3, 4]
    view = [node for node in nodes if node.target is torch.ops.aten.view.default][-1]
    assert operands(view) == ((split, 0),)


def decoder_nodes(layers):
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    ids = torch.arange(10).view(2, 5)
    program = capture(LlamaForCausalLM(config), dict(input_ids=ids, labels=ids))
    return list(program.main.graph.nodes)


def calls_in(function, *arguments):
    """How many Python functions a call enters: its work, whatever the machine does beside."""
    entered = 0

    def count(_frame, event, _argument):
        nonlocal entered
        entered += event == "call"

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return entered


def test_refining_takes_work_in_proportion_to_the_depth():
    few, many = decoder_nodes(4), decoder_nodes(16)
    refine(few)  # fills the caches that both read
    assert calls_in(refine, many) < 1.1 * 4 * calls_in(refine, few)


def test_factors_run_through_all_layers():
    nodes = decoder_nodes(16)
    found = refine(nodes)
    sites = [node for node in nodes if name_of(node) == "mllm::attention"]
    assert len(sites) == 16
    queries = [operands(site)[0] for site in sites]
    assert len({found.factor_class(site, "s") for site in sites}) == 1
    for query in queries:
        assert found.parts(query) == ((2,), (2, 2), (5,), (4,))
