"""Lower a finished plan: the graphs of each stage. Its transfers differ by rank: transfers.py."""

from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.stage import Stage
from mllm_compile.passes.lower.differentiate import differentiate
from mllm_compile.passes.lower.extract import extract


def lower(plan: Plan, stage: Stage) -> StageProgram:
    """``plan, stage -> StageProgram`` without transfers: extract and differentiate."""
    extracted = extract(plan, stage)
    segments = differentiate(extracted)
    return StageProgram(
        stage=stage.index,
        forward=segments.forward,
        input_grad=segments.input_grad,
        weight_grad=segments.weight_grad,
        loss=extracted.loss,
        updates={n[2:]: n for n in extracted.outputs if n.startswith("u:")} or None,
    )
