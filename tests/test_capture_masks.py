"""Masks of captured programs: intervals where they hold, guarded; else dense, with a reason."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function, or_masks

from mllm_compile.passes.capture.attention_masks import Facts
from mllm_compile.passes.capture.attention_sites import AttentionSites
from mllm_compile.passes.capture.capture import capture
from mllm_compile.passes.capture.programs import Programs
from tests.captures import Outcome, outcome
from tests.contexts import VOCABULARY, decoder

INTERVALS, DENSE = torch.ops.mllm.mask_intervals.default, torch.ops.mllm.mask.default


def batch(*kept, seed=0):
    """Rows of tokens; ``kept`` spells which of them are real."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[int(mark) for mark in row] for row in kept])
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=g)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "use_cache": False}


RIGHT = batch("11111110", "11111000")
LEFT = batch("00111111", "01111111", seed=1)
HOLE = batch("11011111", "11111111", seed=2)
HOLES = batch("10101011", "11111111", seed=3)
OTHER_HOLES = batch("11010101", "10101111", seed=4)


@pytest.fixture
def model():
    return decoder("full").double()


def masks_of(program):
    """(interval masks, how many intervals they have, dense masks) of a program.

    The prologue makes intervals, the main graph dense masks.
    """
    made = program.prologue.graph.find_nodes(op="call_function", target=INTERVALS)
    dense = program.main.graph.find_nodes(op="call_function", target=DENSE)
    return len(made), {node.meta["val"].shape[2] for node in made}, len(dense)


def test_padding_on_either_side_is_one_interval_and_one_program(model):
    program = capture(model, RIGHT)
    assert masks_of(program) == (1, {1}, 0)
    for other in (RIGHT, LEFT):
        assert outcome(model, program, other) is Outcome.EXACT
    assert not any("dense" in line for line in program.report.attention)


def test_queries_of_eager_attention_that_see_nothing_are_a_program_of_their_own():
    """The operator gives them zeros, and eager attention the mean of all values."""
    model = deepcopy(decoder("full")).double()
    model.set_attn_implementation("eager")
    lift = torch.float64
    right, left = (capture(model, given, lift=lift) for given in (RIGHT, LEFT))
    assert outcome(model, right, RIGHT, lift=lift) is Outcome.EXACT
    assert outcome(model, right, LEFT, lift=lift) is Outcome.REJECTED
    for given in (LEFT, RIGHT):
        assert outcome(model, left, given, lift=lift) is Outcome.EXACT
    assert [all("see no key" in x for x in p.report.attention) for p in (right, left)] == [0, 1]


def test_what_would_be_wrong_is_rejected(model):
    """A program of one interval per query takes no batch with a hole, and so on."""
    one, two = capture(model, RIGHT), capture(model, HOLE)
    assert masks_of(two) == (1, {2}, 0)
    assert outcome(model, one, HOLE) is Outcome.REJECTED
    assert outcome(model, one, HOLES) is Outcome.REJECTED
    assert outcome(model, two, HOLES) is Outcome.REJECTED
    for fits in (HOLE, RIGHT):
        assert outcome(model, two, fits) is Outcome.EXACT


def test_without_intervals_the_mask_stays_dense_and_the_report_says_why(model):
    program = capture(model, HOLES)
    assert masks_of(program) == (0, set(), 1)
    (line,) = set(line.split(": ", 1)[1] for line in program.report.attention)
    assert "dense: " in line
    assert "holds for more than 2 separate runs of keys" in line
    for other in (HOLES, OTHER_HOLES, RIGHT):
        assert outcome(model, program, other) is Outcome.EXACT


def test_another_batch_has_another_program(model):
    programs = Programs(model)
    for each, count in ((RIGHT, 1), (LEFT, 1), (HOLE, 2), (HOLES, 3), (RIGHT, 3)):
        programs.get(each)
        assert len(programs.captured) == count


def by_id(groups, b, q, k):
    return (groups[b, q] == groups[b, k]) & (groups[b, q] >= 0)


GROUPS = torch.tensor([[-1, 0, 0, -1, 1, 1, -1], [0, 0, -1, -1, -1, 1, 1]])
APART = torch.tensor([[-1, 0, 0, -1, 0, 1, -1], [0, 0, -1, -1, -1, 1, 1]])


def site(groups, rule=by_id, value=lambda tensor: tensor):
    """The report's line of an attention under causal or ``rule``, and what was held."""
    held = []
    sites = AttentionSites(facts=Facts(value, held.append))
    function = or_masks(causal_mask_function, lambda b, h, q, k: rule(groups, b, q, k))
    made = sites.make_mask(2, 7, 7, mask_function=function, allow_is_causal_skip=False)
    x = torch.randn(2, 1, 7, 8, dtype=torch.float64)
    sites.attend(nn.Identity(), x, x, x, made)
    (line,) = sites.lines
    return line, held


def test_contiguous_groups_are_intervals_and_held():
    line, held = site(GROUPS)
    assert "dense" not in line
    assert [bool(truth) for truth in held] == [True]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"groups": APART}, "are not contiguous"),
        ({"groups": GROUPS, "value": lambda tensor: None}, "not known before the model runs"),
        ({"groups": GROUPS, "value": lambda tensor: tensor.to("meta")}, "not known before"),
        ({"groups": GROUPS, "rule": lambda g, b, q, k: (k + q) % 2 == 0}, "<= 0"),
    ],
)
def test_reasons_for_dense_masks(arguments, reason):
    line, held = site(**arguments)
    assert "dense: " in line
    assert reason in line
    assert not held


def test_looking_at_values_lifts_no_call(model):
    """It is no reason to trace again, nor to lift calls of the model out."""
    program = capture(model, RIGHT)
    assert program.report.hoisted == ()
    assert program.report.passes == 1
    (guard,) = program.guards
    assert (guard.kind, guard.value, guard.inputs) == ("item", True, ("attention_mask",))
