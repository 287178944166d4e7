"""A plan as data: what a plan file holds, and all that the inspection commands read.

A plan refers to a live graph and model; a document holds the same facts as plain values, so that a
plan can be stored, compared, edited and looked at without them. Both directions are exact:
``Document.from_json(document.to_json()) == document``. FLOPs count a multiply-add as two.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.plan import NodeCost, Plan
from mllm_compile.compiler.request import Request
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.lower.emit import KERNELS, site_of
from mllm_compile.sharding_record import (
    CollectiveRecord,
    ShardingRecord,
    collective_records,
    sharding_records,
)

FORMAT = 2


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node of the main graph. ``stages`` has several entries where the node is replicated.

    ``kind`` is ``op`` for a computed node, else the kind of input. ``reads`` are the names of its
    operands. ``grad`` tells whether gradient flows through the value. ``size`` is in bytes.
    ``site`` is what the kernels of an attention are compiled for, as text; "" for all others.
    """

    name: str
    kind: str
    op: str
    type: str
    owner: str
    where: str
    reads: tuple[str, ...]
    grad: bool
    stages: tuple[int, ...]
    module: int | None
    forward: int
    input_grad: int
    weight_grad: int
    size: int
    saved: int
    site: str


@dataclass(frozen=True, slots=True)
class ParameterRecord:
    """One parameter of the model, and the stage that accounts for it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    stage: int | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Document:
    """Everything decided about one captured program, as values."""

    request: Request
    nodes: tuple[NodeRecord, ...]
    parameters: tuple[ParameterRecord, ...]
    stages: tuple[Stage, ...] = ()
    boundaries: tuple[Boundary, ...] = ()
    shardings: tuple[ShardingRecord, ...] = ()
    collectives: tuple[CollectiveRecord, ...] = ()
    schedule: Schedule | None = None
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(plan: Plan, model: nn.Module) -> "Document":
        """The document of a plan, finished or stopped after any pass, for ``model``."""
        report = plan.captured.report
        return Document(
            request=plan.request,
            nodes=tuple(_nodes(plan)),
            parameters=tuple(_parameters(plan, model)),
            stages=plan.stages,
            boundaries=plan.boundaries,
            shardings=tuple(sharding_records(plan)),
            collectives=tuple(collective_records(plan)),
            schedule=plan.schedule,
            notes=(*report.notes, *(f"not hoisted: {name}: {why}" for name, why in report.refused)),
        )

    def to_json(self) -> str:
        """Deterministic JSON, one node a line, so that two plans can be compared by line."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        values["request"] = asdict(self.request)
        values["schedule"] = self.schedule.to_text().splitlines() if self.schedule else None
        parts = [f'"format": {FORMAT}']
        for name, value in values.items():
            rows = value if isinstance(value, tuple) else None
            if rows:
                lines = ",\n  ".join(json.dumps(_plain(row)) for row in rows)
                parts.append(f'"{name}": [\n  {lines}\n]')
            else:
                parts.append(f'"{name}": {json.dumps(value)}')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @staticmethod
    def from_json(text: str) -> "Document":
        """The inverse of ``to_json``; refuses what is no plan file of this format."""
        table = json.loads(text)
        if not isinstance(table, dict) or table.get("format") != FORMAT:
            raise RequestError(f"not a plan file of format {FORMAT}")
        schedule = table["schedule"]
        return Document(
            request=_request(table["request"]),
            nodes=tuple(_build(NodeRecord, row) for row in table["nodes"]),
            parameters=tuple(_build(ParameterRecord, row) for row in table["parameters"]),
            stages=tuple(_build(Stage, row) for row in table["stages"]),
            boundaries=tuple(_build(Boundary, row) for row in table["boundaries"]),
            shardings=tuple(_build(ShardingRecord, row) for row in table["shardings"]),
            collectives=tuple(_build(CollectiveRecord, row) for row in table["collectives"]),
            schedule=None if schedule is None else Schedule.from_text("\n".join(schedule)),
            notes=tuple(table["notes"]),
        )

    @staticmethod
    def load(path: str | Path) -> "Document":
        """Read a plan file; every fault names it."""
        try:
            return Document.from_json(Path(path).read_text())
        except (OSError, ValueError, KeyError, TypeError, RequestError) as error:
            raise RequestError(f"{path}: {error}; `mllm-compile plan -o` writes one") from error

    def node(self, name: str) -> NodeRecord:
        """The node of that name."""
        for node in self.nodes:
            if node.name == name.removeprefix("%"):
                return node
        close = [node.name for node in self.nodes if name in node.name][:5]
        hint = f"; names like it: {', '.join(close)}" if close else ""
        raise RequestError(f"no node is called {name!r}{hint}")


def describe(value: object) -> str:
    """A fake value as ``float32[2,16]``; several in parentheses."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(describe(item) for item in value)})"
    return type(value).__name__


def _nodes(plan: Plan) -> Iterator[NodeRecord]:
    stages: dict[str, list[int]] = {}
    for stage in plan.stages:
        for name in (*stage.nodes, *stage.replicated):
            stages.setdefault(name, []).append(stage.index)
    inputs = iter(plan.captured.inputs)
    for node in plan.captured.main.graph.nodes:
        if node.op == "output":
            continue
        source = next(inputs) if node.op == "placeholder" else None
        cost = plan.costs.get(node.name, NodeCost())
        yield NodeRecord(
            name=node.name,
            kind=source.kind if source else "op",
            op=source.name if source else _target(node),
            type=describe(node.meta.get("val")),
            owner=node.meta.get("owner", ""),
            where=node.meta.get("where", ""),
            reads=tuple(operand.name for operand in node.all_input_nodes),
            grad=node.name in plan.needs_grad,
            stages=tuple(stages.get(node.name, ())),
            module=plan.module_of.get(node.name),
            forward=cost.forward,
            input_grad=cost.input_grad,
            weight_grad=cost.weight_grad,
            size=cost.bytes,
            saved=cost.saved_bytes,
            site=str(site_of(node)) if node.target in KERNELS else "",
        )


def _target(node: fx.Node) -> str:
    """``view``, ``add.Tensor``, ``mllm.attention``: aten's namespace and ``default`` unsaid."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def _parameters(plan: Plan, model: nn.Module) -> Iterator[ParameterRecord]:
    for name, value in model.named_parameters():
        dtype = str(value.dtype).removeprefix("torch.")
        home = plan.home.get(name)
        yield ParameterRecord(name, tuple(value.shape), dtype, value.requires_grad, home)


def _plain(row: object) -> Any:
    return row if isinstance(row, str) else asdict(row)  # type: ignore[call-overload]


def _build(cls: Any, row: Mapping[str, Any]) -> Any:
    return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()})


def _request(table: Mapping[str, Any]) -> Request:
    modules = [
        {
            **{key: value for key, value in row.items() if key not in ("paths", "parallel")},
            **row["parallel"],
            "path": row["paths"],
        }
        for row in table["modules"]
    ]
    rest = {key: value for key, value in table.items() if key != "modules"}
    return Request.from_dict({**rest, "module": modules})
