"""The annotated graph: nodes by module, what one rank runs, and the account of a single node."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.stage import Stage
from mllm_compile.document import Document, NodeRecord
from mllm_compile.passes.modules import module_of_path
from mllm_compile.quantities import count, numbers, size
from mllm_compile.render import boundary_table, new_table, stage_nodes, stage_table


def listing(nodes: Iterable[NodeRecord]) -> Table:
    """One row per computed node in graph order, a section per module that owns a run of them."""
    table = new_table("Graph", "node", "operator", "type", "stage")
    for name in ("F", "dI", "dW", "saved"):
        table.add_column(name, justify="right")
    table.add_column("grad")
    computed = (node for node in nodes if node.kind == "op")
    for owner, run in groupby(computed, key=lambda node: node.owner):
        table.add_section()
        table.add_row(Text(owner or "(model)", style="bold"))
        for node in run:
            table.add_row(
                f"  {node.name}",
                node.op,
                node.type,
                ",".join(map(str, node.stages)) or "-",
                *map(count, (node.forward, node.input_grad, node.weight_grad)),
                size(node.saved),
                "yes" if node.grad else "-",
            )
    return table


def graph_view(document: Document, path: str) -> Table:
    """The nodes that the module at ``path``, or a part of it, owns; all of them for ``""``."""
    nodes = [n for n in document.nodes if n.kind == "op" and _under(n.owner, path)]
    if not nodes:
        raise RequestError(explain(f"module {path!r}", expected="the owner of a node", got="none"))
    return listing(nodes)


def rank_view(document: Document, rank: int) -> Group:
    """All that one rank does: its stages, what crosses their borders, its nodes and actions."""
    stages = [stage for stage in document.stages if rank in stage.ranks]
    if not stages:
        ranks = sorted({rank for stage in document.stages for rank in stage.ranks})
        raise RequestError(explain(f"rank {rank}", expected=f"one of {ranks}"))
    indices = {stage.index for stage in stages}
    part = Document(
        document.request,
        document.nodes,
        document.parameters,
        tuple(stages),
        tuple(b for b in document.boundaries if {b.source, b.target} & indices),
    )
    parts: list[RenderableType] = [stage_table(part), boundary_table(part)]
    parts += [
        collective_table(document, stage, rank)
        for stage in stages
        if any(row.stage == stage.index for row in document.collectives)
    ]
    parts += [listing(stage_nodes(document, stage)) for stage in stages]
    if document.schedule is not None:
        actions = " ".join(map(str, document.schedule.actions.get(rank, ())))
        parts.append(Text(f"actions of rank {rank}: {actions}"))
    return Group(*parts)


def collective_table(document: Document, stage: Stage, rank: int) -> Table:
    """What a rank exchanges with others of its stage, and with which, in dataflow order."""
    mesh = Mesh.of_stage(document.request, stage)
    table = new_table(f"Collectives of stage {stage.index}", "value", "from", "to", "axis", "ranks")
    for name in ("forward", "backward"):
        table.add_column(name)
    for row in document.collectives:
        if row.stage == stage.index:
            ranks = numbers(mesh.group(rank, row.axis))
            passes = (row.forward or "-", row.backward or "-")
            table.add_row(row.value, row.have, row.want, row.axis, ranks, *passes)
    return table


def explain_node(document: Document, name: str) -> Table:
    """Where a node comes from, where it runs and why, what it costs, what it reads and feeds."""
    node = document.node(name)
    table = Table(title=node.name, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in _facts(document, node):
        table.add_row(key, value)
    return table


def _facts(document: Document, node: NodeRecord) -> Iterator[tuple[str, str]]:
    records = {record.name: record for record in document.nodes}
    what = node.op if node.kind == "op" else f"{node.kind} {node.op}"
    yield "value", f"{what} -> {node.type}, {size(node.size)}"
    yield "source", node.where or "-"
    if node.kind == "op":
        yield "owner", node.owner or "(model)"
        yield "runs in", _place(document, node)
    if node.site:
        yield "kernels for", node.site
    yield "gradient", _gradient(document, node)
    costs = (node.forward, node.input_grad, node.weight_grad)
    yield "FLOPs", ", ".join(f"{k} {count(v)}" for k, v in zip(("F", "dI", "dW"), costs))  # noqa: B905
    yield "saved", size(node.saved)
    for boundary in document.boundaries:
        if node.name in boundary.values:
            back = ", its gradient comes back" if node.name in boundary.gradients else ""
            yield "crosses", f"stage {boundary.source} -> stage {boundary.target}{back}"
    for operand in node.reads:
        yield "reads", _line(records[operand])
    for user in document.nodes:
        if node.name in user.reads:
            yield "feeds", _line(user)


def _line(node: NodeRecord) -> str:
    stages = f", stage {', '.join(map(str, node.stages))}" if node.stages else ""
    what = node.op if node.kind == "op" else f"{node.kind} {node.op}"
    return f"{node.name}: {what} -> {node.type}{stages}"


def _place(document: Document, node: NodeRecord) -> str:
    """The stages of a node and the rule that put it there."""
    if not node.stages:
        return "no stage yet"
    stages: list[Stage] = [stage for stage in document.stages if stage.index in node.stages]
    where = ", ".join(f"stage {s.index} (rank {', '.join(map(str, s.ranks))})" for s in stages)
    if node.module is None:
        return f"{where}: computed from inputs alone, so every stage that needs it computes it"
    spec = document.request.modules[node.module]
    if module_of_path(document.request, node.owner) == node.module:
        return f"{where}: its owner belongs to {spec.name}"
    return f"{where}: no module of the request owns it; it runs in the first stage that uses it"


def _gradient(document: Document, node: NodeRecord) -> str:
    """Whether gradient flows through a value, and the nearest reason."""
    if not node.grad:
        return "none: no trained parameter is upstream on a differentiable path"
    if node.kind != "op":
        return "yes: it is trained"
    records = {record.name: record for record in document.nodes}
    carriers = [records[operand].name for operand in node.reads if records[operand].grad]
    return f"yes, through {', '.join(carriers)}"


def _under(owner: str, path: str) -> bool:
    return not path or owner == path or owner.startswith(path + ".")
