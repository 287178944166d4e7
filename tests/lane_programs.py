"""Programs of all data lanes of one microbatch, with the real values of their nodes."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from mllm_compile.compilation import richest
from mllm_compile.compiler.captured import Prepared
from mllm_compile.compiler.layout import R, S
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import Transfer
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.compiler.sharding import Layouts, Sharding
from mllm_compile.compiler.split import Split
from mllm_compile.model import ready_batch, ready_model
from mllm_compile.passes.capture.programs import Programs
from mllm_compile.passes.lower.transfers import transfers
from mllm_compile.passes.pipeline import make_plan
from tests.resharding import part, write

Batch = Mapping[str, Any]
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Lanes:
    """``plans`` by module and lane; ``values`` of every node, by the lane's program."""

    request: Request
    plans: list[list[Plan]]
    values: dict[int, dict[str, torch.Tensor]]

    def ranks(self, stage: int) -> Sequence[int]:
        return self.plans[0][0].stages[stage].ranks

    def mesh(self, stage: int) -> Mesh:
        at = self.plans[0][0].stages[stage]
        return Mesh.of(self.request.modules[at.module], at.position)

    def plan(self, stage: int, rank: int) -> Plan:
        return self.plans[self.plans[0][0].stages[stage].module][self.mesh(stage).lane(rank)]

    def links(self, stage: int, rank: int) -> Any:
        return transfers(self.plans[0][0].stages[stage], rank, self.plans)

    def local(self, stage: int, rank: int, name: str) -> torch.Tensor:
        """What a rank has of its lane's value: its tensor rank's part of the last dim."""
        value = self.values[id(self.plan(stage, rank))][name.removeprefix("d").removeprefix("%")]
        mesh = self.mesh(stage)
        count = mesh.size("tensor")
        if count == 1 or value.shape[-1] % count:
            return value
        return value.chunk(count, -1)[mesh.place(rank, "tensor")]


@dataclass
class Microbatch:
    """The samples of one microbatch, captured lane by lane for any data size, each once."""

    model: nn.Module
    samples: Sequence[Any]
    collate: Callable[[Sequence[Any]], Batch]

    def __post_init__(self) -> None:
        self.programs = Programs(self.model, lift=torch.float64)
        self.prepared: dict[int, list[Prepared]] = {}

    def lanes(
        self, paths: Sequence[tuple[str, ...]], sizes: Sequence[tuple[int, int]], *, shared: bool
    ) -> Lanes:
        """Modules of (tensor, data) sizes, on ranks of their own or all from rank 0 on."""
        starts = [0, *accumulate(tensor * data for tensor, data in sizes)]
        modules = tuple(
            ModuleSpec(path, tuple(range(start, start + t * d)), Parallel(tensor=t, data=d))
            for path, (t, d), start in zip(
                paths, sizes, [0] * len(sizes) if shared else starts, strict=False
            )
        )
        request = Request(modules, microbatch_size=len(self.samples), dtype="float64")
        self._capture(request)
        found = {data: self.prepared[data] for data in request.lane_counts}
        fullest = richest(item.program for items in found.values() for item in items)
        placement = make_plan(request, fullest).placement
        plans, values = {}, {}
        for data, items in found.items():
            plans[data] = [_divided(make_plan(request, i.program, placement)) for i in items]
            values |= {
                id(p): _run(self.model, p, i) for p, i in zip(plans[data], items, strict=True)
            }
        return Lanes(request, [plans[data] for _, data in sizes], values)

    def _capture(self, request: Request) -> None:
        ready_model(request, self.model)
        for data in set(request.lane_counts) - self.prepared.keys():
            parts = Split.contiguous(len(self.samples), data).parts
            lanes = [[s for a, b in part for s in self.samples[a:b]] for part in parts]
            batches = [ready_batch(request, self.collate(lane)) for lane in lanes]
            self.prepared[data] = [self.programs.get(batch) for batch in batches]


def _divided(plan: Plan) -> Plan:
    """Every boundary value divided over tensor along its last dim, where that can be."""
    nodes = {node.name: node for node in plan.captured.main.graph.nodes}
    shardings = []
    for number, module in enumerate(plan.request.modules):
        axes = Mesh.of(module, 0).axes
        sent: dict[str, Layouts] = {}
        taken: dict[str, Layouts] = {}
        for boundary in plan.boundaries:
            for end, found in ((boundary.source, sent), (boundary.target, taken)):
                if plan.stages[end].module == number:
                    shapes = {name: nodes[name].meta["val"].shape for name in boundary.values}
                    found |= {
                        n: tuple(_last(axis.size, shape) for axis in axes)
                        for n, shape in shapes.items()
                    }
        shardings.append(Sharding(axes, layouts=taken, sent=sent))
    return replace(plan, shardings=tuple(shardings))


def _last(ranks: int, shape: Sequence[int]) -> Any:
    return R if shape[-1] % ranks else S(len(shape) - 1, 1, ranks)


def _run(model: nn.Module, plan: Plan, prepared: Prepared) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    class Watch(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            value = super().run_node(node)
            if isinstance(value, torch.Tensor):
                found[node.name] = value
            return value

    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    inputs = [
        state[item.name]
        if item.kind in ("parameter", "buffer")
        else prepared.values[item.kind, item.name]
        for item in plan.captured.inputs
    ]
    with torch.no_grad():
        Watch(plan.captured.main).run(*inputs)
    return found


def deliver(
    lanes: Lanes, start: int, end: int, change: Change = torch.clone
) -> dict[tuple[int, str], torch.Tensor]:
    """What every rank of stage ``end`` gets from stage ``start``: forward, or backward.

    Each rank of ``start`` has ``change`` of its own lane's value; pieces between two ranks pair up
    in the order in which both ends list them.
    """
    way = "forward" if start < end else "backward"
    mail: dict[tuple[int, int], deque[torch.Tensor]] = defaultdict(deque)
    for rank in lanes.ranks(start):
        for transfer in _towards(lanes.links(start, rank)[f"sends_{way}"], end):
            tensors = {name: change(lanes.local(start, rank, name)) for name in transfer.values}
            for name, spec in zip(transfer.values, transfer.specs, strict=True):
                assert tensors[name].shape == spec.shape
            for piece in transfer.pieces:
                mail[rank, piece.rank].append(part(tensors[piece.value], piece.region))
    made: dict[tuple[int, str], torch.Tensor] = {}
    for rank in lanes.ranks(end):
        for transfer in _towards(lanes.links(end, rank)[f"receives_{way}"], start):
            for name, spec in zip(transfer.values, transfer.specs, strict=True):
                made[rank, name] = torch.full(spec.shape, torch.nan, dtype=spec.dtype)
            for piece in transfer.pieces:
                write(made[rank, piece.value], piece.region, mail[piece.rank, rank].popleft())
    assert not any(mail.values()), "something was sent that nobody receives"
    return made


def _towards(found: Sequence[Transfer], peer: int) -> list[Transfer]:
    return [transfer for transfer in found if transfer.peer == peer]
