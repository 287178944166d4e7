"""A document as tables: which module runs where, what each stage does and why, what crosses.

All figures are of one microbatch, or of one data lane of it where every module has several. Every
table is derived from the document alone.
"""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import takewhile

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.document import Document, NodeRecord, ParameterRecord
from mllm_compile.passes.modules import module_of_path
from mllm_compile.quantities import count, numbers, share, size
from mllm_compile.sharding_record import ShardingRecord


def plan_view(document: Document) -> Group:
    """Everything that has been decided, as far as the passes have run."""
    parts: list[RenderableType] = [heading(document), module_table(document)]
    if document.stages:
        parts += [stage_table(document), boundary_table(document), glue_table(document)]
        parts.append(attention_table(document))
    if document.shardings:
        parts.append(sharding_table(document))
    notes = [
        *document.notes,
        *(note for row in document.shardings for note in _notes(document, row)),
    ]
    if notes:
        parts.append(Text("\n".join(f"note: {note}" for note in notes)))
    return Group(*parts)


def heading(document: Document) -> Text:
    """One line on the request, one on the graph."""
    request = document.request
    ops = [node for node in document.nodes if node.kind == "op"]
    lanes = min(request.lane_counts)
    part = "one microbatch" if lanes == 1 else f"one of {lanes} data lanes of a microbatch"
    return Text(
        f"{request.workload or 'plan'}: {request.num_ranks} ranks, {request.microbatches} "
        f"microbatches of {request.microbatch_size} samples, {request.dtype}\n"
        f"one graph: {len(ops)} nodes, {len({node.op for node in ops})} operators, "
        f"{len(document.parameters)} parameters; figures are of {part}"
    )


def module_table(document: Document) -> Table:
    """One row per module of the request; together they account for every parameter once."""
    table = new_table("Modules", "module", "ranks", "stages", "trained")
    for name in ("parameters", "F", "dI", "dW", "saved"):
        table.add_column(name, justify="right")
    for index, spec in enumerate(document.request.modules):
        nodes = [node for node in document.nodes if node.module == index]
        parameters = [p for p in document.parameters if module_of(document, p) == index]
        stages = [stage.index for stage in document.stages if stage.module == index]
        places = (spec.name, numbers(spec.ranks), numbers(stages), trained(parameters))
        table.add_row(*places, *_figures(parameters, nodes))
    ops = [node for node in document.nodes if node.kind == "op"]
    copied = [node for node in ops if node.module is None and node.stages]
    if any(node.forward for node in copied):
        table.add_row("(replicated nodes, counted once)", "", "", "", *_figures((), copied))
    table.add_section()
    table.add_row("all", "", "", trained(document.parameters), *_figures(document.parameters, ops))
    return table


def stage_table(document: Document) -> Table:
    """One row per stage: what it holds, its share of the work, which actions it has, and why."""
    table = new_table("Stages", "stage", "rank", "holds", "nodes")
    for name in ("parameters", "F", "dI", "dW", "share", "saved"):
        table.add_column(name, justify="right")
    table.add_column("does")
    table.add_column("why")
    work = {stage.index: _work(stage_nodes(document, stage)) for stage in document.stages}
    for stage in document.stages:
        nodes = stage_nodes(document, stage)
        parameters = [p for p in document.parameters if p.stage == stage.index]
        figures = _figures(parameters, nodes)
        copies = f" + {len(stage.replicated)}" if stage.replicated else ""
        table.add_row(
            str(stage.index),
            numbers(stage.ranks),
            holds(document, stage),
            f"{len(stage.nodes)}{copies}",
            *figures[:-1],
            share(work[stage.index], sum(work.values())),
            figures[-1],
            *actions_of(document, stage),
        )
    return table


def boundary_table(document: Document) -> Table:
    """One row per value that crosses between stages, with its bytes in both directions."""
    table = new_table("Boundaries", "from", "to", "value", "type", "made by")
    table.add_column("forward", justify="right")
    table.add_column("backward", justify="right")
    records = {node.name: node for node in document.nodes}
    for boundary in document.boundaries:
        for value in boundary.values:
            node = records[value]
            back = size(node.size) if value in boundary.gradients else "-"
            ends = (str(boundary.source), str(boundary.target))
            table.add_row(*ends, value, node.type, node.owner or "(model)", size(node.size), back)
    forward, backward = traffic(document, document.boundaries)
    table.add_section()
    table.add_row("", "", "all", "", "", size(forward), size(backward))
    return table


def sharding_table(document: Document) -> Table:
    """One row per axis of a module: what it divides, what its ranks exchange, what runs whole."""
    table = new_table("Layouts", "module", "axis", "ranks", "divided", "FLOPs per rank")
    for name in ("forward", "backward"):
        table.add_column(name)
    for row in document.shardings:
        name = document.request.modules[row.module].name
        divided = f"{row.divided} of {row.parameters} parameters"
        work = share(row.work, 1)
        table.add_row(name, row.axis, str(row.ranks), divided, work, row.forward, row.backward)
    return table


def glue_table(document: Document) -> Table:
    """Nodes that no module of the request owns: where they went, and which are copied."""
    table = new_table("Glue and replicated nodes", "owner", "nodes", "runs in", "why", "operators")
    groups: dict[tuple[str, str], list[NodeRecord]] = {}
    for node in document.nodes:
        copied = node.module is None
        if node.kind != "op" or not node.stages:
            continue
        if copied or module_of_path(document.request, node.owner) != node.module:
            why = "inputs alone decide it" if copied else "first stage that uses it"
            groups.setdefault((pattern(node.owner) or "(model)", why), []).append(node)
    for (owner, why), nodes in sorted(groups.items()):
        operators = most_common(node.op for node in nodes)
        table.add_row(owner, str(len(nodes)), _runs_in(nodes), why, operators)
    return table


def attention_table(document: Document) -> Table:
    """What the kernels of attention are compiled for."""
    mask = "intervals and masks"
    table = new_table("Attention", "dtype", "head size", mask, "nodes", "runs in", "owner")
    groups: dict[str, list[NodeRecord]] = {}
    for node in document.nodes:
        if node.site:
            groups.setdefault(node.site, []).append(node)
    for site, nodes in groups.items():
        owners = dict.fromkeys(pattern(node.owner) or "(model)" for node in nodes)
        table.add_row(*site.split(), str(len(nodes)), _runs_in(nodes), ", ".join(owners))
    return table


def _runs_in(nodes: Iterable[NodeRecord]) -> str:
    stages = sorted({stage for node in nodes for stage in node.stages})
    return f"stage{'s' * (len(stages) > 1)} {numbers(stages)}"


def pattern(path: str) -> str:
    """The path with ``*`` for numbers between dots, so that equal layers fall together."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def holds(document: Document, stage: Stage) -> str:
    """First and last part of the module that the stage computes: ``layers.4 … 9``.

    Told are the two names of a path that end with its last number: a layer that is cut stands in
    both stages.
    """
    own = set(stage.nodes)
    paths = [
        re.sub(r"(\.\d+)\.\D+$", r"\1", node.owner).split(".")
        for node in document.nodes
        if node.name in own and module_of_path(document.request, node.owner) == stage.module
    ]
    if not paths:
        return "glue"
    first, last = paths[0], paths[-1]
    pairs = zip(first[:-1], last[:-1], strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    ends = [".".join(first[-2:])] + ([".".join(last[shared:][-2:])] if first != last else [])
    return " … ".join(ends)


def actions_of(document: Document, stage: Stage) -> tuple[str, str]:
    """(``F I W`` as far as the stage has them, the reason in words)."""
    gradients_in = any(b.target == stage.index and b.gradients for b in document.boundaries)
    trained_inputs = {n.name for n in document.nodes if n.kind == "parameter" and n.grad}
    trains = any(
        node.grad and not trained_inputs.isdisjoint(node.reads)
        for node in stage_nodes(document, stage)
    )
    reasons = {
        (False, False): "nothing to train up to here",
        (False, True): "trained; nothing upstream is",
        (True, False): "frozen; lets gradients upstream",
        (True, True): "trained, and upstream too",
    }
    done = "F" + " I" * gradients_in + " W" * trains
    return done, reasons[gradients_in, trains]


def traffic(document: Document, boundaries: Iterable[Boundary]) -> tuple[int, int]:
    """(bytes forward, bytes backward) of one microbatch over these boundaries."""
    sizes = {node.name: node.size for node in document.nodes}
    forward = backward = 0
    for boundary in boundaries:
        forward += sum(sizes[name] for name in boundary.values)
        backward += sum(sizes[name] for name in boundary.gradients)
    return forward, backward


def stage_nodes(document: Document, stage: Stage) -> list[NodeRecord]:
    """The nodes that a stage computes, its replicated ones too, in graph order."""
    return [node for node in document.nodes if stage.index in node.stages and node.kind == "op"]


def module_of(document: Document, parameter: ParameterRecord) -> int | None:
    """The request module that accounts for a parameter: by its stage, before that by its path."""
    if parameter.stage is None:
        return module_of_path(document.request, parameter.name)
    return next(s.module for s in document.stages if s.index == parameter.stage)


def trained(parameters: Iterable[ParameterRecord]) -> str:
    """``yes``, ``no``, or the part of the elements that is trained."""
    elements: Counter[bool] = Counter()
    for parameter in parameters:
        elements[parameter.trainable] += parameter.numel
    if not elements[True]:
        return "no"
    return "yes" if not elements[False] else share(elements[True], elements.total())


def most_common(names: Iterable[str], limit: int = 4) -> str:
    """``add 12, view 4, …``."""
    counts = Counter(names).most_common()
    text = ", ".join(f"{name} {number}" for name, number in counts[:limit])
    return f"{text}, …" if len(counts) > limit else text


def new_table(title: str, *columns: str) -> Table:
    """An empty table in the one style."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _notes(document: Document, row: ShardingRecord) -> list[str]:
    return [f"{document.request.modules[row.module].name}: {note}" for note in row.notes]


def _figures(parameters: Iterable[ParameterRecord], nodes: list[NodeRecord]) -> list[str]:
    """Parameters, F, dI, dW, saved bytes."""
    flops = [
        sum(getattr(n, name) for n in nodes) for name in ("forward", "input_grad", "weight_grad")
    ]
    elements = sum(parameter.numel for parameter in parameters)
    return [count(elements), *map(count, flops), size(sum(node.saved for node in nodes))]


def _work(nodes: Iterable[NodeRecord]) -> int:
    return sum(node.forward + node.input_grad + node.weight_grad for node in nodes)
