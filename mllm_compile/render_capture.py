"""A captured program as tables: what is in it, what it stands on, how close it is to eager."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mllm_compile.compiler.captured import Captured
from mllm_compile.document import Document
from mllm_compile.passes.modules import module_of_path
from mllm_compile.quantities import count
from mllm_compile.render import most_common, new_table, pattern, trained

MAX_ROWS = 20


def capture_view(
    document: Document, program: Captured, losses: tuple[float, float] | None
) -> Group:
    """Counts, modules, operators, guards, hoisted helpers, and the loss beside eager's.

    ``losses`` are eager's and the program's; None where parameters have no storage.
    """
    parts: list[RenderableType] = [
        _heading(document, program),
        _modules(document),
        _operators(document),
    ]
    if program.guards:
        parts.append(_guards(program))
    parts.append(Text("\n".join(_remarks(document, program, losses))))
    return Group(*parts)


def _heading(document: Document, program: Captured) -> Text:
    ops = [node for node in document.nodes if node.kind == "op"]
    prologue = sum(node.op == "call_function" for node in program.prologue.graph.nodes)
    kinds = Counter(item.kind for item in program.inputs)
    inputs = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    report = program.report
    return Text(
        f"{document.request.workload}: one graph of {len(ops)} nodes and "
        f"{len({node.op for node in ops})} operators, captured in {report.seconds:.1f} s "
        f"({report.passes} passes)\n"
        f"inputs: {inputs}; the prologue computes {prologue} nodes on the host"
    )


def _modules(document: Document) -> Table:
    table = new_table(
        "Modules", "module", "nodes", "parameters", "trained", "most frequent operators"
    )
    owners = {node.name: module_of_path(document.request, node.owner) for node in document.nodes}
    places = [*enumerate(document.request.modules), (None, None)]
    for index, spec in places:
        nodes = [n.op for n in document.nodes if n.kind == "op" and owners[n.name] == index]
        parameters = [
            p for p in document.parameters if module_of_path(document.request, p.name) == index
        ]
        if spec is None and not nodes and not parameters:
            continue
        table.add_row(
            spec.name if spec else "(glue)",
            str(len(nodes)),
            count(sum(parameter.numel for parameter in parameters)),
            trained(parameters) if parameters else "",
            most_common(nodes),
        )
    return table


def _operators(document: Document) -> Table:
    table = new_table("Operators", "operator", "nodes")
    counts = Counter(node.op for node in document.nodes if node.kind == "op").most_common()
    for name, number in counts[:MAX_ROWS]:
        table.add_row(name, str(number))
    if len(counts) > MAX_ROWS:
        table.add_row(
            f"and {len(counts) - MAX_ROWS} more", str(sum(n for _, n in counts[MAX_ROWS:]))
        )
    return table


def _guards(program: Captured) -> Table:
    table = new_table(
        "Guards: what the host read, and a fitting batch must repeat", "kind", "value"
    )
    table.add_column("from")
    table.add_column("where")
    for guard in program.guards[:MAX_ROWS]:
        table.add_row(guard.kind, str(guard.value), ", ".join(guard.inputs), guard.where)
    if len(program.guards) > MAX_ROWS:
        table.add_row(f"and {len(program.guards) - MAX_ROWS} more", "", "", "")
    return table


def _remarks(
    document: Document, program: Captured, losses: tuple[float, float] | None
) -> Iterator[str]:
    report = program.report
    for name in report.hoisted:
        yield f"hoisted: {name}"
    for site, number in Counter(map(pattern, report.attention)).items():
        yield f"attention: {site}" + (f" ({number} sites)" if number > 1 else "")
    yield from (f"note: {note}" for note in document.notes)
    if not program.splittable:
        yield "the loss is no sum or mean over samples: one microbatch only"
    if losses is None:
        yield "loss: not computed, parameters have no storage"
    else:
        eager, captured = losses
        difference = f"difference {abs(eager - captured):.1e}"
        yield f"loss: eager {eager:.12g}, captured {captured:.12g}, {difference}"
