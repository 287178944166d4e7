"""Real jobs of tiny models, and copies of their parts in which one thing is changed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from torch import fx

from mllm_compile.compilation import Compiler, Step
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.program import Segment
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.kernels.collective.members import members
from mllm_compile.model import microbatches, ready_model
from mllm_compile.passes.lower.differentiate import Segments, differentiate
from mllm_compile.passes.lower.extract import StageGraph, extract
from mllm_compile.passes.lower.local_graph import CONVERT
from mllm_compile.passes.lower.localize import localize, members_of
from tests.families import MODULES
from tests.parity import workload_of


@dataclass(eq=False)
class Job:
    """One compiled step."""

    compiler: Compiler
    step: Step
    batches: Sequence[Any]

    @cached_property
    def plan(self) -> Plan:
        return self.step.plans[0]

    @property
    def plans(self) -> list[list[Plan]]:
        """By module and lane, of the first microbatch."""
        lanes = self.step.microbatches[0]
        modules = self.compiler.request.modules
        return [[lane.plan for lane in lanes[module.parallel.data]] for module in modules]

    def mesh(self, stage: int) -> Mesh:
        at = self.plan.stages[stage]
        return Mesh.of(self.compiler.request.modules[at.module], at.position)

    @lru_cache(maxsize=8)  # noqa: B019
    def local(self, stage: int, *places: int) -> tuple[StageGraph, StageGraph, dict[str, int]]:
        """(graph of a rank, of its stage, places)."""
        at = dict(zip((axis.name for axis in self.mesh(stage).axes), places, strict=True))
        whole = extract(self.plan, self.plan.stages[stage])
        return localize(whole, self.plan, stage, at), whole, at

    @lru_cache(maxsize=8)  # noqa: B019
    def segments(self, stage: int, *places: int) -> Segments:
        local, _, at = self.local(stage, *places)
        with members(members_of(self.plan, stage, at)):
            return differentiate(local)


@lru_cache(maxsize=4)
def job(name: str, *sizes: tuple[int, int, int, int], shared: bool = False) -> Job:
    """A family with (tensor, context, data, pipeline) sizes for each of its modules."""
    modules, first = [], 0
    for path, (tensor, context, data, pipeline) in zip(MODULES[name], sizes, strict=True):
        parallel = Parallel(tensor=tensor, context=context, data=data, pipeline=pipeline)
        ranks = tuple(range(first, first + parallel.size))
        modules.append(ModuleSpec(path, ranks, parallel, kv_exchange="gather"))
        first += 0 if shared else parallel.size
    request = Request(tuple(modules), microbatches=2, microbatch_size=4, dtype="float64")
    workload = workload_of(name)
    compiler = Compiler(request, ready_model(request, workload.model))
    batches = microbatches(request, workload, 0)
    return Job(compiler, compiler.step(batches), batches)


def copied(graph: fx.Graph) -> fx.Graph:
    made = fx.Graph()
    made.output(made.graph_copy(graph, {}))
    return made


def changed_stage(stage: StageGraph, change: Callable[[fx.Graph], None]) -> StageGraph:
    """A stage graph after a change of its graph."""
    graph = copied(stage.graph.graph)
    change(graph)
    return replace(stage, graph=fx.GraphModule({}, graph))


def changed_segment(segment: Segment, change: Callable[[fx.Graph], None]) -> Segment:
    graph = copied(segment.graph.graph)
    change(graph)
    return replace(segment, graph=fx.GraphModule({}, graph))


def pick(rng: random.Random, found: Sequence[Any]) -> Any:
    assert found, "nothing here to change"
    return found[rng.randrange(len(found))]


def converts(graph: fx.Graph, have: str = "RVPS", want: str = "RVPS") -> list[fx.Node]:
    """The conversions from and to kinds of layouts."""
    return [
        node
        for node in graph.nodes
        if node.target is CONVERT and node.args[1][0] in have and node.args[2][0] in want
    ]


def argument(node: fx.Node, place: int, value: Any) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


def bypass(node: fx.Node) -> None:
    """Readers read the first operand instead."""
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)
