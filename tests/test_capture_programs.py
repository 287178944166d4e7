"""Small forwards that read, loop, branch and mutate: each is exact on other batches, or refused.

The letters after ``program`` say how the capture of batch 0 does on batches 0, 1 and 2 (other
tokens; other tokens and one marker more): E exact, R rejected by a guard.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mllm_compile.compiler.errors import CaptureError
from mllm_compile.passes.capture.capture import capture
from tests.captures import Outcome, outcome

MARKER = 3
PROGRAMS = {}
REFUSED = {}


def program(expected):
    def register(forward):
        PROGRAMS[forward.__name__] = (forward, expected)
        return forward

    return register


def refused(message):
    def register(forward):
        REFUSED[forward.__name__] = (forward, message)
        return forward

    return register


class Model(nn.Module):
    """An embedding, a linear map, a buffer, and attributes of other kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.linear = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("permutation", torch.arange(49, -1, -1))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("seen", torch.zeros(50, dtype=torch.long))
        self.state = None
        self.calls = 0
        self.log = []
        self.table = torch.arange(50) % 7
        self.outside = torch.zeros(())
        self.hidden = [nn.Parameter(torch.ones(8))]

    def finish(self, hidden):
        return (self.linear(hidden) ** 2).mean()


def model_of(forward):
    torch.manual_seed(0)
    kind = type("Program", (Model,), {"forward": forward})
    return kind().double()


def batch(seed, markers=2):
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(5, 50, (2, 6), generator=g)
    for row in range(2):
        x[row, torch.randperm(6, generator=g)[:markers]] = MARKER
    return {"x": x}


# Python helpers around host reads.
def numpy_positions(ids):
    return torch.from_numpy(np.cumsum(ids.numpy() == MARKER, axis=-1))


def loop_positions(ids):
    counts = [[sum(t == MARKER for t in row[:i]) for i in range(len(row))] for row in ids.tolist()]
    return torch.tensor(counts)


def yield_positions(ids):
    for row in ids.tolist():
        yield torch.tensor([i * (t == MARKER) for i, t in enumerate(row)])


def positions_and_count(ids):
    rows = ids.tolist()
    return torch.tensor(rows).cumsum(-1) % 50, sum(t == MARKER for row in rows for t in row)


def rows_of(table, ids):
    return table[torch.tensor(ids.tolist())]


def remember(model, ids):
    model.state = torch.tensor(ids.tolist()).roll(1)
    return ids


def pop_option(ids, options):
    options.pop("a", None)
    return torch.tensor(ids.tolist()).roll(1)


def overwrite(ids):
    rolled = torch.tensor(ids.tolist()).roll(1)
    ids.fill_(4)
    return rolled


class Holder:
    """An object that capture cannot look into."""


def held_ids(holder):
    return torch.tensor(holder.ids.tolist()).roll(1)


COUNTER = {"n": 0}


def counted(ids):
    COUNTER["n"] += 1
    return torch.tensor(ids.tolist()) * 0 + COUNTER["n"] % 50


def nested_outer(ids):
    return nested_inner(ids.flip(0)) + 1


def nested_inner(ids):
    return torch.tensor([[min(t, 40) for t in row] for row in ids.tolist()])


def weights_of(ids):
    return torch.tensor([[1.0 / (1 + t) for t in row] for row in ids.tolist()], dtype=torch.double)


@program("EEE")
def numpy_helper(self, x):
    return self.finish(self.embed(x) * numpy_positions(x)[..., None])


@program("EEE")
def loop_helper(self, x):
    return self.finish(self.embed(x) * loop_positions(x)[..., None])


@program("ERR")
def generator_helper(self, x):
    return self.finish(self.embed(x) * torch.stack(list(yield_positions(x)))[..., None])


@program("EEE")
def helper_of_a_derived_value(self, x):
    return self.finish(self.embed(x) * loop_positions((x * 2 - x).flip(0))[..., None])


@program("EER")
def helper_with_a_host_result(self, x):
    positions, count = positions_and_count(x)
    return self.finish(self.embed(positions)) * count


@program("EEE")
def helpers_far_apart(self, x):
    """Further apart than a trace goes on after it found the first one."""
    hidden = self.embed(x) * loop_positions(x)[..., None]
    for _ in range(250):
        hidden = hidden * 1.5 / 1.5
    return self.finish(hidden + self.embed(nested_inner(x)))


@program("EEE")
def helper_inside_a_helper(self, x):
    return self.finish(self.embed(nested_outer(x)))


@program("EEE")
def helper_with_floats(self, x):
    return self.finish(self.embed(x) * weights_of(x)[..., None])


@program("ERR")
def helper_on_a_parameter(self, x):
    return self.finish(rows_of(self.embed.weight, x))


@program("ERR")
def helper_with_a_side_effect(self, x):
    x = remember(self, x)
    return self.finish(self.embed(self.state))


@program("ERR")
def helper_that_pops_an_option(self, x):
    options = {"a": 1}
    positions = pop_option(x, options)
    return self.finish(self.embed(positions)) * (2 if "a" in options else 3)


@program("ERR")
def helper_that_writes_its_argument(self, x):
    x = x.clone()
    rolled = overwrite(x)
    return self.finish(self.embed(rolled) + self.embed(x))


@program("ERR")
def helper_of_an_opaque_object(self, x):
    holder = Holder()
    holder.ids = x
    return self.finish(self.embed(held_ids(holder)))


@program("ERR")
def inline_loop(self, x):
    hidden = self.embed(x)
    picked = [
        hidden[i, j] * (j + 1)
        for i, row in enumerate(x.tolist())
        for j, token in enumerate(row)
        if token == MARKER
    ]
    return self.finish(torch.stack(picked))


# Shapes that depend on values.
@program("EER")
def nonzero(self, x):
    rows, columns = torch.nonzero(x == MARKER, as_tuple=True)
    return self.finish(self.embed(x)[rows, columns] * columns[:, None])


@program("EER")
def boolean_index(self, x):
    return self.finish(self.embed(x)[x == MARKER])


@program("EER")
def boolean_assignment(self, x):
    hidden = self.embed(x).clone()
    hidden[x == MARKER] = self.linear.bias
    return self.finish(hidden)


@program("EER")
def boolean_assignment_of_rows(self, x):
    hidden = self.embed(x).clone()
    hidden[x == MARKER] = self.linear(hidden[x == MARKER])
    return self.finish(hidden)


@program("EEE")
def computed_boolean_assignment(self, x):
    hidden = self.embed(x).clone()
    hidden[hidden > 0.5] = 0.25
    return self.finish(hidden)


@program("EER")
def masked_select(self, x):
    return self.finish(torch.masked_select(self.embed(x), (x == MARKER)[..., None]).view(-1, 8))


@program("EEE")
def masked_scatter(self, x):
    mask = (x == MARKER)[..., None].expand(-1, -1, 8)
    return self.finish(self.embed(x).masked_scatter(mask, self.linear(self.embed.weight[:8])))


@program("EER")
def unique(self, x):
    return self.finish(self.embed(torch.unique(x)))


@program("EEE")
def bincount(self, x):
    return self.finish(self.embed(x) * torch.bincount(x.view(-1), minlength=50)[x][..., None])


@program("EER")
def repeat_interleave(self, x):
    repeats = (x == MARKER).sum(0) + 1
    return self.finish(self.embed(torch.repeat_interleave(x[0], repeats)))


@program("EER")
def split_by_lengths(self, x):
    lengths = (x == MARKER).sum(1).tolist()
    parts = torch.split(self.embed(x)[x == MARKER], lengths)
    return self.finish(torch.stack([part.mean(0) for part in parts]))


@program("EER")
def dynamic_slice(self, x):
    count = int((x == MARKER).sum(1).max())
    return self.finish(self.embed(x)[:, :count])


@program("EEE")
def sort_and_gather(self, x):
    return self.finish(self.embed(x.gather(1, x.argsort(1))))


# Control flow.
@program("EER")
def branch_on_a_count(self, x):
    return self.finish(self.embed(x)) * (2 if (x == MARKER).sum() > 4 else 1)


@program("EEE")
def branch_on_equality(self, x):
    return self.finish(self.embed(x)) * (2 if torch.equal(x[0], x[1]) else 1)


@program("EEE")
def branch_on_closeness(self, x):
    return self.finish(self.embed(x)) * (2 if torch.allclose(x[0], x[1]) else 1)


@program("EEE")
def membership(self, x):
    return self.finish(self.embed(x)) * (3 if MARKER in x else 1)


@program("ERR")
def integer_index(self, x):
    i = x[0].argmax()
    return self.finish(self.embed(x)[:, int(i) :])


@program("ERR")
def tensor_index(self, x):
    return self.finish(self.embed(x)[:, x[0].argmax()])


@program("EEE")
def assertion_on_the_batch(self, x):
    assert x.max() < 50, "token out of range"
    torch._assert((x >= 0).all(), "negative token")
    return self.finish(self.embed(x))


@program("EEE")
def modules_in_a_loop_and_twice(self, x):
    hidden = self.embed(x)
    for _ in range(2):
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
    return self.finish(hidden)


# State, constants and writes.
@program("EEE")
def state_attribute(self, x):
    self.state = x.roll(1)
    return self.finish(self.embed(self.state))


@program("EEE")
def list_attribute(self, x):
    self.log = [self.embed(x)]
    self.log.append(self.log[0] * 2)
    return self.finish(self.log[-1]) * len(self.log)


@program("EEE")
def constant_copied_and_written(self, x):
    table = self.table.clone()
    table[:2] = x[0, :2]
    return self.finish(self.embed(table[x]))


@program("EEE")
def buffer_as_index_and_factor(self, x):
    return self.finish(self.embed(self.permutation[x])) * self.scale


@program("EEE")
def buffer_updated_by_the_batch(self, x):
    self.seen.index_add_(0, x.flatten(), torch.ones_like(x.flatten()))
    return self.finish(self.embed(x) * self.seen[x][..., None])


@program("EEE")
def buffer_replaced(self, x):
    self.scale.copy_(self.embed(x).detach().mean())
    return self.finish(self.embed(x)) * self.scale


@program("EER")
def entry_written_and_counted(self, x):
    x = x.clone()
    x[x == MARKER] = 4
    return self.finish(self.embed(x)) * (x == 4).sum().item()


@program("EEE")
def entry_written_in_place(self, x):
    x.clamp_(min=4)
    return self.finish(self.embed(x))


@program("EEE")
def views_written_in_place(self, x):
    hidden = self.linear(self.embed(x))
    hidden[:, 0].mul_(2)
    hidden.view(-1)[::3] += 1
    hidden.transpose(0, 1)[1] = hidden[:, 2]
    return self.finish(hidden)


@program("EEE")
def guard_before_a_write(self, x):
    x = x.clone()
    many = (x == MARKER).any()
    x -= 1
    return self.finish(self.embed(x)) if many else self.finish(self.embed(x + 1))


@program("EEE")
def literal_tensors(self, x):
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.double)
    weights[2] = 0.0
    return self.finish(self.embed(x) * weights[:, None])


@program("EEE")
def numpy_constant(self, x):
    return self.finish(self.embed(x) * torch.from_numpy(np.linspace(0, 1, 6))[:, None])


@program("EEE")
def nested_function_with_state(self, x):
    hidden = [self.embed(x)]

    def add(block):
        hidden.append(torch.relu(block(hidden[-1])))
        return hidden[-1]

    return self.finish(sum(add(block) for block in self.blocks))


@program("EEE")
def einsum_and_views(self, x):
    hidden = self.embed(x).unfold(1, 3, 1)
    return self.finish(torch.einsum("bwhk,gh->bwg", hidden, self.blocks[0].weight))


@program("EEE")
def recurrent(self, x):
    state = torch.zeros(2, 8, dtype=torch.double)
    for step in range(x.shape[1]):
        state = torch.tanh(self.linear(self.embed(x[:, step])) + state)
    return self.finish(state)


@program("EEE")
def complex_numbers(self, x):
    hidden = torch.view_as_complex(self.embed(x).view(2, 6, 4, 2))
    turned = hidden * torch.polar(torch.ones(4), torch.arange(4.0)).to(hidden.dtype)
    return self.finish(torch.view_as_real(turned).flatten(2))


@program("EEE")
def result_is_a_tuple(self, x):
    hidden = self.embed(x)
    return self.finish(hidden), hidden


@program("EEE")
def result_is_a_dict(self, x):
    hidden = self.embed(x)
    return {"logits": hidden, "loss": self.finish(hidden)}


@program("EEE")
def loss_without_batch(self, x):
    return self.linear.weight.pow(2).mean()


@program("EEE")
def some_parameters_only(self, x):
    return self.blocks[1](self.embed(x)).pow(2).mean()


# What cannot be one graph says so.
@refused("control flow and shapes that depend on the batch alone")
def branch_on_activations(self, x):
    hidden = self.embed(x)
    return self.finish(hidden) * (2 if hidden.sum() > 0 else 1)


@refused("control flow and shapes that depend on the batch alone")
def activations_picked_by_sign(self, x):
    hidden = self.embed(x)
    return self.finish(hidden[hidden.sum(-1) > 0])


@refused("control flow and shapes that depend on the batch alone")
def branch_on_random_numbers(self, x):
    return self.finish(self.embed(x)) * (2 if torch.rand(()) > 0.5 else 1)


@refused("forward writes into a constant")
def unregistered_tensor_written(self, x):
    self.outside.add_(x.sum())
    return self.finish(self.embed(x)) * self.outside


@refused("attribute calls of Program: .* a number or a size that every forward changes")
def calls_counted(self, x):
    self.calls += 1
    return self.finish(self.embed(x)) * self.calls


@refused("requires grad but is no parameter")
def unregistered_parameter(self, x):
    return self.finish(self.embed(x) * self.hidden[0].double())


@refused("the address of a tensor")
def address_taken(self, x):
    return self.finish(self.embed(x)) * (1 + 0 * x.data_ptr())


@refused("a tensor hook")
def hook_on_a_tensor(self, x):
    hidden = self.embed(x)
    hidden.register_hook(lambda gradient: gradient * 3)
    return self.finish(hidden)


@refused("a backward pass inside forward")
def backward_inside(self, x):
    loss = self.finish(self.embed(x))
    loss.backward(retain_graph=True)
    return loss


@refused("expected a scalar loss")
def no_scalar(self, x):
    return self.embed(x)


@refused("IndexError")
def mistake_of_the_model(self, x):
    return self.finish(self.embed(x)[:, :, :, 0])


@refused("random numbers that change the graph")
def branch_on_python_random(self, x):
    return self.finish(self.embed(x)) * (2 if random.random() > 0.5 else 1)


@refused("random numbers that change the graph")
def constant_from_numpy_random(self, x):
    return self.finish(self.embed(x) * torch.from_numpy(np.random.rand(8)))


@program("EEE")
def python_random_without_effect(self, x):
    random.random()
    return self.finish(self.embed(x) * (1 if np.random.rand() > 2 else 3))


@pytest.mark.parametrize("name", PROGRAMS)
def test_exact_or_rejected(name):
    forward, expected = PROGRAMS[name]
    model = model_of(forward)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    captured = capture(model, batch(1))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert attributes == {k: v for k, v in vars(model).items() if not k.startswith("_")}
    assert model.log == []
    letters = {Outcome.EXACT: "E", Outcome.REJECTED: "R"}
    done = [outcome(model, captured, item) for item in (batch(1), batch(2), batch(3, markers=3))]
    assert "".join(letters[item] for item in done) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name):
    forward, message = REFUSED[name]
    model = model_of(forward)
    code = forward.__code__
    with pytest.raises(CaptureError, match=message):
        capture(model, batch(1))
    assert forward.__code__ is code
    assert not torch.nn.modules.module._global_forward_hooks
    assert "apply" in torch.autograd.Function.__dict__
    good = model_of(loop_helper)
    assert outcome(good, capture(good, batch(1)), batch(2)) is Outcome.EXACT


def test_a_helper_that_counts_its_calls_is_refused():
    model = model_of(lambda self, x: self.finish(self.embed(counted(x))))
    with pytest.raises(CaptureError, match=r"global .*test_capture_programs\.COUNTER\['n'\]"):
        capture(model, batch(1))
    assert COUNTER == {"n": 0}


def test_random_operators_are_noted_and_still_exact_with_the_same_seed():
    model = model_of(lambda self, x: self.finish(F.dropout(self.embed(x), 0.3)))
    captured = capture(model, batch(1))
    assert [note for note in captured.report.notes if note.startswith("random: aten.")]
    assert outcome(model, captured, batch(2)) is Outcome.EXACT


def test_dropout_of_probability_zero_is_not_random():
    model = model_of(lambda self, x: self.finish(F.dropout(self.embed(x), 0.0)))
    assert capture(model, batch(1)).report.notes == ()
