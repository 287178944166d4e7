"""What forward keeps in Python objects: harmless, or refused by name, and gone after capture."""

import functools
import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import CaptureError
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.tracing import FakeTensor
from tests.captures import Outcome, outcome

KEPT, COUNTERS = {}, {}
CALLS, TALLY = 0, {"calls": 0}


@dataclass(slots=True)
class Slotted:
    step: int = 0


class Plain:
    def __init__(self):
        self.step = 0


class Inner(nn.Module):
    """A layer with everything that a forward could count in."""

    shadowed = 0

    def __init__(self, rule):
        super().__init__()
        self.linear, self.rule = nn.Linear(8, 8), rule
        self.space, self.plain, self.slotted = SimpleNamespace(step=0), Plain(), Slotted()
        self.log, self.tally, self.ticks = [], {}, itertools.count(1)
        self.array, self.generator = np.zeros(1), np.random.default_rng(0)
        self.number, self.kept = np.int64(0), None
        self.register_buffer("frequency", torch.arange(8.0))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        return self.linear(x) * self.rule(self, x)


class Model(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Inner(rule)])

    def forward(self, x):
        return self.layers[1](self.layers[0](x)).pow(2).mean()


def kept(rule):
    KEPT[rule.__name__] = rule
    return rule


def counter(where):
    def register(rule):
        COUNTERS[rule.__name__] = (rule, where)
        return rule

    return register


# Numbers that differ in every forward, however they are spelled.
@counter("attribute layers.1.k of Model")
def getattr_with_a_default(self, x):
    self.k = getattr(self, "k", 0) + 1
    return self.k


@counter("attribute layers.1.k of Model")
def hasattr_first(self, x):
    if not hasattr(self, "k"):
        self.k = 0
    self.k += 1
    return self.k


@counter("attribute layers.1.k of Model")
def dictionary_of_the_instance(self, x):
    self.__dict__["k"] = self.__dict__.get("k", 0) + 1
    return self.k


@counter("attribute layers.1.shadowed of Model")
def shadowed_class_attribute(self, x):
    self.shadowed += 1
    return self.shadowed


@counter("attribute Inner.shadowed of Model")
def class_attribute(self, x):
    type(self).shadowed += 1
    return self.shadowed


@counter("attribute layers.1.space.step of Model")
def attribute_of_a_namespace(self, x):
    self.space.step += 1
    return self.space.step


@counter("attribute layers.1.plain.step of Model")
def attribute_of_an_object(self, x):
    self.plain.step += 1
    return self.plain.step


@counter("attribute layers.1.slotted.step of Model")
def attribute_in_a_slot(self, x):
    self.slotted.step += 1
    return self.slotted.step


@counter("attribute layers.1.log")
def growing_list(self, x):
    self.log.append(1)
    return len(self.log)


@counter(r"attribute layers.1.tally\['calls'\]")
def dictionary(self, x):
    self.tally["calls"] = self.tally.get("calls", 0) + 1
    return self.tally["calls"]


@counter("attribute layers.1.ticks")
def iterator(self, x):
    return next(self.ticks)


@counter("attribute layers.1.number")
def number_of_numpy(self, x):
    self.number += 1
    return float(self.number)


@counter("attribute layers.1.array")
def array_of_numpy(self, x):
    self.array += 1
    return float(self.array[0])


@counter("attribute layers.1.generator")
def generator_of_its_own(self, x):
    return float(self.generator.random())


@counter(r"global .*test_capture_state.CALLS")
def global_number(self, x):
    global CALLS
    CALLS += 1
    return CALLS


@counter(r"global .*test_capture_state.TALLY\['calls'\]")
def global_dictionary(self, x):
    TALLY["calls"] += 1
    return TALLY["calls"]


def _closure():
    count = 0

    def closure(self, x):
        nonlocal count
        count += 1
        return count

    return closure


counter("variable count of .*closure")(_closure())


@counter(r"default of default_argument\[0\]")
def default_argument(self, x, seen=[]):  # noqa: B006
    seen.append(1)
    return len(seen)


@counter("attribute layers.1.rule.calls")
def attribute_of_a_function(self, x):
    rule = self.rule
    rule.calls = getattr(rule, "calls", 0) + 1
    return rule.calls


@counter("attribute layers.1.k of Model")
def only_seldom_read(self, x):
    self.k = getattr(self, "k", 0) + 1
    return 2 if self.k % 100 == 0 else 1


# Tensors that carry something from one forward to the next.
@counter("attribute layers.1.kept of Model")
def tensor_that_counts(self, x):
    self.kept = torch.ones(()) if self.kept is None else self.kept + 1
    return self.kept


@counter("attribute layers.1.kept of Model")
def tensor_that_counts_in_place(self, x):
    self.kept = torch.zeros(1) if self.kept is None else self.kept
    self.kept[0] += 1
    return self.kept


@counter("attribute layers.1.kept of Model")
def tensor_of_the_batchs_shape_that_counts(self, x):
    self.kept = torch.zeros_like(x) if self.kept is None else self.kept
    self.kept[0] += 1
    return self.kept.detach()


@counter("attribute layers.1.late of Model")
def buffer_registered_in_forward_that_counts(self, x):
    if "late" not in self._buffers:
        self.register_buffer("late", torch.zeros(()))
    self.late += 1
    return self.late


@counter("attribute layers.1.kept of Model")
def average_over_forwards(self, x):
    mean = x.detach().mean()
    self.kept = mean if self.kept is None else 0.9 * self.kept + 0.1 * mean
    return self.kept


@counter("attribute layers.1.kept of Model")
def first_batch_for_ever(self, x):
    if self.kept is None:
        self.kept = x.detach().sum(-1, keepdim=True)
    return self.kept


@counter("attribute layers.1.kept of Model")
def weight_before_its_first_update(self, x):
    if self.kept is None:
        self.kept = self.linear.weight.detach().sum()
    return self.kept


@counter("attribute layers.1.kept of Model")
def table_of_a_buffer_that_changes(self, x):
    self.steps += 1
    if self.kept is None:
        self.kept = self.steps * 2
    return self.kept


@counter("attribute layers.1.started of Model")
def first_forward_differs(self, x):
    factor = 1 if hasattr(self, "started") else 2
    self.started = True
    return factor


# What never changes the result.
@kept
def table_made_once(self, x):
    if self.kept is None:
        self.kept = torch.outer(torch.arange(5.0), torch.ones(8)).cos()
    return self.kept


@kept
def table_of_a_buffer(self, x):
    if self.kept is None:
        self.kept = self.frequency.cos() + 1
    return self.kept


@kept
def mask_of_the_batchs_shape(self, x):
    if self.kept is None:
        self.kept = x.new_ones(5, 8).tril_()
        self.kept[0] *= 2
    return self.kept


@kept
def table_registered_in_forward(self, x):
    if "table" not in self._buffers:
        self.register_buffer("table", torch.arange(8.0).sin(), persistent=False)
    return self.table


@kept
def longest_length_so_far(self, x):
    if x.shape[1] > getattr(self, "longest", 0):
        self.longest = x.shape[1]
        self.table = torch.arange(self.longest, dtype=x.dtype)
    return self.table[: x.shape[1], None]


@kept
def tables_by_length(self, x):
    if x.shape[1] not in self.tally:
        self.tally[x.shape[1]] = torch.arange(x.shape[1])
    return self.tally[x.shape[1]][:, None]


@functools.lru_cache
def table_of(length):
    return torch.arange(float(length))


@kept
def cached_function(self, x):
    return table_of(x.shape[1])[:, None]


@kept
def result_left_for_others(self, x):
    self.kept = x.mean()
    self.log = [x]
    self.log.append(x * 2)
    self.plain.last = x
    return len(self.log) + self.kept


@kept
def count_in_a_buffer(self, x):
    self.steps += 1
    return self.steps


def batches():
    generator = torch.Generator().manual_seed(0)
    shape = (3, 5, 8)
    return [{"x": torch.randn(shape, generator=generator, dtype=torch.double)} for _ in range(3)]


def model_of(rule):
    torch.manual_seed(0)
    return Model(rule).double()


@pytest.mark.parametrize("name", COUNTERS)
def test_what_changes_the_next_forward_is_refused_by_name(name):
    rule, where = COUNTERS[name]
    model = model_of(rule)
    attributes = dict(vars(model.layers[1]))
    with pytest.raises(CaptureError, match=where) as error:
        capture(model, batches()[0])
    assert "register_buffer" in str(error.value)
    assert attributes == vars(model.layers[1])
    inner = model.layers[1]
    assert (inner.space.step, inner.plain.step, inner.slotted.step) == (0, 0, 0)
    assert (inner.log, inner.tally, Inner.shadowed, CALLS, TALLY) == ([], {}, 0, 0, {"calls": 0})


@pytest.mark.parametrize("name", KEPT)
def test_what_never_changes_the_result_is_exact(name):
    model = model_of(KEPT[name])
    attributes = dict(vars(model.layers[1]))
    program = capture(model, batches()[0])
    assert attributes == vars(model.layers[1])
    assert not vars(model.layers[1].plain).keys() - {"step"}
    assert not isinstance(table_of(5), FakeTensor)
    assert [outcome(model, program, batch) for batch in batches()] == [Outcome.EXACT] * 3
