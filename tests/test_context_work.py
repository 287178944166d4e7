"""What context parallelism divides and what runs whole on every rank, word for word."""

from collections import Counter

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.compiler.graph import is_element, tensors_of
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.kernels.collective.members import members
from mllm_compile.model import microbatches, ready_model
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.lower.extract import extract
from mllm_compile.passes.lower.localize import localize, members_of
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.passes.sharding.price import is_view
from tests.families import MODULES
from tests.parity import workload_of

CONTEXT = 2
FAMILIES = (
    "llava",
    "qwen2_5_vl",
    "gemma3",
    "vision_audio_llm",
    "llama4",
    "phi4_multimodal",
    "qwen3_vl_moe",
)


def planned(family):
    modules = tuple(
        ModuleSpec(paths, tuple(range(CONTEXT)), Parallel(context=CONTEXT))
        for paths in MODULES[family]
    )
    request = Request(modules, dtype="float64", microbatches=1, microbatch_size=2)
    workload = workload_of(family)
    model = ready_model(request, workload.model)
    (batch,) = microbatches(request, workload, 0)[0][1]
    program = Programs(model, lift=torch.float64).get(batch).program
    return make_plan(request, program, stop_after="shard")


def flops(graph, own):
    """Those of a forward graph, run on tensors without data."""
    held = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, members(own):
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in held]
        fx.Interpreter(graph).run(*inputs)
    return counter.get_total_flops()


def shares(plan, stage):
    """The FLOPs of every rank's forward graph as parts of those of the whole stage."""
    whole = extract(plan, stage)
    total = flops(whole.graph, {})
    for place in range(CONTEXT):
        at = {"context": place}
        local = localize(whole, plan, stage.index, at)
        yield flops(local.graph, members_of(plan, stage.index, at)) / total


def runs_whole(plan, module):
    """Operators, views apart, that make or read nothing that is divided."""
    nodes = {node.name: node for node in plan.captured.main.graph.nodes}
    found = Counter()
    for name, (strategy,) in plan.shardings[module].strategies.items():
        divided = any(layout.divided for layout in (*strategy.inputs, *strategy.outputs))
        if not divided and not is_element(nodes[name]) and not is_view(nodes[name]):
            elements = sum(t.numel() for t in tensors_of(nodes[name]) if t is not None)
            found[f"{nodes[name].target}"] += elements
    return found


def lines(family):
    plan = planned(family)
    for stage in plan.stages:
        parts = " and ".join(f"{share:.3f}" for share in shares(plan, stage))
        yield f"{', '.join(plan.request.modules[stage.module].paths)}: {parts} of the FLOPs"
        whole = runs_whole(plan, stage.module)
        listed = ", ".join(f"{name} {count}" for name, count in sorted(whole.items()))
        yield f"  elements made whole: {listed or 'none'}"
        yield from (f"  {note}" for note in plan.shardings[stage.module].notes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_work_under_context(golden, family):
    golden(f"context-{family}.txt", "\n".join(lines(family)))
