"""Which conversions a plan implies, and the collective that each of them is."""

from dataclasses import dataclass

from mllm_compile.compiler.graph import Graph
from mllm_compile.compiler.layout import Layout, adjoint
from mllm_compile.compiler.plan import Plan
from mllm_compile.passes.sharding.dataflow import dataflow, produced, wanted

_COLLECTIVES = {
    "PR": "all-reduce",
    "PV": "all-reduce",
    "PS": "reduce-scatter",
    "SR": "all-gather",
    "SV": "all-gather",
    "SS": "all-to-all",
}


def collective(have: Layout, want: Layout) -> str:
    """The collective that a conversion is, or "" if no rank needs another."""
    return "" if have == want else _COLLECTIVES.get(have.kind + want.kind, "")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A value in another layout along one axis, made once in a stage for all that read it so.

    ``point`` and ``output`` name the value as in passes/sharding/dataflow.py; ``gradient`` tells
    whether one flows back through it.
    """

    stage: int
    axis: str
    point: str
    output: int
    have: Layout
    want: Layout
    gradient: bool

    @property
    def forward(self) -> str:
        """The collective of the value, "" if there is none."""
        return collective(self.have, self.want)

    @property
    def backward(self) -> str:
        """The collective of the gradient, "" if there is none."""
        return collective(*adjoint(self.have, self.want)) if self.gradient else ""


def conversions(plan: Plan, module: int) -> tuple[Conversion, ...]:
    """All conversions in the stages of a module, in dataflow order."""
    sharding = plan.shardings[module]
    flow = dataflow(plan, Graph(plan.captured), module)
    stages = {name: stage.index for stage in plan.stages for name in stage.nodes}
    found: dict[tuple[int, str, str, int, Layout, Layout], bool] = {}
    for edge in flow.edges:
        reader = edge.source if edge.reader.startswith("=") else edge.reader
        stage = stages[reader.removeprefix(">")]
        ends = zip(sharding.axes, produced(sharding, edge), wanted(sharding, edge), strict=True)
        for axis, have, want in ends:
            if have != want:
                key = stage, axis.name, edge.source, edge.output, have, want
                found[key] = found.get(key, False) or edge.gradient
    return tuple(Conversion(*key, gradient) for key, gradient in found.items())
