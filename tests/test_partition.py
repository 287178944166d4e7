"""Stages: cuts of any granularity, glue, replicas, skip edges, tied weights, placement."""

import pytest

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.passes.pipeline import make_plan
from tests.small_graphs import capture
from tests.small_models import Multimodal, batch


def request(*modules, microbatches=4):
    """Modules as (paths, pipeline), on consecutive ranks."""
    specs, first = [], 0
    for paths, pipeline in modules:
        ranks = tuple(range(first, first + pipeline))
        first += pipeline
        paths = (paths,) if isinstance(paths, str) else paths
        specs.append(ModuleSpec(paths, ranks, Parallel(pipeline=pipeline)))
    return Request(tuple(specs), microbatches=microbatches)


def crossings(plan):
    return {(b.source, b.target): b.values for b in plan.boundaries}


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 6])
def test_one_hidden_state_crosses_every_cut(pipeline):
    program = capture(Multimodal(0, layers=6), batch())
    plan = make_plan(request(("", pipeline)), program)
    assert crossings(plan).keys() == {(s, s + 1) for s in range(pipeline - 1)}
    assert all(len(values) == 1 for values in crossings(plan).values())


def test_projector_and_head_sink_to_the_language_model():
    plan = make_plan(
        request(("towers.vision", 1), ("language", 2)), capture(Multimodal(), batch("vision"))
    )
    encoder, first, last = plan.stages
    assert "projectors.vision.weight" in first.parameters
    assert "head.weight" in last.parameters
    assert {name.split(".")[0] for name in encoder.parameters} == {"towers"}
    assert set(crossings(plan)) == {(0, 1), (1, 2)}


def test_unknown_paths_are_refused_with_close_matches():
    with pytest.raises(RequestError, match=r"did you mean.*towers\.vision"):
        make_plan(request(("tower.vision", 1)), capture(Multimodal(), batch("vision")))
