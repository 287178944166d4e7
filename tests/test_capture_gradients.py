"""Grad mode, detached values, in-place writes and custom functions: gradients are eager's."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mllm_compile.compiler.errors import CaptureError
from mllm_compile.passes.capture.capture import capture
from tests.captures import Outcome, outcome

EXACT = {}
REFUSED = {}


def exact(forward):
    EXACT[forward.__name__] = forward
    return forward


def refused(message):
    def register(forward):
        REFUSED[forward.__name__] = (forward, message)
        return forward

    return register


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scaled(torch.autograd.Function):
    """Two outputs, saved inputs and outputs, and a backward that is not its derivative."""

    @staticmethod
    def forward(ctx, x, weight, factor):
        y = torch.sigmoid(x)
        ctx.save_for_backward(x, weight, y)
        ctx.factor = factor
        return x * y * weight * factor, y

    @staticmethod
    def backward(ctx, gradient, gradient_y):
        x, weight, y = ctx.saved_tensors
        first = 7 * ctx.factor * gradient * y * weight + gradient_y
        return first, (gradient * x * y).sum(0) * 3, None


class Clamped(torch.autograd.Function):
    """The newer style, with setup_context."""

    @staticmethod
    def forward(x):
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * (y > 0) * 5


class WithIndices(torch.autograd.Function):
    """An output that is not differentiable, and an intermediate that is saved."""

    @staticmethod
    def forward(ctx, x):
        order = x.argsort(-1).to(x.dtype)
        squares = x * x
        ctx.save_for_backward(squares)
        ctx.mark_non_differentiable(order)
        return squares.sum(-1), order

    @staticmethod
    def backward(ctx, gradient, _):
        (squares,) = ctx.saved_tensors
        return gradient[:, None] * squares


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class Hiding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.hidden = x * 2
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.hidden


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.running = nn.BatchNorm1d(8, momentum=None)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.w = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return (self.c(self.middle(self.a(x))) ** 2).mean()


def model_of(middle):
    torch.manual_seed(0)
    return type("Program", (Model,), {"middle": middle})().double()


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(6, 8, dtype=torch.float64, generator=g)}


@exact
def plain(self, h):
    return h


@exact
def no_grad(self, h):
    with torch.no_grad():
        t = self.b(h) * self.w
    return h + torch.relu(t)


@exact
def view_made_under_no_grad(self, h):
    with torch.no_grad():
        t = h.view(-1, 4)
    return h + (t * 2).view(-1, 8)


@exact
def several_results_under_no_grad(self, h):
    with torch.no_grad():
        left, right = self.b(h).split(4, -1)
    return h + torch.cat([right, left], -1)


@exact
def write_into_a_value_of_no_grad(self, h):
    with torch.no_grad():
        t = self.b(h)
    t.mul_(self.w)
    return h + t


@exact
def write_into_a_view_of_a_value_of_no_grad(self, h):
    with torch.no_grad():
        t = self.b(h) + 0
    t[:, :4] = h[:, 4:]
    return h * t


@exact
def detached(self, h):
    return h + self.b(h.detach())


@exact
def detached_result(self, h):
    return h + self.b(h).detach()


@exact
def data(self, h):
    return h + self.b(h.data)


@exact
def data_of_a_parameter(self, h):
    return h + nn.functional.linear(h, self.b.weight.data)


@exact
def write_into_a_detached_clone(self, h):
    t = h.detach().clone()
    t *= self.w
    return h + t


@exact
def grad_within_no_grad(self, h):
    with torch.no_grad():
        t = self.b(h)
        with torch.enable_grad():
            u = self.b(h)
    return h + t + u


@exact
def set_grad_enabled(self, h):
    torch.set_grad_enabled(False)
    t = self.b(h)
    torch.set_grad_enabled(True)
    return h + t


@exact
def inference_mode(self, h):
    with torch.inference_mode():
        t = self.b(h)
    return h + t.clone()


@exact
def frozen_layer(self, h):
    return h + self.frozen(h)


@exact
def requires_grad_false(self, h):
    return h + self.b(h).detach().requires_grad_(False)


@exact
def checkpointed(self, h):
    return h + checkpoint(lambda z: torch.relu(self.b(z)), h, use_reentrant=False)


@exact
def batch_norm(self, h):
    return self.norm(h)


@exact
def cumulative_batch_norm(self, h):
    return self.running(h)


@exact
def batch_norm_in_eval(self, h):
    self.norm.eval()
    return self.norm(h)


@exact
def straight_through(self, h):
    return Straight.apply(self.b(h))


@exact
def function_with_two_outputs(self, h):
    first, second = Scaled.apply(h, self.w, 0.5)
    return first + self.b(second)


@exact
def function_with_one_output_used(self, h):
    return Scaled.apply(h, self.w, 0.5)[0]


@exact
def function_in_the_newer_style(self, h):
    return Clamped.apply(self.b(h))


@exact
def function_with_indices(self, h):
    total, order = WithIndices.apply(h)
    return h * total[:, None] + order * self.w


@exact
def function_under_no_grad(self, h):
    with torch.no_grad():
        t = Straight.apply(self.b(h))
    return h + t


@exact
def function_of_frozen_values(self, h):
    return h + Straight.apply(self.frozen(h.detach()))


@exact
def function_in_a_loop(self, h):
    for factor in (0.5, 2.0):
        h = h + Scaled.apply(h, self.w, factor)[0]
    return h


@exact
def parametrized(self, h):
    weight = torch._weight_norm(self.b.weight, self.w[:, None], 0)
    return nn.functional.linear(h, weight)


@exact
def in_place_chain(self, h):
    t = self.b(h)
    t.add_(h).mul_(2).clamp_(min=-1)
    return t


@exact
def gradient_inside_as_a_number(self, h):
    x = h.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(self.b(x).tanh().sum(), x)
    return h * gradient


@refused("create_graph=True")
def per_sample_gradient(self, h):
    return h * torch.func.vmap(torch.func.grad(lambda row: self.b(row).tanh().sum()))(h)


@exact
def buffer_replaced_by_another_tensor(self, h):
    self.norm.running_mean = self.norm.running_mean * 0.9 + h.detach().mean(0) * 0.1
    return h * self.norm.running_mean


@refused("create_graph=True")
def gradient_inside_that_is_differentiated(self, h):
    (gradient,) = torch.autograd.grad(self.b(h).tanh().sum(), h, create_graph=True)
    return h * gradient


@refused("in-place writes that autograd sees")
def write_under_no_grad(self, h):
    h = torch.relu(self.b(h)) + 0
    with torch.no_grad():
        h.mul_(0.5)
    return h


@refused("in-place writes that autograd sees")
def write_through_data(self, h):
    h = self.b(h)
    h.data.mul_(2)
    return h * h


@refused("in-place writes that autograd sees")
def write_through_a_detached_alias(self, h):
    h = self.b(h)
    h.detach()[0] = 0
    return h * h


@refused("in-place writes that autograd sees")
def moving_average_of_a_parameter(self, h):
    with torch.no_grad():
        self.w.mul_(0.9)
    return h * self.w


@refused("in-place writes that autograd sees")
def write_into_the_data_of_a_parameter(self, h):
    self.b.weight.data.mul_(0.9)
    return self.b(h)


@refused("forward writes into a parameter")
def write_into_a_frozen_parameter(self, h):
    self.frozen.weight.mul_(0.9)
    return self.frozen(h)


@refused("use_reentrant=False")
def reentrant_checkpoint(self, h):
    return h + checkpoint(lambda z: torch.relu(self.b(z)), h, use_reentrant=True)


@refused("mark_dirty")
def function_that_writes_its_input(self, h):
    return Dirty.apply(self.b(h))


@refused("attribute of ctx")
def function_that_hides_a_tensor(self, h):
    return Hiding.apply(self.b(h))


@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_the_models(name):
    model = model_of(EXACT[name])
    captured = capture(model, batch(0))
    assert outcome(model, captured, batch(0)) is Outcome.EXACT
    assert outcome(model, captured, batch(1)) is Outcome.EXACT


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_express_is_refused(name):
    forward, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        capture(model_of(forward), batch(0))


def test_nodes_under_no_grad_are_marked_and_cut_off():
    program = capture(model_of(no_grad), batch(0))
    calls = [node for node in program.main.graph.nodes if node.op == "call_function"]
    marked = [node for node in calls if not node.meta["grad"]]
    assert {node.meta["owner"] for node in marked} == {"", "b"}
    (cut,) = [node for node in calls if node.target is torch.ops.aten.detach.default]
    assert cut in marked
    assert all(user.meta["grad"] for user in cut.users)


def test_a_custom_function_is_one_node_with_the_grad_mode_of_its_caller():
    program = capture(model_of(straight_through), batch(0))
    (node,) = [n for n in program.main.graph.nodes if n.target is torch.ops.mllm.function.default]
    assert node.meta["grad"]
    assert node.meta["where"].endswith("straight_through")
