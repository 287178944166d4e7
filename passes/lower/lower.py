"""Lower a finished plan: one StageProgram for each stage."""

from torch import fx

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram, Transfer
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.differentiate import differentiate
from mllm_compile.passes.lower.extract import extract


def lower(plan: Plan, stage: Stage) -> StageProgram:
    """``plan, stage -> StageProgram``: extract, differentiate, and describe its transfers."""
    extracted = extract(plan, stage)
    segments = differentiate(extracted)
    nodes = {node.name: node for node in plan.captured.main.graph.nodes}
    into = [boundary for boundary in plan.boundaries if boundary.target == stage.index]
    out = [boundary for boundary in plan.boundaries if boundary.source == stage.index]
    return StageProgram(
        stage=stage.index,
        forward=segments.forward,
        input_grad=segments.input_grad,
        weight_grad=segments.weight_grad,
        sends_forward=_transfers(out, nodes, backward=False, peer="target"),
        receives_forward=_transfers(into, nodes, backward=False, peer="source"),
        sends_backward=_transfers(into, nodes, backward=True, peer="source"),
        receives_backward=_transfers(out, nodes, backward=True, peer="target"),
        loss=extracted.loss,
        updates={n[2:]: n for n in extracted.outputs if n.startswith("u:")} or None,
    )


def _transfers(
    boundaries: list[Boundary], nodes: dict[str, fx.Node], *, backward: bool, peer: str
) -> tuple[Transfer, ...]:
    made = []
    for boundary in boundaries:
        values = boundary.gradients if backward else boundary.values
        if values:
            made.append(
                Transfer(
                    peer=getattr(boundary, peer),
                    values=tuple(f"d%{value}" if backward else f"%{value}" for value in values),
                    specs=tuple(TensorSpec.dense(nodes[value].meta["val"]) for value in values),
                )
            )
    return tuple(made)
