"""Boundaries of a program: gradients of several readers, messages, bytes, and nothing else."""

import pytest
import torch

from mllm_compile.compiler.request import ModuleSpec, Request
from mllm_compile.plain import reference
from mllm_compile.verify import verify
from tests.boundary_models import (
    MERGING,
    announced,
    compiled,
    least,
    merging,
    request_of,
    run,
    two_readers,
    wide_decoder,
)
from tests.parity import assert_passed

slow = pytest.mark.slow
READERS = (("source",), ("ones",), ("tens",))


@pytest.mark.parametrize(
    "sizes",
    [
        ({"tensor": 2}, {}, {"data": 2}),
        pytest.param(({}, {"tensor": 2}, {"data": 2}), marks=slow),
        pytest.param(({"data": 2}, {"data": 2}, {"tensor": 2}), marks=slow),
        pytest.param(({"data": 2, "tensor": 2}, {"data": 2}, {"data": 2}), marks=slow),
        pytest.param(({"data": 4}, {"data": 2}, {"tensor": 2}), marks=slow),
    ],
)
def test_two_readers_with_gradients_of_1_and_10_make_11(sizes):
    request = request_of(READERS, sizes, microbatches=2, microbatch_size=4)
    result = verify(request, two_readers(), in_process=True)
    assert_passed(result)
    assert "source.bias" in result.errors


def test_the_gradient_of_the_plain_model_is_11():
    """Of every number in the bias: 11 for each of 8 x 3 rows."""
    request = request_of(READERS, ({}, {}, {}), microbatches=2, microbatch_size=4)
    workload = two_readers()
    _, gradients = reference(request, workload.model.double(), workload)
    assert torch.allclose(gradients["source.bias"], torch.full((8,), 11.0 * 24).double())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_four_encoder_lanes_feed_two(reduction):
    """Ragged tokens, one sample without any; a loss over all valid labels, or their sum."""
    workload = merging([3, 0, 5, 1, 2, 2, 4, 1], reduction=reduction)
    request = request_of(MERGING, ({"data": 4}, {"data": 2}), microbatches=2, microbatch_size=4)
    assert_passed(verify(request, workload, in_process=True))


LAYOUTS = [
    (({"data": 4}, {"data": 2}), False),
    (({"data": 2}, {"tensor": 2, "data": 3}), False),
    (({"tensor": 2, "data": 2}, {"context": 2, "data": 2}), True),
    (({"data": 3}, {"tensor": 2, "data": 2}), True),
]


@pytest.mark.parametrize(("sizes", "shared"), LAYOUTS)
def test_messages_are_pieces_and_bytes_are_those_that_must_move(sizes, shared):
    """No message of any other kind; every element once to each rank that needs it."""
    request = request_of(MERGING, sizes, microbatches=2, microbatch_size=4)
    if shared:
        modules = tuple(
            ModuleSpec(module.paths, tuple(range(module.parallel.size)), module.parallel)
            for module in request.modules
        )
        request = Request(modules, microbatches=2, microbatch_size=4, dtype="float64")
    workload = merging([3, 2, 5, 1, 2, 2, 4, 1])
    compiler, step = compiled(request, workload)
    sent = run(compiler, step, request.num_ranks)
    assert sent.messages == announced(compiler, step)
    assert sent.bytes == least(step)
    assert sent.bytes[0] > 0


@pytest.mark.parametrize(
    ("axis", "tokens", "width"),
    [("tensor", 40, 64), pytest.param("context", 600, 256, marks=slow)],
)
def test_a_quarter_of_the_bytes_of_a_bridge_with_a_leader(axis, tokens, width):
    """Encoder 1x4 -> 4 ranks: such a bridge brings in 16A, four times what all lanes make.

    Tensor ranks merge their part of the hidden size; context ranks need all features, and gather
    them among themselves if there are enough of them for that to pay.
    """
    workload = wide_decoder(tokens, width)
    request = request_of(
        (("vision",), ("llm",)), ({"data": 4}, {axis: 4}), microbatches=1, microbatch_size=4
    )
    compiler, step = compiled(request, workload)
    sent = run(compiler, step, request.num_ranks)
    activation = tokens * width * 8
    assert sent.bytes == (4 * activation, 4 * activation)
    assert_passed(verify(request, workload, in_process=True))
