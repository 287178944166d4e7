"""Every law accepts a good plan and rejects one with a single decision changed."""

from dataclasses import replace

import pytest
from torch import nn

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.errors import PlanError, RequestError
from mllm_compile.compiler.pass_runner import Pass, check, run_passes
from mllm_compile.passes import invariants, sharding_laws
from mllm_compile.passes.pipeline import PASSES, make_plan
from tests.requests import request
from tests.small_graphs import capture
from tests.small_models import Multimodal, batch


@pytest.fixture(scope="module")
def plan():
    """A frozen and a trained encoder, skip edges, a tied head, a decoder of three stages."""
    model = Multimodal(2, 4, tied=True, deep=2)
    model.towers.vision.requires_grad_(False)
    program = capture(model, batch("vision", "audio"))
    modules = (("towers.vision", 1), ("towers.audio", 1), ("language", 3))
    return make_plan(request(*modules), program)


def stage(plan, index, **changes):
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


def boundary(plan, index, **changes):
    boundaries = list(plan.boundaries)
    boundaries[index] = replace(boundaries[index], **changes)
    return replace(plan, boundaries=tuple(boundaries))


def with_open_split(plan):
    *others, last = plan.request.modules
    modules = (*others, replace(last, context_split="planned"))
    return replace(plan, request=replace(plan.request, modules=modules))


def without_gradient(plan):
    index = next(k for k, b in enumerate(plan.boundaries) if b.gradients)
    return boundary(plan, index, gradients=())


def with_gradient(plan):
    index = next(k for k, b in enumerate(plan.boundaries) if b.values and not b.gradients)
    return boundary(plan, index, gradients=plan.boundaries[index].values)


def moved(plan, index, node):
    """``node`` runs in stage ``index`` instead."""
    stages = [
        replace(s, nodes=tuple(n for n in s.nodes if n != node) + ((node,) * (s.index == index)))
        for s in plan.stages
    ]
    return replace(plan, stages=tuple(stages))


def tampered(plan, name, value):
    return replace(plan, **{name: {**getattr(plan, name), **value}})


def reads_twice(plan):
    """As if the first buffer-like input were updated by the program."""
    name = "language.embed.weight"
    inputs = [
        replace(item, kind="buffer") if item.name == name else item for item in plan.captured.inputs
    ]
    return replace(plan, captured=replace(plan.captured, inputs=tuple(inputs), updates=(name,)))


LAST = 4
REJECTED = [
    (
        invariants.needs_grad_reaches_loss,
        lambda p: replace(p, needs_grad=p.needs_grad | {p.stages[0].nodes[0]}),
        "gradient exactly where one is returned",
    ),
    (
        invariants.gradients_follow_edges,
        lambda p: replace(
            p, grad_edges=p.grad_edges | {(p.stages[0].nodes[0], p.stages[4].nodes[-1])}
        ),
        "an edge whose reader",
    ),
    (
        invariants.only_trainable_parameters_train,
        lambda p: replace(
            p, needs_grad=p.needs_grad | {n.name for n in p.captured.main.graph.nodes}
        ),
        r"parameter towers.vision.patch.weight",
    ),
    (invariants.every_node_has_a_cost, lambda p: replace(p, costs={}), "expected a cost"),
    (
        invariants.every_node_has_a_module,
        lambda p: tampered(p, "module_of", {p.stages[2].nodes[5]: 7}),
        "a module of the request",
    ),
    (invariants.stages_match_request, lambda p: stage(p, 1, ranks=(9,)), r"\(9,\)"),
    (
        invariants.stages_cover_nodes,
        lambda p: stage(p, 2, nodes=p.stages[2].nodes[1:]),
        "each placed node in exactly one stage",
    ),
    (
        invariants.stages_cover_nodes,
        lambda p: stage(p, LAST, replicated=()),
        "free nodes, all of them",
    ),
    (
        invariants.replicas_are_free,
        lambda p: stage(p, 3, replicated=(p.stages[2].nodes[0],)),
        "in stage 3: expected no parameter upstream",
    ),
    (
        invariants.modules_hold_their_nodes,
        lambda p: moved(p, 0, p.stages[1].nodes[-1]),
        "in stage 0: expected a stage of the node's module",
    ),
    (
        invariants.values_flow_upwards,
        lambda p: moved(p, LAST, p.stages[2].nodes[0]),
        r"\(4\) -> .* \(2\): expected a reader in the same or a higher stage",
    ),
    (
        invariants.stages_are_complete,
        lambda p: replace(p, boundaries=p.boundaries[:-1]),
        "in stage 4.*a boundary that brings it",
    ),
    (
        invariants.one_boundary_per_target,
        lambda p: replace(p, boundaries=(*p.boundaries, p.boundaries[-1])),
        "from stage 3 to 4: expected one boundary",
    ),
    (invariants.gradients_cross_where_needed, without_gradient, "from stage 2 to 1"),
    (invariants.gradients_cross_where_needed, with_gradient, "from stage 2 to 0"),
    (
        invariants.stage_parameters_are_read,
        lambda p: stage(p, 0, parameters=p.stages[0].parameters[1:]),
        "in stage 0: expected a parameter exactly where it is read",
    ),
    (
        invariants.parameters_have_one_home,
        lambda p: tampered(p, "home", {"language.norm.weight": 0}),
        "language.norm.weight in stage 0: expected a home",
    ),
    (
        invariants.parameters_have_one_home,
        lambda p: replace(p, home={k: v for k, v in p.home.items() if "norm" not in k}),
        "one home per parameter",
    ),
    (
        invariants.placement_is_respected,
        lambda p: tampered(p, "placement", {("language.norm", "language.norm.weight", 0): 2}),
        "language.norm.weight read by .*, stage 4: expected the stage of its placement",
    ),
    (
        invariants.token_splits_are_decided,
        with_open_split,
        r"language: expected a split other than 'planned'",
    ),
    (invariants.updated_buffers_stay, reads_twice, r"language.embed.weight in stages \[2, 4\]"),
    (
        invariants.schedule_ends,
        lambda p: replace(p, schedule=Schedule({**p.schedule.actions, 0: ()})),
        "0F0",
    ),
    (invariants.schedule_ends, lambda p: replace(p, schedule=None), "schedule: expected one"),
]


def all_laws():
    return [law for each in PASSES for law in each.laws]


@pytest.mark.parametrize("law", all_laws(), ids=lambda law: law.__name__)
def test_a_good_plan_is_accepted(law, plan):
    law(plan)


@pytest.mark.parametrize(("law", "change", "message"), REJECTED)
def test_a_broken_plan_is_rejected(law, change, message, plan):
    with pytest.raises(PlanError, match=message):
        law(change(plan))


def test_every_law_is_tested_and_says_what_it_is():
    elsewhere = set(sharding_laws.SHARD)  # tests/test_sharding_laws.py
    assert {law for law, _, _ in REJECTED} == set(all_laws()) - elsewhere
    for law in all_laws():
        assert law.__doc__.strip().endswith(".")


def test_the_runner_checks_earlier_laws_after_later_passes(plan):
    def spoil(plan):
        return replace(plan, needs_grad=frozenset())

    passes = (Pass(lambda p: p, (invariants.needs_grad_reaches_loss,)), Pass(spoil, ()))
    with pytest.raises(PlanError, match=r"after pass spoil: law needs_grad_reaches_loss \(A value"):
        run_passes(passes, plan)


def test_the_runner_stops_where_told_and_shows_every_plan(plan):
    seen = []
    made = make_plan(
        plan.request,
        plan.captured,
        stop_after="partition",
        observers=(lambda name, plan: seen.append((name, bool(plan.stages))),),
    )
    assert seen == [("annotate", False), ("partition", True)]
    assert made.schedule is None
    assert made == replace(plan, schedule=None, shardings=())
    with pytest.raises(RequestError, match=r"one of .*annotate.*got 'cut'"):
        make_plan(plan.request, plan.captured, stop_after="cut")


def test_a_law_names_its_pass(plan):
    with pytest.raises(PlanError, match="after pass annotate: law every_node_has_a_cost"):
        check(invariants.every_node_has_a_cost, replace(plan, costs={}), after="annotate")


def test_a_model_without_trainable_parameters_is_legal():
    model = Multimodal(1, 2).requires_grad_(False)
    made = make_plan(request(("towers", 1), ("", 2)), capture(model, batch("vision")))
    assert not made.needs_grad
    assert not any(b.gradients for b in made.boundaries)
    assert {a.kind for row in made.schedule.actions.values() for a in row} == {
        "F",
        "SEND_F",
        "RECV_F",
    }


def test_unused_parameters_are_accounted_for():
    model = Multimodal(1, 2)
    model.language.spare = nn.Linear(3, 3)
    model.spare = nn.Linear(3, 3)
    modules = (("towers", 1), ("language", 2))
    made = make_plan(request(*modules), capture(model, batch("vision")))
    assert made.home["language.spare.weight"] == 1
    assert set(made.home) == {name for name, _ in model.named_parameters()}
