"""The commands that look and decide: capture, plan, inspect. Each returns the exit code."""

from argparse import Namespace
from contextlib import nullcontext
from difflib import unified_diff
from itertools import count
from pathlib import Path

import torch
from rich.console import RenderableType
from torch import nn

from mllm_compile.compilation import richest, shown_intervals
from mllm_compile.compiler.captured import Captured, Prepared
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.request import Request
from mllm_compile.document import Document
from mllm_compile.meta import parameters_on_meta
from mllm_compile.model import load_workload, microbatches, ready_model, whole
from mllm_compile.output import Output, write
from mllm_compile.passes.capture import programs
from mllm_compile.passes.capture.capture import loss_of
from mllm_compile.passes.pipeline import make_plan
from mllm_compile.plain import as_compiled
from mllm_compile.render import plan_view
from mllm_compile.render_capture import capture_view
from mllm_compile.render_graph import explain_node, graph_view, rank_view
from mllm_compile.render_schedule import schedule_grid
from mllm_compile.workload import Batch, Workload


def capture(options: Namespace) -> int:
    """One graph: nodes, operators, modules, trained and frozen parts, difference to eager."""
    request = Request.load(options.path, options.overrides)
    model, workload = _load(request, meta=options.meta)
    batch = whole(microbatches(request, workload, 0)[0])[0]
    prepared = _programs(request, model).get(batch)
    program = prepared.program
    document = Document.of(Plan(request, program), model)
    losses = None if options.meta else (_eager_loss(request, model, batch), _loss(model, prepared))
    Output().print(capture_view(document, program, losses))
    return 0


def captured(options: Namespace) -> Captured:
    """The first microbatch's program, of a model without storage."""
    request = Request.load(options.path, options.overrides)
    model, workload = _load(request, meta=True)
    return _programs(request, model).get(whole(microbatches(request, workload, 0)[0])[0]).program


def plan(options: Namespace) -> int:
    """All decisions, as tables."""
    made = _plan(options, stop_after=options.stop_after, dump=options.dump)
    if options.output:
        write(Path(options.output), made.to_json())
    _show_plan(made)
    return 0


def inspect(options: Namespace) -> int:
    """A plan file or a request: everything, one module's graph, one rank, one node, or a diff."""
    if options.diff:
        _diff(options)
        return 0
    is_plan = Path(options.path).suffix == ".json"
    document = loaded(options) if is_plan else _plan(options)
    views: list[RenderableType] = []
    if options.graph is not None:
        views.append(graph_view(document, options.graph))
    if options.rank is not None:
        views.append(rank_view(document, options.rank))
    if options.explain is not None:
        views.append(explain_node(document, options.explain))
    for view in views:
        Output().print(view)
    if not views:
        _show_plan(document)
    return 0


def loaded(options: Namespace) -> Document:
    """The plan file that was asked for."""
    if options.overrides:
        got, remedy = f"--set {options.overrides[0]}", "give the request itself, or plan again"
        raise RequestError(explain(options.path, expected="no change", got=got, remedy=remedy))
    return Document.load(options.path)


def _plan(options: Namespace, stop_after: str | None = None, dump: str | None = None) -> Document:
    """Plan the first step's richest microbatch; observe every pass."""
    return _plans(options, stop_after, dump)[-1][1]


def _plans(
    options: Namespace, stop_after: str | None = None, dump: str | None = None
) -> list[tuple[str, Document]]:
    """(name of pass, document after it), in order."""
    request = Request.load(options.path, options.overrides)
    model, workload = _load(request, meta=options.meta)
    cache = _programs(request, model)
    batches = (b for mb in microbatches(request, workload, 0) for b in whole(mb))
    prepared = [cache.get(batch) for batch in batches]
    program = richest(item.program for item in prepared)
    same = [item for item in prepared if item.program is program]
    intervals = shown_intervals(request, model, same)
    made: list[tuple[str, Document]] = []
    numbers = count()

    def observe(name: str, plan: Plan) -> None:
        document = Document.of(plan, model)
        made.append((name, document))
        if dump:
            write(Path(dump) / f"{next(numbers):02}-{name}.json", document.to_json())

    observe("capture", Plan(request, program))
    make_plan(request, program, intervals=intervals, stop_after=stop_after, observers=(observe,))
    return made


def _show_plan(document: Document) -> None:
    target = Output()
    target.print(plan_view(document))
    if document.schedule is not None:
        target.print(schedule_grid(document, target.width))


def _diff(options: Namespace) -> None:
    """Lines of the plan file that two passes apart differ in."""
    plans = dict(_plans(options))
    before, after = options.diff
    for name in options.diff:
        if name not in plans:
            raise RequestError(explain(f"pass {name!r}", expected=f"one of {', '.join(plans)}"))
    old, new = (plans[name].to_json().splitlines() for name in (before, after))
    for line in unified_diff(old, new, before, after, lineterm="", n=0):
        print(line)


def _load(request: Request, *, meta: bool) -> tuple[nn.Module, Workload]:
    """The workload, its model ready for the request; on meta, parameters have no storage."""
    with parameters_on_meta() if meta else nullcontext():
        workload = load_workload(request)
    return ready_model(request, workload.model), workload


def _programs(request: Request, model: nn.Module) -> programs.Programs:
    return programs.Programs(model, lift=torch.float64 if request.dtype == "float64" else None)


def _eager_loss(request: Request, model: nn.Module, batch: Batch) -> float:
    with torch.no_grad(), as_compiled(request):
        return float(loss_of(model(**batch))[0])


def _loss(model: nn.Module, prepared: Prepared) -> float:
    """The loss that the captured graph computes of its microbatch."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return float(programs.run(prepared.program, state, prepared)[0].detach())
