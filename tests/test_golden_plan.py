"""Plans as people see them, kept word for word: a change of a decision shows up in a diff."""

import io

import pytest
import torch
import transformers
from rich.console import Console

from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.document import Document
from mllm_compile.model import microbatches, ready_model
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.render import plan_view
from mllm_compile.render_schedule import schedule_grid
from tests.families import FAMILIES, MODULES

WRITTEN_WITH = ("2.13", "5.24")  # other versions of torch or transformers trace other graphs
WIDTH = 160


def request_of(family: str, frozen: int) -> Request:
    """Every part on one rank of its own, the last one on two; the first ``frozen`` are frozen."""
    parts = MODULES[family]
    last = len(parts) - 1
    specs = [
        ModuleSpec(
            paths,
            (index,) if index < last else (last, last + 1),
            Parallel(pipeline=1 if index < last else 2),
            trainable=False if index < frozen else None,
        )
        for index, paths in enumerate(parts)
    ]
    return Request(tuple(specs), family, "float64", microbatches=3, microbatch_size=2)


@pytest.mark.skipif(
    not (
        torch.__version__.startswith(WRITTEN_WITH[0])
        and transformers.__version__.startswith(WRITTEN_WITH[1])
    ),
    reason="the golden files are of other versions",
)
@pytest.mark.parametrize(("family", "frozen"), [("llava", 1), ("qwen3_vl", 0)])
def test_plan(golden, family: str, frozen: int) -> None:
    request = request_of(family, frozen)
    workload = FAMILIES[family]()
    model = ready_model(request, workload.model)
    (batch,) = microbatches(request, workload, 0)[0][1]
    program = Programs(model, lift=torch.float64).get(batch).program
    document = Document.of(make_plan(request, program), model)
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, markup=False)
    console.print(plan_view(document))
    console.print(schedule_grid(document, WIDTH))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    golden(f"plan-{family}.txt", "\n".join(line.rstrip() for line in shown.splitlines()))
