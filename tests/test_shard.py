"""Sharding: which layouts the integer programs find, with the collectives that follow."""

import time
from collections import Counter
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.passes import shard as shard_pass
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.sharding.needed import needed_shares
from mllm_compile.passes.token_split.mask_values import sites
from tests.sharded import (
    Mixture,
    Plain,
    batch,
    build,
    collectives,
    decoder,
    flops_per_rank,
    layout_of,
    sharded,
)
from tests.small_models import Multimodal
from tests.small_models import batch as images

LARGE = {"hidden": 4096, "heads": 32, "kv": 8, "vocabulary": 32000, "tokens": 4096, "meta": True}


def per_layer(axis, few, many, layers):
    """Collectives that every further layer adds, in each direction."""
    counts = zip(collectives(many, axis), collectives(few, axis), strict=True)
    added = [{kind: more[kind] - fewer[kind] for kind in more | fewer} for more, fewer in counts]
    return [{kind: n / layers for kind, n in each.items() if n} for each in added]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_small_layers_take_two_all_reduces_in_each_direction(tied, ranks):
    few, many = (sharded(decoder(n, tied=tied), tensor=ranks) for n in (2, 8))
    assert per_layer("tensor", few, many, 6) == [{"all-reduce": 2}, {"all-reduce": 2}]


@pytest.mark.parametrize("tied", [False, True])
def test_large_layers_take_two_gathers_and_two_reduce_scatters(tied):
    few, many = (sharded(decoder(n, tied=tied, **LARGE), tensor=8) for n in (3, 5))
    both = {"all-gather": 2, "reduce-scatter": 2}
    assert per_layer("tensor", few, many, 2) == [both, both]


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_context_gathers_keys_and_values_alone(split):
    for layers in (2, 8):
        plan = sharded(decoder(layers), split, exchange="gather", context=2)
        forward, backward = collectives(plan, "context")
        assert forward == {"all-gather": 2 * layers, "all-reduce": 1}  # the loss, a scalar
        assert backward == {"reduce-scatter": 2 * layers}


def attention_of(plan):
    """(divided factor, special) of every attention along the first axis."""
    nodes = Graph(plan.captured).by_name
    return {
        (own[0].name, own[0].special)
        for name, own in plan.shardings[0].strategies.items()
        if str(nodes[name].target) == "mllm.attention.default"
    }


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
def test_attention_that_fetches_its_keys_needs_no_other_collective(split):
    plan = sharded(decoder(2), split, exchange="needed", context=2)
    assert attention_of(plan) == {("s", "exchange")}
    assert collectives(plan, "context") == ({"all-reduce": 1}, {})
    assert flops_per_rank(plan) == pytest.approx(1 / 2)


def test_attention_by_heads_takes_four_all_to_alls_in_each_direction():
    plan = sharded(decoder(2), "zigzag", exchange="heads", context=2)
    assert attention_of(plan) == {("g", "")}
    assert collectives(plan, "context") == (
        {"all-to-all": 2 * 4, "all-reduce": 1},
        {"all-to-all": 2 * 4},
    )
    assert flops_per_rank(plan) == pytest.approx(1 / 2)


def test_heads_of_a_tensor_rank_are_divided_among_context_ranks():
    """Tensor takes blocks of heads, context a part of each: nobody gathers heads for the other."""
    plan = sharded(decoder(2), exchange="heads", context=2, tensor=2)
    assert attention_of(plan) == {("g", "")}
    assert collectives(plan, "context") == (
        {"all-to-all": 2 * 4, "all-reduce": 1},
        {"all-to-all": 2 * 4},
    )
    assert collectives(plan, "tensor") == collectives(sharded(decoder(2), tensor=2), "tensor")
    assert flops_per_rank(plan) == pytest.approx(1 / 4)


@pytest.mark.parametrize(("kv", "ranks", "chosen"), [(32, 8, "g"), (8, 2, "s"), (4, 8, "s")])
def test_heads_are_divided_where_that_moves_less(kv, ranks, chosen):
    """As many key heads as heads on many ranks: by heads; few key heads: by the keys needed."""
    plan = sharded(decoder(2, **{**LARGE, "kv": kv}), exchange="auto", context=ranks)
    assert {name for name, _ in attention_of(plan)} == {chosen}


@lru_cache(maxsize=1)
def masked():
    """A large decoder whose captured batch has a mask of intervals, and the node of these."""
    model = build(1, **{name: value for name, value in LARGE.items() if name != "tokens"})
    both = {**batch(LARGE["vocabulary"], 4096), "attention_mask": torch.ones(2, 4096).long()}
    both["attention_mask"][1, 4000:] = 0
    program = capture(model, both)
    (name,) = {node.args[3].name for node in sites(program)}
    return program, name


@pytest.mark.parametrize(("documents", "chosen"), [(1, "g"), (64, "s"), (None, "s")])
def test_the_masks_at_hand_tell_what_needed_keys_cost(documents, chosen):
    """One text of 4096 tokens needs the keys before it, short documents nearly none."""
    program, name = masked()
    shown = None
    if documents is not None:
        at = torch.arange(4096, dtype=torch.int32)
        start = at - at % (4096 // documents)
        shown = {name: torch.stack([start, at + 1], -1).expand(2, 4096, 2).unsqueeze(2)}
    plan = sharded(program, shown=shown, context=8)
    assert {name for name, _ in attention_of(plan)} == {chosen}


def test_the_busiest_rank_tells_what_is_fetched():
    node = next(iter(sites(decoder(1))))
    for split, share in (("contiguous", 1.0), ("zigzag", 1.0), ("0:15|15:16", 15 / 8)):
        axis = MeshAxis("context", 2, split)
        assert needed_shares([node], axis, {}) == {node.name: share}


def test_attention_that_cannot_do_as_asked_gathers_and_says_so():
    plan = sharded(decoder(2, kv=1), exchange="heads", context=2)
    assert attention_of(plan) == {("s", "")}
    assert any("2 ranks do not divide 1 key heads" in note for note in plan.shardings[0].notes)


def test_matrices_are_divided_in_columns_then_in_rows():
    plan = sharded(decoder(2), tensor=2)
    block = "model.layers.1"
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        assert layout_of(plan, f"{block}.{name}.weight") == ["S(0,1,2)"]
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        assert layout_of(plan, f"{block}.{name}.weight") == ["S(0,1,2)"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert layout_of(plan, f"{block}.{name}.weight") == ["S(1,1,2)"]
    assert layout_of(plan, f"{block}.input_layernorm.weight") == ["R"]


@pytest.mark.parametrize("fused", [True, False])
def test_tokens_of_plain_attention_are_tokens(fused):
    plan = sharded(capture(Plain(fused), {"ids": batch(32)["input_ids"]}), context=2)
    forward, backward = collectives(plan, "context")
    assert forward == {"all-gather": 2, "all-reduce": 1}
    assert backward == {"reduce-scatter": 2}
    assert flops_per_rank(plan) == pytest.approx(1 / 2)


def test_parameters_vary_on_the_context_axis():
    plan = sharded(decoder(2), context=2, tensor=2)
    assert layout_of(plan, "model.layers.0.self_attn.q_proj.weight") == ["V", "S(0,1,2)"]
    assert layout_of(plan, "model.norm.weight")[0] == "V"


@pytest.mark.parametrize(
    "sizes",
    [{"tensor": 2}, {"tensor": 4}, {"context": 2}, {"context": 4}, {"context": 2, "tensor": 2}],
)
def test_no_work_is_repeated(sizes):
    plan = sharded(decoder(2), **sizes)
    ranks = Parallel(**sizes).size
    assert flops_per_rank(plan) == pytest.approx(1 / ranks, rel=1e-9)
    assert plan.shardings[0].notes == ()


def test_uneven_tokens_are_divided_as_evenly_as_can_be():
    plan = sharded(decoder(2, tokens=15), context=4)
    assert flops_per_rank(plan) == pytest.approx(4 / 15, rel=1e-9)


def test_no_name_is_used():
    program = decoder(2)
    inputs = tuple(
        replace(item, name=f"x{place}") if item.kind == "parameter" else item
        for place, item in enumerate(program.inputs)
    )
    plan = sharded(replace(program, inputs=inputs), tensor=2)
    assert collectives(plan, "tensor") == collectives(sharded(program, tensor=2), "tensor")


def test_heads_in_groups_are_divided_within_their_groups():
    plan = sharded(decoder(2, heads=8, kv=2), tensor=4)
    attention = plan.captured.main.graph.find_nodes(
        op="call_function", target=torch.ops.mllm.attention.default
    )
    assert len(attention) == 2
    for node in attention:
        (strategy,) = plan.shardings[0].strategies[node.name]
        assert str(strategy.inputs[0]) == "S(1,2,4)"  # the four heads of each of two groups
        assert not strategy.inputs[1].divided
    assert flops_per_rank(plan) == pytest.approx(1 / 4)


def test_heads_that_do_not_divide_run_whole_and_are_reported():
    plan = sharded(decoder(2, heads=6, kv=6, hidden=48, tokens=15), tensor=4)
    (note,) = plan.shardings[0].notes
    assert "2 mllm.attention.default of model.layers.*.self_attn whole on every rank" in note
    assert "FLOPs: 4 ranks do not divide 6, 15" in note
    assert layout_of(plan, "model.layers.0.self_attn.q_proj.weight")[0].startswith("S(")


def test_a_vocabulary_that_does_not_divide_is_divided_otherwise():
    plan = sharded(decoder(2, vocabulary=130), tensor=4)
    assert layout_of(plan, "lm_head.weight") == ["S(1,1,4)"]
    assert layout_of(plan, "model.embed_tokens.weight") == ["S(1,1,4)"]
    assert flops_per_rank(plan) == pytest.approx(1 / 4)


def test_an_operator_without_a_rule_is_reported(monkeypatch):
    program = decoder(2)
    known = shard_pass.refined(program.main)
    silu = [node for node in known.factors if "silu" in str(node.target)]
    assert silu
    fewer = {node: factors for node, factors in known.factors.items() if node not in silu}
    unruled = replace(known, factors=fewer)
    monkeypatch.setattr(shard_pass, "refined", lambda main: unruled)
    plan = make_plan(sharded(program, tensor=2).request, program, stop_after="shard")
    assert "no rule, so whole on every rank: aten.silu.default 2" in plan.shardings[0].notes


def test_experts_are_divided_and_nothing_else():
    plan = sharded(capture(Mixture(), {"ids": batch(32)["input_ids"]}), expert=2)
    assert layout_of(plan, "up") == layout_of(plan, "down") == ["S(0,1,2)"]
    for name in ("router.weight", "embed.weight", "head.weight"):
        assert layout_of(plan, name) in (["R"], ["V"])
    assert collectives(plan, "expert")[0].total() == 1  # joins what the experts made
    contractions = {
        str(node.target): plan.shardings[0].strategies[node.name][0].name
        for node in Graph(plan.captured).placed
        if plan.costs[node.name].total
    }
    assert contractions["aten.bmm.default"] == "b"
    assert contractions["aten.mm.default"].startswith("whole")


def test_stages_of_a_module_hand_values_on_as_they_are():
    plan = sharded(decoder(4, **LARGE), tensor=8, pipeline=2)
    (boundary,) = plan.boundaries
    for value in boundary.values:
        assert [str(x) for x in plan.shardings[0].sent[value]] == ["S(1,1,8)"]
        assert plan.shardings[0].layouts[value] == plan.shardings[0].sent[value]


def test_tied_parameters_are_held_alike_in_all_stages():
    plan = sharded(decoder(2, tied=True), tensor=2, pipeline=2)
    assert plan.stages[0].parameters[0] in plan.stages[1].parameters
    assert layout_of(plan, "model.embed_tokens.weight")[0].startswith("S(")


@pytest.mark.parametrize(("sizes", "divided"), [((2, 2), True), ((2, 4), False)])
def test_tied_parameters_of_modules_with_other_axes_are_whole(sizes, divided):
    first, second = (Parallel(tensor=size) for size in sizes)
    ranks = range(sum(sizes))
    modules = (
        ModuleSpec(("model.embed_tokens", "model.layers.0"), tuple(ranks[: sizes[0]]), first),
        ModuleSpec(("model.layers.1", "model.norm", "lm_head"), tuple(ranks[sizes[0] :]), second),
    )
    plan = make_plan(Request(modules), decoder(2, tied=True), stop_after="shard")
    held = [layout_of(plan, "model.embed_tokens.weight", module)[0] for module in (0, 1)]
    assert [layout.startswith("S") for layout in held] == [divided, divided]
    assert not divided or held[0] == held[1]


def test_other_programs_hold_parameters_alike():
    plan = sharded(decoder(2), context=2, tensor=2)
    given = {**plan.parameter_layouts, (0, "model.norm.weight"): plan.shardings[0].whole}
    other = sharded(decoder(2, tokens=8), given=given, context=2, tensor=2)
    assert other.parameter_layouts == given


def test_modules_on_single_ranks_have_nothing_to_decide():
    plan = sharded(decoder(2), pipeline=2)
    assert [sharding.axes for sharding in plan.shardings] == [()]
    assert not plan.shardings[0].strategies


@pytest.mark.slow
def test_eighty_layers_are_decided_in_half_a_second(monkeypatch):
    """The integer programs alone, in processor time."""
    program = decoder(80, **{**LARGE, "hidden": 8192, "heads": 64})
    spent = Counter()
    solve = shard_pass.solve

    def timed(*arguments):
        start = time.process_time()
        found = solve(*arguments)
        spent["seconds"] = max(spent["seconds"], time.process_time() - start)
        return found

    monkeypatch.setattr(shard_pass, "solve", timed)
    plan = sharded(program, tensor=8)
    assert spent["seconds"] <= 0.5
    assert flops_per_rank(plan) == pytest.approx(1 / 8)


def test_a_module_that_a_program_does_not_reach_has_nothing_to_decide():
    model = Multimodal(1, 2)
    parallel = Parallel(tensor=2)
    modules = (
        ModuleSpec(("towers", "projectors"), (0, 1), parallel),
        ModuleSpec(("language", "head"), (2, 3), parallel),
    )
    shown, read = capture(model, images("vision")), capture(model, images())
    plan = make_plan(Request(modules), shown)
    text = make_plan(Request(modules), read, plan.placement, plan.parameter_layouts)
    assert not text.shardings[0].strategies
    assert text.shardings[1].strategies
    assert text.parameter_layouts.items() <= plan.parameter_layouts.items()
