"""A plan's decisions as JSON, and back.

The text is deterministic and has one entry a line, so that two plans can be compared by line. It
holds the decisions, not the program: to read it back one needs the same captured program, told by
its fingerprint, in which what is trainable counts: a plan made for other frozen parameters is
another plan.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, astuple
from hashlib import sha256
from typing import Any

import torch

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.captured import Captured
from mllm_compile.compiler.errors import RequestError, explain
from mllm_compile.compiler.graph import Graph, tensors_of
from mllm_compile.compiler.plan import NodeCost, Plan
from mllm_compile.compiler.request import ModuleSpec, Optimizer, Parallel, Request
from mllm_compile.compiler.sharding_json import from_table, parsed, texts, to_table
from mllm_compile.compiler.stage import Boundary, Stage

FORMAT = "mllm-compile decisions 1"


def fingerprint(captured: Captured) -> str:
    """Equal for programs whose plans mean the same: in operators, shapes, inputs, what trains."""
    lines = [str(item) for item in captured.inputs]
    for node in captured.main.graph.nodes:
        values = [_described(tensor) for tensor in tensors_of(node)]
        recording = node.meta.get("grad"), node.meta.get("owner")
        lines.append(f"{node.name} {node.target} {node.args} {node.kwargs} {values} {recording}")
    return sha256("\n".join(lines).encode()).hexdigest()


def _described(tensor: torch.Tensor | None) -> str:
    return "" if tensor is None else f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}"


def to_json(plan: Plan) -> str:
    """The decisions of a plan, finished or stopped after any pass."""
    order = {node: k for k, node in enumerate(_names(plan.captured))}
    tables: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": fingerprint(plan.captured),
        "request": asdict(plan.request),
        "needs_grad": sorted(plan.needs_grad, key=order.__getitem__),
        "grad_edges": sorted(plan.grad_edges, key=lambda edge: [order[name] for name in edge]),
        "costs": {name: astuple(cost) for name, cost in plan.costs.items()},
        "module_of": dict(plan.module_of),
        "stages": [asdict(stage) for stage in plan.stages],
        "boundaries": [asdict(boundary) for boundary in plan.boundaries],
        "placement": [[*site, stage] for site, stage in plan.placement.items()],
        "home": dict(plan.home),
        "given_layouts": [[*held, texts(own)] for held, own in plan.given_layouts.items()],
        "split_notes": [[module, *notes] for module, notes in plan.split_notes.items()],
        "shardings": [to_table(sharding) for sharding in plan.shardings],
        "schedule": None if plan.schedule is None else plan.schedule.to_text().splitlines(),
    }
    rows = (f"{json.dumps(name)}: {_rows(table)}" for name, table in tables.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def from_json(text: str, captured: Captured) -> Plan:
    """The plan of ``captured`` whose decisions the text holds; RequestError if it is of another."""
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise RequestError(explain("plan", expected=f"the format {FORMAT!r}"))
    if table["fingerprint"] != fingerprint(captured):
        raise RequestError(
            explain(
                "plan",
                expected="one of this program",
                got="one of another: other operators, shapes or frozen parameters",
                remedy="plan again",
            )
        )
    schedule = table["schedule"]
    return Plan(
        request=_request(table["request"]),
        captured=captured,
        needs_grad=frozenset(table["needs_grad"]),
        grad_edges=frozenset((source, reader) for source, reader in table["grad_edges"]),
        costs={name: NodeCost(*cost) for name, cost in table["costs"].items()},
        module_of=table["module_of"],
        stages=tuple(Stage(**_tuples(row)) for row in table["stages"]),
        boundaries=tuple(Boundary(**_tuples(row)) for row in table["boundaries"]),
        placement={(owner, name, k): stage for owner, name, k, stage in table["placement"]},
        home=table["home"],
        given_layouts={(module, name): parsed(own) for module, name, own in table["given_layouts"]},
        split_notes={module: tuple(notes) for module, *notes in table["split_notes"]},
        shardings=tuple(map(from_table, table["shardings"])),
        schedule=None if schedule is None else Schedule.from_text("\n".join(schedule)),
    )


def _names(captured: Captured) -> list[str]:
    return [node.name for node in Graph(captured).nodes]


def _rows(table: Any) -> str:
    """JSON with one entry of a list or dictionary a line."""
    if isinstance(table, dict) and table:
        rows = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items()]
        return "{\n  " + ",\n  ".join(rows) + "\n}"
    if isinstance(table, list) and table:
        return "[\n  " + ",\n  ".join(map(json.dumps, table)) + "\n]"
    return json.dumps(table)


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def _request(table: Mapping[str, Any]) -> Request:
    modules = tuple(
        ModuleSpec(**{**_tuples(row), "parallel": Parallel(**row["parallel"])})
        for row in table["modules"]
    )
    optimizer = Optimizer(**table["optimizer"])
    return Request(**{**table, "modules": modules, "optimizer": optimizer})
