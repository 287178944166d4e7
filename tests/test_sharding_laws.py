"""The laws of a sharded plan: what shard makes is accepted, each fault is refused by its law."""

from dataclasses import replace

import pytest

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.graph import Graph, is_element
from mllm_compile.compiler.layout import P, R, S, V
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.passes import sharding_laws as laws
from mllm_compile.passes.pipeline import make_plan
from tests.sharded import decoder, sharded


@pytest.fixture(scope="module")
def plan():
    """Two stages, each on context 2 and tensor 2."""
    return sharded(decoder(2, tied=True), exchange="gather", context=2, tensor=2, pipeline=2)


@pytest.mark.parametrize("law", laws.SHARD, ids=lambda law: law.__name__)
def test_a_sharded_plan_is_accepted(plan, law):
    law(plan)


def changed(plan, module=0, **fields):
    """The plan with other tables in one sharding."""
    shardings = list(plan.shardings)
    shardings[module] = replace(shardings[module], **fields)
    return replace(plan, shardings=tuple(shardings))


def with_strategy(plan, node, axis, **fields):
    """The plan with one strategy changed."""
    own = list(plan.shardings[0].strategies[node])
    own[axis] = replace(own[axis], **fields)
    return changed(plan, strategies={**plan.shardings[0].strategies, node: tuple(own)})


def node_of(plan, operator):
    """Name of the first placed node with this operator."""
    return next(n.name for n in Graph(plan.captured).placed if operator in str(n.target))


def refused(law, plan, *words):
    with pytest.raises(PlanError) as error:
        law(plan)
    assert all(word in str(error.value) for word in words), error.value


def test_axes_are_those_of_the_request(plan):
    law = laws.modules_are_sharded_along_their_axes
    refused(law, changed(plan, axes=plan.shardings[0].axes[:1]), "tensor")
    refused(law, replace(plan, shardings=()), "context")


def test_every_placed_node_has_its_strategies(plan):
    name, table = node_of(plan, "mm"), plan.shardings[0].strategies
    without = {key: own for key, own in table.items() if key != name}
    law = laws.sharded_nodes_have_strategies
    refused(law, changed(plan, strategies=without), name)
    refused(law, changed(plan, strategies={**table, name: table[name][:1]}), name)


def test_replicas_are_whole(plan):
    replica = plan.stages[0].replicated[0]
    table = plan.shardings[0].strategies
    more = {**table, replica: table[node_of(plan, "silu")]}
    refused(laws.sharded_nodes_have_strategies, changed(plan, strategies=more), replica)


@pytest.mark.parametrize(
    ("operator", "axis", "fields"),
    [
        ("mm.default", 0, {"inputs": (S(0, 1, 2), V)}),  # samples for tokens
        ("mm.default", 1, {"outputs": (R,)}),  # a result of other columns taken for whole
        ("silu", 1, {"inputs": (V,)}),  # divided elements from whole ones
        ("rsqrt", 0, {"inputs": (P,), "outputs": (P,), "name": "linear"}),  # not linear
        ("nll_loss", 0, {"outputs": (R, R)}),  # a partial sum read as whole
        ("attention", 0, {"inputs": (S(2, 1, 16),) * 3}),  # keys stay divided
    ],
)
def test_strategies_follow_the_rule(plan, operator, axis, fields):
    name = node_of(plan, operator)
    refused(laws.strategies_follow_rules, with_strategy(plan, name, axis, **fields), f"%{name}")


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": (S(2, 1, 16), R, R)},  # no keys to exchange
        {"inputs": (S(2, 1, 16), S(2, 1, 16), S(1, 1, 2))},  # values divided otherwise
        {"outputs": (R, R)},  # queries at hand read as all of them
        {"special": ""},
    ],
)
def test_attention_that_fetches_its_keys_divides_all_alike(fields):
    exchanged = sharded(decoder(2), exchange="needed", context=2)
    laws.strategies_follow_rules(exchanged)
    name = node_of(exchanged, "attention")
    broken = with_strategy(exchanged, name, 0, **fields)
    refused(laws.strategies_follow_rules, broken, f"%{name}")


def test_special_operators_are_named(plan):
    name = node_of(plan, "silu")
    broken = with_strategy(plan, name, 1, special="x")
    refused(laws.strategies_follow_rules, broken, f"%{name}")


def test_elements_stand_as_they_were_made(plan):
    name = next(n.name for n in Graph(plan.captured).placed if is_element(n))
    broken = with_strategy(plan, name, 0, outputs=(R,))
    refused(laws.elements_stand_as_made, broken, f"%{name}")


@pytest.mark.parametrize("layout", [V, P])
def test_boundaries_are_whole_or_divided(plan, layout):
    value = plan.boundaries[0].values[0]
    law, sharding = laws.boundaries_are_whole_or_divided, plan.shardings[0]
    sent = {**sharding.sent, value: (layout, R)}
    refused(law, changed(plan, sent=sent), f"%{value} (sent)")
    refused(law, changed(plan, sent={}), value)
    layouts = {**sharding.layouts, value: (layout, R)}
    refused(law, changed(plan, layouts=layouts), f"%{value}")


def test_parameters_are_no_partial_sums(plan):
    name = Graph(plan.captured).parameters["model.norm.weight"].name
    layouts = {**plan.shardings[0].layouts, name: (P, R)}
    refused(laws.boundaries_are_whole_or_divided, changed(plan, layouts=layouts), name)


def test_values_arrive_as_they_were_sent(plan):
    value = plan.boundaries[0].values[0]
    layouts = {**plan.shardings[0].layouts, value: (R, R)}
    refused(laws.stages_of_a_module_agree, changed(plan, layouts=layouts), value)


def test_only_gradients_are_partial(plan):
    """Nothing but what trains may vary: here one weight is frozen behind the pass's back."""
    name = Graph(plan.captured).parameters["model.norm.weight"].name
    frozen = replace(plan, needs_grad=plan.needs_grad - {name})
    refused(laws.partial_gradients_are_gradients, frozen, name)
    reader = node_of(plan, "attention")
    edges = {edge for edge in plan.grad_edges if edge[1] != reader}
    cut = replace(plan, grad_edges=frozenset(edges))
    refused(laws.partial_gradients_are_gradients, cut, f"an argument of %{reader}")


def test_sizes_divide(plan):
    law, sharding = laws.sizes_divide, plan.shardings[0]
    value = plan.boundaries[0].values[0]
    for own in ((S(1, 1, 16), S(1, 1, 3)), (S(1, 1, 16), S(3, 1, 2)), (S(1, 1, 12), R)):
        refused(law, changed(plan, sent={**sharding.sent, value: own}), f"%{value}")


def test_an_inner_axis_divides_what_the_outer_one_left():
    uneven = sharded(decoder(2, tokens=18), context=4, tensor=2)
    name = node_of(uneven, "silu")
    tokens = uneven.shardings[0].strategies[name][0].name
    broken = with_strategy(uneven, name, 1, name=tokens)
    refused(laws.sizes_divide, broken, f"%{name}: {tokens} of 18")


def test_special_operators_are_divided_once(plan):
    name = node_of(plan, "embedding")
    broken = with_strategy(with_strategy(plan, name, 0, special="v"), name, 1, special="v")
    refused(laws.specials_are_divided_once, broken, f"%{name}")


def test_modules_hold_a_parameter_alike():
    sizes = Parallel(tensor=2)
    modules = (
        ModuleSpec(("model.embed_tokens", "model.layers.0"), (0, 1), sizes),
        ModuleSpec(("model.layers.1", "model.norm", "lm_head"), (2, 3), sizes),
    )
    plan = make_plan(Request(modules), decoder(2, tied=True), stop_after="shard")
    name = Graph(plan.captured).parameters["model.embed_tokens.weight"].name
    layouts = {**plan.shardings[1].layouts, name: (R,)}
    broken = changed(plan, 1, layouts=layouts)
    refused(laws.parameters_are_held_alike, broken, "model.embed_tokens.weight")
