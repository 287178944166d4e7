"""Lower a finished plan: the graphs of each stage. Its transfers differ by rank: transfers.py."""

from collections.abc import Mapping

import torch

from mllm_compile.compiler.pass_runner import check
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.sharding import Sharding
from mllm_compile.compiler.stage import Stage
from mllm_compile.kernels.attention.kernel import target_of
from mllm_compile.kernels.collective.members import members
from mllm_compile.passes.lower.differentiate import differentiate
from mllm_compile.passes.lower.emit import attentions_name_their_kernels, emit
from mllm_compile.passes.lower.extract import extract
from mllm_compile.passes.lower.local_law import ranks_hold_what_is_planned
from mllm_compile.passes.lower.localize import localize, members_of
from mllm_compile.passes.lower.on_device import on_device
from mllm_compile.passes.lower.segment_laws import (
    joint_graph_is_kept,
    values_are_made_before_they_are_read,
    wanted_gradients_are_made,
)

HOST = torch.device("cpu")


def lower(
    plan: Plan,
    stage: Stage,
    places: Mapping[str, int] | None = None,
    device: torch.device = HOST,
) -> StageProgram:
    """``plan, stage -> StageProgram`` without transfers: extract, localize, emit, differentiate.

    ``places`` are those of the rank along the axes of the module's sharding, if it has any;
    ``device`` is where it computes.
    """
    places = places or {}
    whole = extract(plan, stage)
    local = localize(whole, plan, stage.index, places)
    check(ranks_hold_what_is_planned, local, whole, plan, stage.index, places, after="localize")
    target = target_of(device)
    local = emit(local, target)
    with members(members_of(plan, stage.index, places)):
        segments = differentiate(local)
    check(joint_graph_is_kept, segments, stage.index, after="differentiate")
    check(values_are_made_before_they_are_read, segments, local, stage.index, after="differentiate")
    check(wanted_gradients_are_made, segments, local, plan, stage.index, after="differentiate")
    check(attentions_name_their_kernels, segments, target, stage.index, after="differentiate")
    segments = on_device(segments, device)
    return StageProgram(
        stage=stage.index,
        forward=segments.forward,
        input_grad=segments.input_grad,
        weight_grad=segments.weight_grad,
        loss=local.loss,
        updates={n[2:]: n for n in local.outputs if n.startswith("u:")} or None,
    )


def differing(plan: Plan, stage: Stage) -> frozenset[str]:
    """The axes whose ranks run different graphs of a stage.

    Context ranks hold other tokens, perhaps not equally many. Tensor and expert divide evenly:
    their ranks differ in their place alone, which graphs name only in the operators for a divided
    vocabulary, class or expert.
    """
    sharding = plan.shardings[stage.module] if plan.shardings else Sharding()
    special = {
        axis.name
        for name in stage.nodes
        for axis, strategy in zip(sharding.axes, sharding.strategies.get(name, ()), strict=False)
        if strategy.special
    }
    return frozenset(special | {"context"})
