"""Lowering: hand-cut stages, run one after another, give autograd's gradients and keep no more."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.captured import Captured, Input, Signature
from mllm_compile.compiler.flow import flow
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.lower import lower
from mllm_compile.passes.lower.transfers import transfers
from mllm_compile.runtime.live import uses_of

ALL = ("embed", "a", "norm", "b", "c")


class Net(nn.Module):
    """Skip edges, a tied weight, a transposed boundary value and an integer one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.randn(7, 4))
        self.a = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(torch.randn(4, 4))
        self.c = nn.Parameter(torch.randn(4, 4))

    def forward(self, ids, scale):
        h = torch.nn.functional.embedding(ids, self.embed)
        h = torch.nn.functional.gelu(h @ self.a)
        t = h.transpose(0, 1)
        u = torch.nn.functional.layer_norm(h, (4,), self.norm, None) @ self.b
        w = t.transpose(0, 1) * scale + u
        v = torch.softmax(w @ self.c + h, -1)
        logits = v @ self.embed.t()
        return (logits.sin() ** 2).sum()


def captured(model, batch, frozen=()):
    names = [name for name, _ in model.named_parameters()]

    def forward(*flat):
        state = dict(zip(names, flat, strict=False))
        return (torch.func.functional_call(model, state, tuple(flat[len(names) :])),)

    values = [*(p.detach() for p in model.parameters()), *batch.values()]
    main = make_fx(forward, tracing_mode="fake")(*values)
    inputs = [Input("parameter", name, name not in frozen) for name in names]
    inputs += [Input("batch", key) for key in batch]
    return Captured(main, main, tuple(inputs), (), (), (), {}, Signature((), ()), 1)


def needs_grad(program):
    """By autograd itself, on real values."""
    tracked = set()

    class Watch(fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if isinstance(value, torch.Tensor) and value.requires_grad:
                tracked.add(node.name)
            return value

    values = []
    placeholders = [n for n in program.main.graph.nodes if n.op == "placeholder"]
    for node, item in zip(placeholders, program.inputs, strict=True):
        val = node.meta["val"]
        made = torch.ones(val.shape, dtype=val.dtype)
        values.append(made.requires_grad_(item.trainable) if item.kind == "parameter" else made)
    Watch(program.main).run(*values)
    return frozenset(tracked)


def cut(program, cuts):
    """Stages by contiguous ranges of the graph; every crossing value becomes a boundary."""
    nodes = [n for n in program.main.graph.nodes if n.op == "call_function"]
    place = {n.name: sum(i >= c for c in cuts) for i, n in enumerate(nodes)}
    for node in nodes:
        if node.target is operator.getitem:
            place[node.name] = place[node.args[0].name]
    grads = needs_grad(program)
    crossing = {}
    for node in nodes:
        for user in node.users:
            if user.op == "call_function" and place[user.name] != place[node.name]:
                values = crossing.setdefault((place[node.name], place[user.name]), [])
                if node.name not in values:
                    values.append(node.name)
    ranks = tuple(range(len(cuts) + 1))
    stages = tuple(
        Stage(i, 0, i, (i,), tuple(n.name for n in nodes if place[n.name] == i), (), ())
        for i in ranks
    )
    boundaries = tuple(
        Boundary(s, t, tuple(v), tuple(x for x in v if x in grads))
        for (s, t), v in sorted(crossing.items())
    )
    request = Request((ModuleSpec(("",), ranks, Parallel(pipeline=len(ranks))),))
    edges = frozenset((source.name, reader.name) for source, reader in flow(Graph(program)).edges)
    return Plan(
        request,
        program,
        needs_grad=grads,
        grad_edges=edges,
        stages=stages,
        boundaries=boundaries,
    )


def linked(plan, stage):
    return replace(lower(plan, stage), **transfers(stage, stage.ranks[0], [[plan]]))


def call(segment, live, uses):
    """Run a segment; what it was the last to use is dropped, as the runtime does."""
    with torch.no_grad():
        results = segment.graph(*[live[name] for name in segment.inputs])
    live.update(zip(segment.outputs, results, strict=True))
    for name in segment.inputs:
        uses[name] -= 1
        if name.startswith("s:") and uses[name] == 0:
            del live[name]


def forward(programs, tables, uses):
    for program, live, left in zip(programs, tables, uses, strict=True):
        call(program.forward, live, left)
        for transfer in program.sends_forward:
            for value, spec in zip(transfer.values, transfer.specs, strict=True):
                dense = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
                tables[transfer.peer][value] = dense.copy_(live[value])


def backward(programs, tables, uses):
    grads = {}
    for program, live, left in reversed(list(zip(programs, tables, uses, strict=True))):
        for segment in (program.input_grad, program.weight_grad):
            if segment is not None:
                call(segment, live, left)
        for transfer in program.sends_backward:
            table = tables[transfer.peer]
            for value in transfer.values:
                table[value] = table.get(value, 0) + live[value]
        for name in [n for n in live if n.startswith("g:")]:
            grads[name[2:]] = grads.get(name[2:], 0) + live[name]
    return grads


def run(plan, model, batch):
    """Every stage forward, then every stage backward; also the names kept after each half."""
    programs = [linked(plan, stage) for stage in plan.stages]
    inputs = {f"p:{n}": p.detach() for n, p in model.named_parameters()}
    inputs |= {f"x:batch:{k}": v for k, v in batch.items()}
    tables = [dict(inputs) for _ in programs]
    uses = [uses_of(program) for program in programs]
    forward(programs, tables, uses)
    kept = [{n for n in t if n.startswith("s:")} for t in tables]
    loss = next(t[p.loss] for p, t in zip(programs, tables, strict=True) if p.loss)
    grads = backward(programs, tables, uses)
    left = [{n for n in t if n.startswith("s:")} for t in tables]
    return loss, grads, kept, left


def reference(model, batch, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
        parameter.grad = None
    loss = model(*batch.values())
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def batch():
    return {"ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "scale": torch.tensor(0.5).double()}


@pytest.mark.parametrize("cuts", [(), (3,), (5,), (4, 9), (2, 6, 11), (3, 5, 7, 9, 12)])
@pytest.mark.parametrize("frozen", [(), ("embed",), ("a", "b"), ALL[:-1], ALL, ("embed", "a")])
def test_segments_give_autograds_gradients(net, batch, cuts, frozen):
    plan = cut(captured(net, batch, frozen), cuts)
    loss, grads, _, left = run(plan, net, batch)
    expected_loss, expected = reference(net, batch, frozen)
    assert abs(loss - expected_loss) < 1e-12
    assert set(grads) == set(expected)
    for name, value in expected.items():
        assert (grads[name] - value).abs().max() < 1e-12, name
    assert not any(left), "saved values outlive the segments that read them"


def test_nothing_is_kept_or_sent_back_where_nothing_flows(net, batch):
    frozen = ("embed", "a", "norm", "b")
    plan = cut(captured(net, batch, frozen), (3, 5, 9))
    programs = [linked(plan, stage) for stage in plan.stages]
    _, _, kept, _ = run(plan, net, batch)
    quiet = [p.input_grad is None and p.weight_grad is None for p in programs]
    assert quiet[:3] == [True] * 3
    assert quiet[3] is False
    assert not any(kept[:3])
    assert not any(p.sends_backward or p.receives_backward for p in programs[:3])


def test_views_of_parameters_are_made_again(net, batch):
    plan = cut(captured(net, batch), ())
    program = linked(plan, plan.stages[0])
    assert program.input_grad is None
    assert "p:embed" in program.weight_grad.inputs
    shapes = [
        tuple(node.meta["val"].shape)
        for node in program.weight_grad.graph.graph.nodes
        if node.op == "placeholder"
    ]
    assert (4, 7) not in shapes, "the transposed embedding is a view of a parameter"


class Softplus(nn.Module):
    """Its backward lays the gradient out as it came in; torch's fake says: as the input."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 5))

    def forward(self, x, scale):
        return (nn.functional.softplus(x @ self.w).transpose(1, 2) * scale).sum()


def test_layouts_that_the_fake_kernel_got_wrong():
    model = Softplus().double()
    batch = {"x": torch.randn(2, 4, 3).double(), "scale": torch.randn(2, 5, 4).double()}
    _, grads, _, _ = run(cut(captured(model, batch), ()), model, batch)
    _, expected = reference(model, batch, ())
    assert (grads["w"] - expected["w"]).abs().max() < 1e-12
