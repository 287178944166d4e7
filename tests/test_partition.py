"""Stages: cuts of any granularity, glue, replicas, skip edges, tied weights, placement."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.simulate import simulate
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.schedule import make_schedule, variant_of
from mllm_compile.passes.score import LINK, cost_of, score, stage_cost
from tests.requests import request
from tests.small_graphs import capture
from tests.small_models import Decoder, Multimodal, batch


def plan_of(model, inputs, *modules, **options):
    return make_plan(request(*modules), capture(model, inputs), **options)


def crossings(plan):
    return {(b.source, b.target): b.values for b in plan.boundaries}


def gradients(plan):
    return {(b.source, b.target) for b in plan.boundaries if b.gradients}


def owners(plan, index):
    nodes = Graph(plan.captured).by_name
    return {nodes[name].meta["owner"] for name in plan.stages[index].nodes}


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6])
def test_one_hidden_state_crosses_every_cut(pipeline):
    plan = plan_of(Multimodal(0, layers=6), batch(), ("", pipeline))
    assert crossings(plan).keys() == {(s, s + 1) for s in range(pipeline - 1)}
    assert all(len(values) == 1 for values in crossings(plan).values())


def test_cuts_fall_inside_blocks():
    plan = plan_of(Multimodal(0, layers=3), batch(), ("language", 4))
    both = [owners(plan, k) & owners(plan, k + 1) for k in range(3)]
    assert {f"language.layers.{k}" for k in range(3)} & set.union(*both)


def test_stages_are_balanced_on_true_work():
    model = Multimodal(0, layers=8)
    model.language.layers[:4].requires_grad_(False)
    model.language.embed.requires_grad_(False)
    plan = plan_of(model, batch(), ("language", 2))
    work = [stage_cost(plan, stage) for stage in plan.stages]
    totals = [cost.forward + cost.input_grad + cost.weight_grad for cost in work]
    assert max(totals) <= 1.1 * min(totals)
    assert work[0].forward > 1.5 * work[1].forward
    assert gradients(plan) == {(0, 1)}  # of the first trained half layer


def test_projector_and_head_sink_to_the_language_model():
    modules = (("towers.vision", 1), ("language", 2))
    plan = plan_of(Multimodal(), batch("vision"), *modules)
    encoder, first, last = plan.stages
    assert "projectors.vision.weight" in first.parameters
    assert "head.weight" in last.parameters
    assert {name.split(".")[0] for name in encoder.parameters} == {"towers"}
    assert set(crossings(plan)) == {(0, 1), (1, 2)}
    assert plan.home["projectors.vision.weight"] == 1
    assert plan.home["head.weight"] == 2


class Twice(nn.Module):
    """One encoder that is called for two kinds of input, side by side."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        self.last = nn.Linear(4, 4)

    def forward(self, still, moving):
        return self.last(torch.cat([self.encoder(still), self.encoder(moving)])).sum()


def test_both_calls_of_a_module_are_cut_at_the_same_places():
    inputs = {"still": torch.randn(2, 4), "moving": torch.randn(3, 4)}
    plan = plan_of(Twice(), inputs, ("encoder", 3), ("last", 1))
    held = [set(stage.parameters) for stage in plan.stages]
    assert all(len(held[k]) == 4 for k in range(3))
    assert not held[0] & held[1]
    assert not held[1] & held[2]
    assert crossings(plan)[0, 1] != crossings(plan)[1, 2]
    assert all(len(crossings(plan)[k, k + 1]) == 2 for k in range(3))


def test_uncovered_parts_are_cut_with_the_module_that_they_follow():
    plan = plan_of(Multimodal(1, layers=4), batch("vision"), ("towers", 3))
    assert set(crossings(plan)) == {(0, 1), (1, 2)}
    work = [stage_cost(plan, stage) for stage in plan.stages]
    totals = [cost.forward + cost.input_grad + cost.weight_grad for cost in work]
    assert max(totals) < 1.6 * min(totals)
    assert set(plan.home) == set(Graph(plan.captured).parameters)


def test_encoders_are_parallel_stages():
    modules = (("towers.vision", 1), ("towers.audio", 2), ("language", 2))
    plan = plan_of(Multimodal(2), batch("vision", "audio"), *modules)
    assert set(crossings(plan)) == {(0, 3), (1, 2), (2, 3), (3, 4)}


def test_equal_encoders_are_told_apart_by_path():
    modules = (("towers.vision", 2), ("towers.audio", 2), ("language", 1))
    plan = plan_of(Multimodal(2), batch("vision", "audio"), *modules)
    for stage in plan.stages[:4]:
        name = "vision" if stage.module == 0 else "audio"
        assert all(parameter.startswith(f"towers.{name}") for parameter in stage.parameters)


def test_skip_edges_lead_straight_to_their_readers():
    modules = (("towers", 1), ("language", 4))
    model = Multimodal(1, layers=4, deep=3, depth=3)
    model.projectors.requires_grad_(False)
    plan = plan_of(model, batch("vision"), *modules)
    to_language = {target for source, target in crossings(plan) if source == 0}
    assert len(to_language) >= 3
    assert all((0, target) in gradients(plan) for target in to_language)


def test_nothing_flows_back_into_a_frozen_encoder():
    model = Multimodal(1, deep=2)
    model.towers.requires_grad_(False)
    plan = plan_of(model, batch("vision"), ("towers", 1), ("language", 2))
    assert {source for source, _ in gradients(plan)} == {1}
    cost = stage_cost(plan, plan.stages[0])
    assert cost.forward > 0
    assert (cost.input_grad, cost.weight_grad, cost.saved_bytes) == (0, 0, 0)


def test_a_frozen_encoder_and_projector_have_no_backward():
    model = Multimodal(1)
    model.towers.requires_grad_(False)
    model.projectors.requires_grad_(False)
    plan = plan_of(model, batch("vision"), (("towers", "projectors"), 1), ("language", 2))
    kinds = {action.kind for action in plan.schedule.actions[0]}
    assert kinds == {"F", "SEND_F"}


def test_a_tied_weight_stands_in_several_stages_and_has_one_home():
    plan = plan_of(Multimodal(1, tied=True), batch("vision"), ("towers", 1), ("", 3))
    name = "language.embed.weight"
    assert [stage.index for stage in plan.stages if name in stage.parameters] == [1, 3]
    assert plan.home[name] == 1
    assert {site: stage for site, stage in plan.placement.items() if site[1] == name} == {
        ("language.embed", name, 0): 1,
        ("head", name, 0): 3,
    }


class Rotary(nn.Module):
    """Tables and masks made from inputs alone, read by every layer; integer positions too."""

    def __init__(self, layers=4, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.register_buffer("frequencies", torch.arange(width) / width)

    def forward(self, ids):
        table = (ids.cumsum(-1)[..., None] * self.frequencies).cos()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x * table).masked_fill((ids == 3)[..., None], 0.0)
        return x.square().mean()


def test_values_made_from_inputs_are_replicated_not_sent():
    plan = plan_of(Rotary(), {"ids": torch.randint(0, 16, (2, 5))}, ("", 4))
    assert all(len(values) == 1 for values in crossings(plan).values())
    replicated = [set(stage.replicated) for stage in plan.stages]
    assert {"cumsum", "cos"} <= replicated[0] & replicated[1] & replicated[2] & replicated[3]


class Noisy(nn.Module):
    """One random draw without any parameter upstream, read by two layers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        noise = torch.rand(4)
        return (self.b(self.a(x + noise)) * noise).sum()


def test_random_draws_are_not_repeated():
    plan = plan_of(Noisy(), {"x": torch.randn(2, 4)}, ("", 2))
    assert sum(name.startswith("rand") for stage in plan.stages for name in stage.nodes) == 1
    assert not any(name.startswith("rand") for stage in plan.stages for name in stage.replicated)


class Routed(nn.Module):
    """An integer value that depends on parameters crosses the cut, without gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        return self.b(h)[torch.arange(2), h.argmax(-1)].sum()


def test_integers_cross_without_gradient():
    plan = plan_of(Routed(), {"x": torch.randn(2, 4)}, ("a", 1), ("b", 1))
    (boundary,) = plan.boundaries
    assert len(boundary.gradients) == 1
    assert boundary.gradients[0].startswith(("addmm", "linear"))


class Counting(nn.Module):
    """Batch normalisation updates its buffers, the counter among them from no parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last(h).sum(), h


def test_outputs_and_frozen_parts_keep_their_stage():
    program = capture(Counting().eval(), {"x": torch.randn(3, 4)}, num_outputs=2)
    plan = make_plan(request(("first", 1), (("norm", "last"), 1)), program)
    assert plan.stages[0].parameters == ("first.weight", "first.bias")
    assert "norm.weight" in plan.stages[1].parameters


def test_unknown_paths_are_refused_with_close_matches():
    with pytest.raises(RequestError, match=r"did you mean.*towers\.vision"):
        plan_of(Multimodal(), batch("vision"), ("tower.vision", 1))


def test_modules_in_the_wrong_order_are_refused():
    with pytest.raises(RequestError, match=r"modules language and towers.*list towers before"):
        plan_of(Multimodal(), batch("vision"), ("language", 1), ("towers", 1))


class Circular(nn.Module):
    """The first module reads the second and is read by it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.a(self.b(self.a(x))).sum()


def test_circular_modules_are_refused():
    with pytest.raises(
        RequestError,
        match=r"a and b: .*a reads %\w+ \(b\) of b, which in turn reads %.*its path a list",
    ):
        plan_of(Circular(), {"x": torch.randn(2, 4)}, ("a", 1), ("b", 1))


class Merging(nn.Module):
    """An encoder that puts its features into the text by itself."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, pixels, text):
        return torch.where(text > 0, self.map(pixels), text)


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.embed, self.last = Merging(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pixels, text):
        return self.last(self.encoder(pixels, self.embed(text))).sum()


def test_a_merge_inside_an_encoder_runs_where_the_text_is():
    inputs = {"pixels": torch.randn(2, 4), "text": torch.randn(2, 4)}
    plan = plan_of(Merged(), inputs, ("encoder", 1), (("embed", "last"), 1))
    assert plan.stages[0].parameters == ("encoder.map.weight", "encoder.map.bias")
    assert "encoder" in owners(plan, 1)
    assert set(crossings(plan)) == {(0, 1)}


def test_more_stages_than_places_to_cut_are_refused():
    with pytest.raises(RequestError, match=r"\(model\): pipeline: expected at most 4, .* got 40"):
        plan_of(Circular(), {"x": torch.randn(2, 4)}, ("", 40))


def variant_plans(first, *others):
    """Plans of programs of one model, cut by the placement of those before."""
    model = Multimodal(2, 4, tied=True, deep=2)
    modules = (("towers.vision", 2), ("towers.audio", 1), ("language", 3))
    plans, placement = [], {}
    for inputs in (first, *others):
        plans.append(plan_of(model, inputs, *modules, placement=placement))
        placement = plans[-1].placement
    return plans


def stages_of_parameters(plan):
    return {name: s.index for s in plan.stages for name in s.parameters if "embed" not in name}


def test_an_absent_modality_leaves_stages_empty():
    full, text = variant_plans(batch("vision", "audio"), batch())
    assert [bool(stage.nodes) for stage in text.stages] == [False] * 3 + [True] * 3
    assert {stage.ranks for stage in text.stages} == {stage.ranks for stage in full.stages}
    assert stages_of_parameters(text).items() <= stages_of_parameters(full).items()
    assert text.placement == full.placement
    assert text.home == full.home


def test_more_images_give_the_same_stages():
    more = batch("vision", "audio")
    more["vision"] = torch.randn(2, 9, 12)
    full, other = variant_plans(batch("vision", "audio"), more)
    assert [s.parameters for s in other.stages] == [s.parameters for s in full.stages]
    assert [s.nodes for s in other.stages] == [s.nodes for s in full.stages]


def test_a_modality_that_appears_later_is_cut_then():
    text, audio, full = variant_plans(batch(), batch("audio"), batch("vision", "audio"))
    assert all(stage.nodes for stage in full.stages)
    for before, after in ((text, audio), (audio, full)):
        assert stages_of_parameters(before).items() <= stages_of_parameters(after).items()
        assert before.placement.items() <= after.placement.items()


@pytest.mark.parametrize("cut", range(1, 12))
def test_any_placement_is_kept(cut):
    """Hand-made placements, cut at any site: the language model obeys them."""
    program = capture(Decoder(8, 2), {"x": torch.randn(1, 3, 8)})
    program = replace(program, num_outputs=1)
    sites = list(Graph(program).sites)
    order = sorted(sites, key=lambda site: Graph(program).index[Graph(program).sites[site]])
    nodes = Graph(program).sites
    limit = Graph(program).index[nodes[order[cut]]]
    placement = {s: int(Graph(program).index[nodes[s]] >= limit) for s in sites}
    plan = make_plan(request(("", 2)), program, placement)
    assert placement.items() <= plan.placement.items()
    assert set(plan.placement) - set(placement) <= set(Graph(program).operations)


def test_contradicting_placements_are_refused():
    program = capture(Multimodal(0, 2), batch())
    placement = {("language.layers.0.q", "language.layers.0.q.weight", 0): 1}
    placement |= {("language.layers.1.q", "language.layers.1.q.weight", 0): 0}
    with pytest.raises(RequestError, match=r"language\.layers\.1\.q.*own stage 0"):
        make_plan(request(("", 2)), program, placement)


def test_long_steps_are_extrapolated():
    program = capture(Multimodal(1, 4), batch("vision"))
    modules = (("towers", 1), ("language", 2))
    plan = make_plan(request(*modules, microbatches=40), program)
    whole = cost_of(plan)
    variants = [variant_of(plan)] * 40
    schedule = make_schedule(plan.stages, variants)
    step = simulate(schedule, plan.stages, variants, [whole] * 40, LINK)
    assert score(plan)[0] == pytest.approx(step.step_time, rel=1e-9)


class Shared(nn.Module):
    """A part that the request does not name, read by the last module, and at times by the first."""

    def __init__(self):
        super().__init__()
        self.spare, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, early=None):
        h = self.spare(x)
        return (self.last(self.first(x if early is None else h + early)) + self.last(h)).sum()


def test_uncovered_parts_that_would_have_to_move_are_refused():
    x = torch.randn(2, 4)
    late, early = (capture(Shared(), inputs) for inputs in ({"x": x}, {"x": x, "early": x}))
    modules = (("first", 1), ("last", 1))
    placement = make_plan(request(*modules), late).placement
    assert placement["spare", "spare.weight", 0] == 1
    assert make_plan(request(*modules), early).placement["spare", "spare.weight", 0] == 0
    with pytest.raises(RequestError, match=r"which no module.*to run before first"):
        make_plan(request(*modules), early, placement)


def test_the_same_request_gives_the_same_plan():
    program = capture(Multimodal(2, 4), batch("vision", "audio"))
    modules = (("towers.vision", 1), ("towers.audio", 2), ("language", 3))
    first, second = (make_plan(request(*modules), program) for _ in range(2))
    assert first == second
    again = make_plan(request(*modules), program, first.placement)
    assert again == first
