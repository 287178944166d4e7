"""Sharded plans as text: exact both ways, and in a table that says what each axis does."""

import io
import re

import pytest
from rich.console import Console

from mllm_compile.compiler.plan_json import from_json, to_json
from mllm_compile.document import Document
from mllm_compile.render import plan_view
from tests.sharded import build, decoder, sharded


@pytest.fixture(scope="module")
def plan():
    program = decoder(2, heads=6, kv=6, hidden=48, tokens=15)
    given = sharded(program, context=2, tensor=4).parameter_layouts
    return sharded(program, given=given, context=2, tensor=4, pipeline=2)


@pytest.fixture(scope="module")
def document(plan):
    return Document.of(plan, build(2, heads=6, kv=6, hidden=48))


def test_decisions_round_trip(plan):
    assert plan.given_layouts
    assert plan.shardings[0].notes
    again = from_json(to_json(plan), plan.captured)
    assert again == plan
    assert to_json(again) == to_json(plan)


def test_other_layouts_are_other_decisions(plan):
    other = sharded(plan.captured, "zigzag", context=2, tensor=4, pipeline=2)
    assert to_json(other) != to_json(plan)


def test_documents_round_trip(document):
    assert Document.from_json(document.to_json()) == document


def test_the_table_shows_each_axis(document):
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(plan_view(document))
    text = console.file.getvalue()
    (context,) = [line for line in text.splitlines() if "│ context" in line]
    (tensor,) = [line for line in text.splitlines() if "│ tensor" in line]
    assert "0 of 21 parameters" in context
    assert re.search(r"all-reduce 1, all-to-all 2 +│ all-to-all 4 ", context)
    assert "16 of 21 parameters" in tensor
    assert "tensor: 2 mllm.attention.default of model.layers.*.self_attn whole" in text


def test_a_plan_on_single_ranks_shows_no_layouts():
    document = Document.of(sharded(decoder(2)), build(2))
    assert not document.shardings
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(plan_view(document))
    assert "Layouts" not in console.file.getvalue()
