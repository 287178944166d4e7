"""Decisions as text: exact both ways, deterministic, for the program they were made for alone."""

import json
from dataclasses import replace

import pytest

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.plan_json import fingerprint, from_json, to_json
from mllm_compile.passes.pipeline import PASSES, make_plan
from tests.agreement import with_trainable
from tests.requests import request
from tests.small_graphs import capture
from tests.small_models import Multimodal, batch

MODULES = (("towers.vision", 1), ("towers.audio", 2), ("language", 2))


@pytest.fixture(scope="module")
def program():
    return capture(Multimodal(2, 2, tied=True, deep=1), batch("vision", "audio"))


@pytest.mark.parametrize("stop", [each.name for each in PASSES])
def test_plans_round_trip(program, stop):
    plan = make_plan(request(*MODULES), program, stop_after=stop)
    assert from_json(to_json(plan), program) == plan


def test_the_text_is_the_same_for_the_same_program(program):
    again = capture(Multimodal(2, 2, tied=True, deep=1), batch("vision", "audio"))
    texts = [to_json(make_plan(request(*MODULES), each)) for each in (program, again)]
    assert texts[0] == texts[1]


def test_two_plans_differ_in_the_lines_of_what_differs(program):
    plan = make_plan(request(*MODULES), program)
    other = replace(plan, home={**plan.home, "language.embed.weight": 0})
    lines = zip(to_json(plan).splitlines(), to_json(other).splitlines(), strict=True)
    changed = [line for line, same in lines if line != same]
    assert changed == [f'  "language.embed.weight": {plan.home["language.embed.weight"]},']


def test_a_plan_for_other_frozen_parameters_is_another(program):
    text = to_json(make_plan(request(*MODULES), program))
    frozen = with_trainable(program, {"language.embed.weight"})
    assert fingerprint(frozen) != fingerprint(program)
    with pytest.raises(RequestError, match="other operators, shapes or frozen parameters"):
        from_json(text, frozen)


def test_other_texts_are_refused(program):
    with pytest.raises(RequestError, match="expected the format"):
        from_json(json.dumps({"format": 1}), program)
