"""Every rank compiles for itself: before the first step they compare what they arrived at."""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch

from mllm_compile.compiler.errors import PlanError, RunError, explain
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.pass_runner import check
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.plan_json import to_json
from mllm_compile.compiler.program import StageProgram
from mllm_compile.passes.lower.collectives import SEGMENTS, of_program
from mllm_compile.runtime.transport import Transport


def agree(transport: Transport, plans: Sequence[Plan]) -> None:
    """Raise RunError on every rank unless all have equal plans of equal graphs.

    They differ if the workload is not deterministic, or if the machines hold other versions of the
    model's code: transfers would then meet in the wrong shapes, or never.
    """
    digest = sha256("".join(map(to_json, plans)).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(transport.device)
    found = [bytes(part.cpu().tolist()) for part in transport.all_gather(mine)]
    others = [rank for rank, other in enumerate(found) if other != found[0]]
    if others:
        raise RunError(
            explain(
                f"ranks {', '.join(map(str, others))}",
                expected="the plan of rank 0",
                got="another one",
                remedy="make the workload deterministic, with the same samples and the same "
                "versions of torch and of the model's code on every rank; under torchrun set "
                "PYTHONHASHSEED=0, in case the model iterates over a set",
            )
        )


Digest = bytes
"""Of the collectives of every action of every stage, one behind the other."""


def agree_on_collectives(
    transport: Transport, plan: Plan, programs: Sequence[Mapping[int, StageProgram]]
) -> None:
    """Raise PlanError on every rank unless those of a stage call the same collectives in one order.

    Args:
        transport: this rank's.
        plan: any plan of the step; they all have the same stages.
        programs: what this rank runs of every microbatch, by stage.
    """
    own = b"".join(digests(programs, stage.index) for stage in plan.stages)
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(transport.device)
    found = [bytes(part.cpu().tolist()) for part in transport.all_gather(mine)]
    check(members_call_alike, found, plan, after="lower")


def digests(programs: Sequence[Mapping[int, StageProgram]], stage: int) -> Digest:
    """One digest for each action of a stage, over all microbatches."""
    lines = [of_program(each[stage]) if stage in each else {} for each in programs]
    return b"".join(
        sha256(repr([x.get(kind) for x in lines]).encode()).digest() for kind in SEGMENTS
    )


def members_call_alike(found: Sequence[Digest], plan: Plan) -> None:
    """Ranks of one data lane of a stage call the same collectives in the same order."""
    size = sha256().digest_size
    for stage in plan.stages:
        mesh = Mesh.of_stage(plan.request, stage)
        for first, *others in mesh.lanes():
            for place, kind in enumerate(SEGMENTS, stage.index * len(SEGMENTS)):
                part = slice(place * size, (place + 1) * size)
                for rank in others:
                    if found[rank][part] != found[first][part]:
                        where = f"rank {rank}, stage {stage.index}, action {kind}"
                        expected = f"the collectives of rank {first}, in their order"
                        raise PlanError(explain(where, expected=expected, got="others"))
