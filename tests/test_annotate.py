"""Gradients flow, in the plan, exactly where autograd computes them; costs are the counter's."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.cost import costs
from mllm_compile.compiler.errors import CaptureError, RequestError
from mllm_compile.compiler.flow import flow, follow_forwards
from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.passes.annotate import annotate
from tests.agreement import agree, patterns, with_trainable
from tests.small_graphs import capture, values_of
from tests.small_models import Multimodal, adapt, batch


def fakes(captured: Captured):
    """Fake values for main's placeholders."""
    made = []
    for node, item in Graph(captured).input_of.items():
        val = node.meta["val"]
        fake = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype)
        made.append(fake.requires_grad_(item.kind == "parameter" and item.trainable))
    return made


MODELS = {
    "one encoder": lambda: (Multimodal(1, 2), batch("vision")),
    "two encoders, tied": lambda: (Multimodal(2, 2, tied=True), batch("vision", "audio")),
    "skip edges": lambda: (Multimodal(1, 3, deep=2), batch("vision")),
    "adapters": lambda: (adapt(Multimodal(1, 2)), batch("vision")),
}


@pytest.mark.parametrize("name", MODELS)
def test_random_freezes_agree_with_autograd(name):
    model, inputs = MODELS[name]()
    captured = capture(model, inputs)
    agree(captured)
    for trainable in [set(), *patterns(model, 13)]:
        agree(with_trainable(captured, trainable))


@pytest.mark.parametrize("name", MODELS)
def test_random_freezes_agree_on_fake_values(name):
    model, inputs = MODELS[name]()
    captured = capture(model, inputs)
    for trainable in patterns(model, 3):
        frozen = with_trainable(captured, trainable)
        with FakeTensorMode():
            agree(frozen, fakes(frozen))


class Two(nn.Module):
    """Two maps with something between them."""

    def __init__(self, between, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.between = between

    def forward(self, x):
        return self.b(self.between(self.a(x), x)).square().sum()


BETWEEN = {
    "detach": lambda h, x: h.detach() + x,
    "detached beside": lambda h, x: h * h.detach(),
    "integers": lambda h, x: x[h.argmax(-1)],
    "comparison": lambda h, x: torch.where(h > 0, h, x),
    "only the condition": lambda h, x: torch.where(h > 0, x, -x),
    "complex": lambda h, x: torch.view_as_real(torch.view_as_complex(h.view(-1, 2)) * 1j).view(
        h.shape
    ),
    "real part of complex": lambda h, x: torch.complex(h, x).real,
    "to integers and back": lambda h, x: h.to(torch.int32).to(h.dtype) + x,
    "other dtype and back": lambda h, x: h.to(torch.float64).to(h.dtype),
    "shape only": lambda h, x: torch.ones_like(h) * x,
    "one of a split": lambda h, x: torch.cat([h.split(2, -1)[0], x[:, 2:]], -1),
    "largest values": lambda h, x: h.topk(4, -1)[0],
    "where the largest are": lambda h, x: h.topk(4, -1)[1].to(h.dtype),
    "scatter into": lambda h, x: x.masked_scatter(x > 0, h.reshape(-1)),
    "overwritten": lambda h, x: h.masked_fill(torch.ones_like(h, dtype=torch.bool), 0.0),
    "rounded": lambda h, x: h.round() + x,
    "sorted": lambda h, x: h.sort(-1).values,
    "cumulated": lambda h, x: h.cumsum(-1),
    "indexed": lambda h, x: h[x[:, 0].argsort()],
    "stored": lambda h, x: x.index_put((x[:1, 0].argsort(),), h[:1]),
    "maximum": lambda h, x: torch.maximum(h, x),
    "product": lambda h, x: h.prod(-1, keepdim=True) * x,
    "twice": lambda h, x: h @ h.transpose(0, 1) @ h,
    "same twice": lambda h, x: torch.mul(h, h),
    "normalised": lambda h, x: nn.functional.layer_norm(h, (4,)),
    "sign": lambda h, x: h.sign() * x,
    "strided": lambda h, x: h.as_strided((3, 2), (4, 1), 1).repeat(1, 2),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_operators_agree_with_autograd(name):
    model = Two(BETWEEN[name])
    captured = capture(model, {"x": torch.randn(3, 4)})
    names = [name for name, _ in model.named_parameters()]
    for pattern in range(2 ** len(names)):
        agree(with_trainable(captured, {n for k, n in enumerate(names) if pattern >> k & 1}))


def test_no_grad_regions():
    captured = capture(Two(lambda h, x: h.exp().detach() + x), {"x": torch.randn(3, 4)})
    agree(captured)
    exp = next(n for n in captured.main.graph.nodes if n.name == "exp")
    exp.meta["grad"] = False
    agree(captured)
    assert not follow_forwards(Graph(captured)).flags[exp][0]


@torch.library.custom_op("planning_test::scale", mutates_args=())
def scale(x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * factor, x.argmax(-1)


@scale.register_fake
def _(x, factor):
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.int64)


def _scale_backward(ctx, grad, _):
    return grad * ctx.saved_tensors[0], None


def _scale_setup(ctx, inputs, output):
    ctx.save_for_backward(inputs[1])


scale.register_autograd(_scale_backward, setup_context=_scale_setup)


def test_opaque_operators_that_refuse_a_gradient():
    model = Two(lambda h, x: scale(x, h)[0] + scale(h, x)[0] + scale(h, x)[1][:, None])
    captured = capture(model, {"x": torch.randn(3, 4)})
    agree(captured)
    graph = Graph(captured)
    calls = [node for node in graph.nodes if "scale" in str(node.target)]
    read = {reader for _, reader in flow(graph).edges}
    assert [node in read for node in calls] == [False, True, False]


def test_values_that_do_not_lead_to_the_loss_need_no_gradient():
    class Extra(Two):
        def forward(self, x):
            h = self.a(x)
            return h.square().sum(), self.b(h)

    captured = capture(Extra(None), {"x": torch.randn(3, 4)}, num_outputs=2)
    agree(captured)
    graph = Graph(captured)
    needs = flow(graph).needs
    assert graph.parameters["a.weight"] in needs
    assert graph.parameters["b.weight"] not in needs


def test_the_first_trainable_layer_has_no_input_gradient():
    captured = capture(Multimodal(0, 3), batch())
    graph = Graph(with_trainable(captured, {"language.layers.1.q.weight"}))
    found = costs(graph, flow(graph))
    cost = {node.meta["owner"]: found[node.name] for node in graph.live if found[node.name].forward}
    for owner, input_grad, weight_grad in [
        ("layers.0.down", False, False),
        ("layers.1.q", False, True),
        ("layers.1.v", False, False),
        ("layers.1.o", True, False),
        ("layers.2.q", True, False),
    ]:
        of = cost[f"language.{owner}"]
        assert (of.input_grad, of.weight_grad) == (
            of.forward * input_grad,
            of.forward * weight_grad,
        )


def counted(captured: Captured):
    """FLOPs of the real forward and of the real backward, and the bytes that it keeps."""
    kept = {}
    values = values_of(captured)
    inputs = {value.untyped_storage().data_ptr() for value in values}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in inputs:
            kept[storage.data_ptr()] = storage
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with FlopCounterMode(display=False) as counter, hooks:
        loss = captured.main(*values)[0]
        forward = counter.get_total_flops()
        if loss.requires_grad:
            loss.backward()
    backward = counter.get_total_flops() - forward
    return forward, backward, sum(storage.nbytes() for storage in kept.values())


class Convolutions(nn.Module):
    """Strided, grouped and transposed convolutions, and a batched product with a bias."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.group = nn.Conv1d(8, 8, 3, groups=4, padding=1)
        self.back = nn.ConvTranspose1d(8, 4, 2)
        self.bias = nn.Parameter(torch.randn(2, 4, 5))

    def forward(self, image):
        h = self.back(self.group(self.patch(image).flatten(2)))
        return torch.baddbmm(self.bias, h, h.transpose(1, 2).repeat(1, 1, 2)[:, :, :5]).sum()


COSTED = {**MODELS, "convolutions": lambda: (Convolutions(), {"image": torch.randn(2, 3, 4, 4)})}


@pytest.mark.parametrize("name", COSTED)
def test_costs_agree_with_the_flop_counter(name):
    model, inputs = COSTED[name]()
    captured = capture(model, inputs)
    for trainable in [set(), {n for n, _ in model.named_parameters()}, *patterns(model, 6)]:
        frozen = with_trainable(captured, trainable)
        graph = Graph(frozen)
        found = costs(graph, flow(graph)).values()
        forward, backward, kept = counted(frozen)
        assert sum(cost.forward for cost in found) == forward
        assert sum(cost.input_grad + cost.weight_grad for cost in found) == backward
        assert sum(cost.saved_bytes for cost in found) == kept


def test_an_operator_without_backward_is_named():
    class Histogram(Two):
        def forward(self, x):
            return torch.special.i1e(torch.special.zeta(self.a(x), x)).sum()

    captured = capture(Histogram(None), {"x": torch.rand(3, 4) + 2})
    with pytest.raises(CaptureError, match="zeta"):
        flow(Graph(captured))


def test_the_program_must_have_the_freezes_of_the_request():
    captured = capture(Multimodal(1, 1), batch("vision"))
    request = Request((ModuleSpec(("towers",), (0,), trainable=False), ModuleSpec(("",), (1,))))
    with pytest.raises(RequestError, match=r"parameter towers\.vision\.patch\.weight.*false"):
        annotate(Plan(request, captured))
