"""Graphs of one rank: the plain model's loss and gradients, whatever is divided."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.layout import Layout, R, S
from mllm_compile.passes.lower.extract import extract
from mllm_compile.passes.lower.local_law import ranks_hold_what_is_planned
from mllm_compile.passes.lower.localize import localize
from mllm_compile.passes.lower.lower import lower
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.sharding.conversions import conversions
from tests.localized import Decisions, assert_exact, counts, planned, programs_of, run_rank
from tests.thread_ranks import run_ranks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x):
        return (self.down(gelu(self.up(x))) ** 2).mean()


class Layer(nn.Module):
    """Grouped-query attention and an MLP, as every decoder has them."""

    def __init__(self, width=12, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, groups * self.size) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x, mask):
        h = self.norm1(x)
        counts = (self.heads, self.groups, self.groups)
        q, k, v = (
            part(h).unflatten(-1, (count, self.size)).transpose(1, 2)
            for part, count in zip((self.q, self.k, self.v), counts, strict=True)
        )
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + self.o(out.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Token and position embeddings, layers, a head, the loss of the next token."""

    def __init__(self, layers=1, width=12, vocabulary=24, *, masked=False, tied=False):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.masked = masked
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids) + self.place(positions)
        mask = None
        if self.masked:
            near = (positions[:, None] - positions[None, :]).abs() < 3
            mask = near[None, None] & (ids != 0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(self.norm(x))[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def double(model, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def text(tokens=8, samples=2):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 24, (samples, tokens), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


MEGATRON = {
    r"(.*\.)?(up|q|k|v)\.(weight|bias)": "S(0,1,{n})",
    r"(.*\.)?(down|o).weight": "S(1,1,{n})",
    r"(embed|head).weight": "S(0,1,{n})",
}


def layouts(n, table=MEGATRON):
    return {name: text.format(n=n) for name, text in table.items()}


class Experts(nn.Module):
    """Every row goes to one of six experts, and is weighted by its gate."""

    def __init__(self, width=4, experts=6):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, width, 8))
        self.down = nn.Parameter(torch.empty(experts, 8, width))

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        experts = torch.arange(self.up.shape[0], device=x.device)
        offsets = (chosen[:, None] == experts).sum(0).cumsum(0).to(torch.int32)
        hidden = gelu(torch.ops.mllm.grouped_mm(x[order], self.up, offsets))
        out = torch.ops.mllm.grouped_mm(hidden, self.down, offsets) * gates[order][:, None]
        return (out**2).sum()


def decided(model, batch, n=2, split="contiguous", tokens="", **sizes):
    """(plan, values): tokens along the context axis, the usual matrices along the tensor axis."""
    plan, values = planned(model, batch, split, **sizes)
    decisions = Decisions(plan)
    if "context" in sizes:
        decisions.context()
    if "tensor" in sizes:
        decisions.agree("tensor", layouts(sizes["tensor"]), tokens)
    return decisions, values


def kinds(log, axis):
    """How often a rank called each collective of an axis."""
    return Counter(what for name, what, _ in log if name == axis)


@pytest.mark.parametrize("ranks", [2, 3])
def test_column_then_row(ranks):
    model, batch = double(Mlp()), {"x": torch.randn(2, 4, 6, dtype=torch.float64)}
    decisions, values = decided(model, batch, tensor=ranks)
    programs, logs = assert_exact(model, batch, decisions.plan_with(), values)
    assert counts(programs[0, (0,)]) == {("tensor", "R", "P"): 1, ("tensor", "P", "R"): 1}
    assert [what for _, what, _ in logs[0]] == ["all_reduce sum"]


@pytest.mark.parametrize("masked", [False, True])
def test_heads_and_vocabulary(masked):
    """Nothing is gathered: heads, hidden units, vocabulary and classes are divided throughout."""
    model, batch = double(Decoder(2, masked=masked)), text()
    decisions, values = decided(model, batch, tensor=2)
    programs, logs = assert_exact(model, batch, decisions.plan_with(), values)
    assert {want for _, _, want in counts(programs[0, (0,)])} == {"P", "R"}
    assert set(kinds(logs[0], "tensor")) == {"all_reduce sum", "all_reduce max"}


@pytest.mark.parametrize(("split", "ranks"), [("contiguous", 3), ("zigzag", 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_tokens(split, masked, ranks):
    """Keys and values are gathered, their gradients reduce-scattered: twice per layer."""
    model, batch = double(Decoder(2, masked=masked)), text(7)
    decisions, values = decided(model, batch, split=split, context=ranks)
    _, logs = assert_exact(model, batch, decisions.plan_with(), values)
    # The label shift cuts the logits, which no rule divides: one gather more.
    assert kinds(logs[0], "context")["all_gather"] == 2 * 2 + 1
    assert kinds(logs[0], "context")["reduce_scatter"] == 2 * 2 + 1


def test_a_rank_without_tokens():
    model, batch = double(Decoder(1)), text(3)
    decisions, values = decided(model, batch, context=4)
    assert_exact(model, batch, decisions.plan_with(), values)


RESIDUAL = r"(add(_\d+)?|native_layer_norm.*)"


def test_sequence_parallelism():
    """What lies between the matrices is divided over tokens: gathered before, scattered after."""
    model, batch = double(Decoder(2)), text(8)
    decisions, values = decided(model, batch, tensor=2, tokens=RESIDUAL)
    _, logs = assert_exact(model, batch, decisions.plan_with(), values)
    assert kinds(logs[0], "tensor")["reduce_scatter"] >= 2 * 2
    assert kinds(logs[0], "tensor")["all_gather"] >= 2 * 2


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("tokens", ["", RESIDUAL], ids=["heads", "nested tokens"])
def test_tokens_and_heads(split, tokens):
    """Both axes; with sequence parallelism they divide one factor."""
    model, batch = double(Decoder(2)), text(8)
    decisions, values = decided(model, batch, 2, split, tokens, context=2, tensor=2)
    assert_exact(model, batch, decisions.plan_with(), values)


@pytest.mark.parametrize("sent", [None, ("S(1,1,8)", "S(2,1,2)")], ids=["whole", "divided"])
def test_stages(sent):
    """Values between stages are whole unless the plan says otherwise; so are their gradients."""
    model, batch = double(Decoder(2)), text(8)
    decisions, values = decided(model, batch, context=2, tensor=2, pipeline=2)
    hidden = {v: model.embed.weight for b in decisions.plan.boundaries for v in b.gradients}
    leaves = tuple(map(Layout.parse, sent)) if sent else None
    plan = decisions.plan_with(dict.fromkeys(hidden, leaves) if sent else {})
    programs, _ = assert_exact(model, batch, plan, values)
    (value,) = hidden
    (placeholder,) = [
        node
        for node, name in zip(
            programs[1, (0, 0)].forward.graph.graph.nodes,
            programs[1, (0, 0)].forward.inputs,
            strict=False,
        )
        if name == f"%{value}"
    ]
    assert list(placeholder.meta["val"].shape) == ([2, 4, 6] if sent else [2, 8, 12])


def test_a_tied_weight_and_frozen_parts():
    model, batch = double(Decoder(2, tied=True)), text()
    model.layers[0].requires_grad_(False)
    decisions, values = decided(model, batch, context=2, tensor=2)
    assert_exact(model, batch, decisions.plan_with(), values)


def test_a_frozen_model_has_no_backward_and_no_copies():
    model, batch = double(Decoder(1)).requires_grad_(False), text()
    decisions, values = decided(model, batch, context=2, tensor=2)
    plan = decisions.plan_with()
    programs = programs_of(plan)

    def body(places):
        return run_rank(plan, programs, places, values, model)[0]

    losses, _ = run_ranks({"context": 2, "tensor": 2}, body)
    for loss in losses:
        torch.testing.assert_close(loss, model(**batch), rtol=1e-12, atol=1e-12)
    for program in programs.values():
        assert program.input_grad is program.weight_grad is None
        pairs = {(have, want) for _, have, want in counts(program)}
        assert not pairs & {("R", "V"), ("V", "R")}


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts(ranks):
    model, batch = double(Experts()), {"x": torch.randn(10, 4, dtype=torch.float64)}
    plan, values = planned(model, batch, expert=ranks)
    divided = {"up": f"S(0,1,{ranks})", "down": f"S(0,1,{ranks})"}
    plan = Decisions(plan).agree("expert", divided).plan_with()
    assert_exact(model, batch, plan, values)


def test_new_nodes_say_where_they_come_from():
    model, batch = double(Decoder(1)), text()
    decisions, _ = decided(model, batch, context=2, tensor=2)
    plan = decisions.plan_with()
    stage = extract(plan, plan.stages[0])
    local = localize(stage, plan, 0, {"context": 1, "tensor": 0})
    assert (local.inputs, local.outputs) == (stage.inputs, stage.outputs)
    made = [node for node in local.graph.graph.nodes if node.op == "call_function"]
    assert all({"val", "owner", "where", "grad"} <= set(node.meta) for node in made)
    owners = {n.meta["owner"] for n in made if str(n.target) == "mllm.convert.default"}
    assert "layers.0" in owners
    again = localize(stage, plan, 0, {"context": 1, "tensor": 0})
    assert str(again.graph.graph) == str(local.graph.graph)


@pytest.mark.parametrize("exchange", ["gather", "needed"])
def test_the_conversions_are_those_of_the_plan(exchange):
    """What the shard pass counted is what stands in the graph, and the graph is right."""
    model, batch = double(Decoder(2)), text(8)
    plan, values = planned(model, batch, exchange=exchange, context=2, tensor=2)
    plan = make_plan(plan.request, plan.captured)
    programs, _ = assert_exact(model, batch, plan, values)
    expected = Counter(
        (item.axis, item.have.kind, item.want.kind)
        for item in conversions(plan, 0)
        if {item.have.kind, item.want.kind} != {"R", "V"}
    )
    if exchange == "gather":  # the query positions of the causal intervals
        expected["context", "R", "S"] += 1
    assert counts(programs[0, (0, 0)]) == expected


def causal_steps(local):
    """The nodes by which lowering makes the intervals of a divided causal attention."""
    nodes = local.graph.graph.nodes
    return {str(n.target): n for n in nodes if n.name.startswith("causal_intervals")}


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        ("aten.add.Tensor", lambda args: (args[0], 2), "causal intervals, got aten.add.Tensor"),
        ("aten.mul.Tensor", lambda args: (args[0], 5), "within 6 keys.*got .* within 5 keys"),
        ("aten.minimum.default", lambda args: args[::-1], "within 6 keys.*got .* up to 0 "),
    ],
)
def test_causal_intervals_of_divided_queries_are_held_to_them(step, change, message):
    model, batch = double(Decoder(1)), text(6)
    decisions, _ = decided(model, batch, context=2)
    plan, places = decisions.plan_with(), {"context": 1}
    stage = extract(plan, plan.stages[0])
    local = localize(stage, plan, 0, places)
    ranks_hold_what_is_planned(local, stage, plan, 0, places)
    steps = causal_steps(local)
    steps[step].args = change(steps[step].args)
    with pytest.raises(PlanError, match=message):
        ranks_hold_what_is_planned(local, stage, plan, 0, places)


@pytest.mark.parametrize(
    ("argument", "value"), [("queries", "0:6|6:8"), ("keys", "0:6|6:8"), ("causal", False)]
)
def test_attention_that_fetches_its_keys_is_held_to_its_splits(argument, value):
    model, batch = double(Decoder(1)), text(8)
    plan, _ = planned(model, batch, exchange="needed", context=2)
    plan, places = make_plan(plan.request, plan.captured), {"context": 1}
    stage = extract(plan, plan.stages[0])
    local = localize(stage, plan, 0, places)
    ranks_hold_what_is_planned(local, stage, plan, 0, places)
    (node,) = local.graph.graph.find_nodes(
        op="call_function", target=torch.ops.mllm.context_attention.default
    )
    names = [item.name for item in node.target._schema.arguments]
    node.update_arg(names.index(argument), value)
    with pytest.raises(PlanError, match=f"context_attention.*got {value}"):
        ranks_hold_what_is_planned(local, stage, plan, 0, places)


def test_without_axes_nothing_changes():
    plan, _ = planned(double(Mlp()), {"x": torch.randn(2, 4, 6, dtype=torch.float64)})
    stage = extract(plan, plan.stages[0])
    assert localize(stage, plan, 0, {}) is stage


def broken(target, change, **sizes):
    """Lowering a plan in which the strategy of one operator was changed."""
    decisions, _ = decided(double(Decoder(1)), text(), **sizes)
    node = next(node for node in decisions.placed if target in str(node.target))
    decisions.chosen[node] = [change(strategy) for strategy in decisions.chosen[node]]
    return lower(decisions.plan_with(), decisions.plan.stages[0], dict.fromkeys(sizes, 0))


@pytest.mark.parametrize(
    ("target", "change", "message"),
    [
        (
            "aten.mm",
            lambda s: replace(s, outputs=(S(1, 1, 2),)),
            r"%mm_default = aten.mm.default .*expected \[",
        ),
        ("aten.mm", lambda s: replace(s, inputs=(R, S(0, 1, 2))), "a call that fits"),
        ("aten.mm", lambda s: replace(s, inputs=(R,)), "expected 2 inputs"),
        (
            "aten.mm",
            lambda s: replace(s, special="k"),
            r"%mm_default = aten.mm.default, divided along tensor",
        ),
        ("aten.embedding", lambda s: replace(s, inputs=(S(0, 12, 2), R)), "2 equal blocks"),
        (
            "mllm.attention",
            lambda s: replace(s, inputs=(S(0, 1, 3), R, R)),
            r"%expand_default: tensor: .*a multiple of 3",
        ),
    ],
    ids=["result", "operands", "count", "special", "blocks", "size"],
)
def test_strategies_that_do_not_fit_are_refused(target, change, message):
    with pytest.raises(PlanError, match=message):
        broken(target, change, tensor=2)
