"""Sharded plans on every rank: loss and every gradient are those of the plain model."""

import pytest
import torch

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.verify import verify
from tests.localized import assert_exact
from tests.parity import assert_passed, workload_of
from tests.sharded import Mixture, batch, build


def assert_parity(model, inputs, split="contiguous", **sizes):
    model = model.double()
    prepared = Programs(model, lift=torch.float64).get(inputs)
    parallel = Parallel(**sizes)
    module = ModuleSpec(("",), tuple(range(parallel.size)), parallel, context_split=split)
    plan = make_plan(Request((module,)), prepared.program, stop_after="shard")
    with lifted(torch.float64):
        assert_exact(model, inputs, plan, prepared.values)


@pytest.mark.parametrize(
    ("model", "tokens", "split", "sizes"),
    [
        ({}, 16, "contiguous", {"tensor": 2}),
        ({}, 15, "zigzag", {"context": 2, "tensor": 2}),
        ({"tied": True}, 16, "contiguous", {"tensor": 2, "pipeline": 2}),
        ({"heads": 8, "kv": 2}, 16, "contiguous", {"tensor": 4}),
    ],
)
def test_a_decoder(model, tokens, split, sizes):
    assert_parity(build(**model), batch(tokens=tokens), split, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "tokens", "split", "sizes"),
    [
        ({"heads": 6, "kv": 6, "hidden": 48}, 15, "contiguous", {"tensor": 4}),
        ({"vocabulary": 130}, 16, "contiguous", {"tensor": 4}),
        ({"tied": True}, 16, "zigzag", {"context": 2, "tensor": 2, "pipeline": 2}),
        ({}, 15, "zigzag", {"context": 4}),
        ({"layers": 8}, 16, "contiguous", {"context": 2, "tensor": 2}),
    ],
)
def test_more_decoders(model, tokens, split, sizes):
    assert_parity(build(**model), batch(model.get("vocabulary", 128), tokens), split, **sizes)


@pytest.mark.parametrize("sizes", [{"expert": 2}, {"expert": 2, "tensor": 2}])
def test_a_mixture_of_experts(sizes):
    torch.manual_seed(0)
    assert_parity(Mixture(), {"ids": batch(32)["input_ids"]}, **sizes)


def test_ranks_that_own_rows_of_an_embedding_run_graphs_of_their_own():
    """A table of positions is divided by rows: each rank looks up those that it has."""
    module = ModuleSpec(("",), (0, 1), Parallel(tensor=2))
    request = Request((module,), dtype="float64", microbatch_size=2)
    assert_passed(verify(request, workload_of("vision_audio_llm"), in_process=True))
