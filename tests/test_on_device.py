"""Lowered graphs and their inputs stand on the device of a rank; without a GPU, by fake tensors."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Interpreter

from mllm_compile.compilation import Compiler
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.kernels.attention.gpu import table
from mllm_compile.kernels.collective.members import members
from mllm_compile.model import load_workload, microbatches, ready_model
from mllm_compile.passes.lower.emit import KERNELS
from mllm_compile.passes.lower.localize import members_of
from mllm_compile.rank import Rank
from mllm_compile.runtime.local_transport import LocalWorld
from mllm_compile.verify import verify

GPU = torch.device("cuda", 1)
WHOLE = Request(
    (
        ModuleSpec(("model.vision_tower", "model.multi_modal_projector"), (0,)),
        ModuleSpec(("model.language_model", "lm_head"), (1,)),
    ),
    workload="examples.llava:tiny",
    dtype="bfloat16",
)
DIVIDED = Request(
    (
        ModuleSpec(
            ("model.vision_tower", "model.multi_modal_projector"), (0, 1), Parallel(tensor=2)
        ),
        ModuleSpec(("model.language_model", "lm_head"), (2, 3), Parallel(context=2)),
    ),
    workload="examples.llava:tiny",
    dtype="bfloat16",
)


def compiled(request, device):
    workload = load_workload(request)
    compiler = Compiler(request, ready_model(request, workload.model), device)
    return compiler, compiler.step(microbatches(request, workload, 0))


def segments(request, device):
    """(segment, members of the rank that runs it)"""
    compiler, _ = compiled(request, device)
    plan = compiler.plans[0]
    for stage in plan.stages:
        axes = plan.shardings[stage.module].axes
        places = dict.fromkeys((axis.name for axis in axes), 0)
        program = compiler.lowered(plan, stage.index, tuple(places.items()))
        for name in ("forward", "input_grad", "weight_grad"):
            if (segment := getattr(program, name)) is not None:
                yield segment, members_of(plan, stage.index, places)


def devices_of_results(segment, own):
    """Where a segment's results stand if its inputs stand on the GPU; an error if any does not."""
    with FakeTensorMode() as mode, members(own):
        inputs = [
            torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=GPU)
            for node in segment.graph.graph.find_nodes(op="placeholder")
            for val in [node.meta["val"]]
        ]
        assert all(mode is x.fake_mode for x in inputs)
        results = Interpreter(segment.graph).run(*inputs)
    return {x.device for x in results if x is not None}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("request_", [WHOLE, DIVIDED], ids=["whole", "divided"])
def test_graphs_make_everything_on_their_device(request_, hopper):
    found = [devices_of_results(*each) for each in segments(request_, GPU)]
    assert len(found) >= 4
    assert set().union(*found) == {GPU}


def test_graphs_for_the_host_do_not_run_on_another_device():
    with pytest.raises((RuntimeError, AssertionError)):  # noqa: PT012  whichever comes first
        found = [devices_of_results(*each) for each in segments(WHOLE, torch.device("cpu"))]
        assert set().union(*found) == {GPU}


def test_attentions_name_the_kernels_of_their_device(hopper):
    named = {
        str(node.kwargs.get("kernel") or node.args[-1])
        for segment, _ in segments(DIVIDED, GPU)
        for node in segment.graph.graph.nodes
        if node.target in KERNELS
    }
    assert named
    assert all(name.startswith("triton sm90 bfloat16 16x16 i1: ") for name in named)
    forward = " ".join(map(str, table.CONFIGS["sm90", 16, 64]["forward"]))
    assert any(name.endswith(f": forward {forward}") for name in named)


@pytest.mark.parametrize("private", [True, False])
def test_parameters_and_buffers_come_to_the_device(private):
    compiler, _ = compiled(DIVIDED, torch.device("cpu"))
    there = torch.device("meta")
    for place in range(4):
        transport = LocalWorld(4).transport(place, there)
        rank = Rank(compiler, transport, private=private)
        held = [*rank.state.parameters.values(), *rank.state.buffers.values()]
        assert {x.device for x in held} == {there}
        assert rank.state.parameters
    assert {p.device.type for p in compiler.model.parameters()} == {"cpu"}


def test_on_the_host_a_lone_rank_trains_the_model_itself():
    compiler, _ = compiled(WHOLE, torch.device("cpu"))
    model = dict(compiler.model.named_parameters())
    rank = Rank(compiler, LocalWorld(2).transport(1))
    assert all(parameter is model[name] for name, parameter in rank.state.parameters.items())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_rank_on_a_gpu_agrees_with_the_plain_model(dtype):
    module = ModuleSpec(("model", "lm_head"), (0,))
    assert verify(Request((module,), workload="examples.llava:tiny", dtype=dtype)).passed
