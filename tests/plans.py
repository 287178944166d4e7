"""A small plan written by hand: a frozen encoder, glue, a trained decoder of two stages."""

import torch
from torch import fx, nn

from mllm_compile.compiler.captured import Captured, CaptureReport, Input, Signature
from mllm_compile.compiler.plan import NodeCost, Plan
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.passes.schedule import schedule

REQUEST = Request(
    modules=(
        ModuleSpec(("encoder",), (0,), trainable=False),
        ModuleSpec(("decoder",), (1, 2), Parallel(pipeline=2)),
    ),
    workload="somewhere:workload",
    dtype="float64",
    microbatches=2,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False).requires_grad_(False)
        self.decoder = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))

    def forward(self, x):
        return self.decoder(self.encoder(x) * 2 + x.relu()).sum()


def make():
    """(plan, model); owners, stages and costs are what a reader would expect of them."""
    graph = fx.Graph()
    node = {name: graph.placeholder(name) for name in ("x", "w0", "w1", "w2")}

    def call(name, target, arguments, owner, shape):
        inputs = tuple(node.get(item, item) for item in arguments)
        made = graph.create_node("call_function", target, inputs, {}, name)
        made.meta |= {"owner": owner, "grad": True, "where": f"model.py:{len(node)} forward"}
        made.meta["val"] = torch.empty(shape, device="meta")
        node[name] = made

    aten = torch.ops.aten
    call("mm", aten.mm.default, ("x", "w0"), "encoder", (3, 4))
    call("mul", aten.mul.Tensor, ("mm", 2), "", (3, 4))
    call("relu", aten.relu.default, ("x",), "", (3, 4))
    call("add", aten.add.Tensor, ("mul", "relu"), "", (3, 4))
    call("mm_1", aten.mm.default, ("add", "w1"), "decoder.0", (3, 4))
    call("mm_2", aten.mm.default, ("mm_1", "w2"), "decoder.1", (3, 2))
    call("sum_1", aten.sum.default, ("mm_2",), "", ())
    graph.output((node["sum_1"],))
    for name, shape in (("x", (3, 4)), ("w0", (4, 4)), ("w1", (4, 4)), ("w2", (4, 2))):
        node[name].meta["val"] = torch.empty(shape, device="meta")
    inputs = (
        Input("batch", "x"),
        Input("parameter", "encoder.weight"),
        Input("parameter", "decoder.0.weight", True),
        Input("parameter", "decoder.1.weight", True),
    )
    main, nothing = fx.GraphModule({}, graph), fx.GraphModule({}, fx.Graph())
    report = CaptureReport(notes=("a note",), refused=(("helper", "it reads a parameter"),))
    captured = Captured(
        main, nothing, inputs, (), (), (), {}, Signature((), ()), 1, (), True, report
    )
    return _decided(captured), Model()


def _decided(captured):
    costs = {name: NodeCost(96, 0, 0, 48, 0) for name in ("mm", "mul", "relu", "add")}
    costs |= {
        "mm_1": NodeCost(96, 0, 96, 48, 48),
        "mm_2": NodeCost(48, 48, 48, 24, 0),
        "sum_1": NodeCost(6, 0, 0, 4, 0),
    }
    plan = Plan(
        request=REQUEST,
        captured=captured,
        needs_grad=frozenset({"w1", "w2", "mm_1", "mm_2", "sum_1"}),
        costs=costs,
        module_of={"mm": 0, "mul": 1, "add": 1, "mm_1": 1, "mm_2": 1, "sum_1": 1},
        stages=(
            Stage(0, 0, 0, (0,), ("mm",), (), ("encoder.weight",)),
            Stage(1, 1, 0, (1,), ("mul", "add", "mm_1"), ("relu",), ("decoder.0.weight",)),
            Stage(2, 1, 1, (2,), ("mm_2", "sum_1"), (), ("decoder.1.weight",)),
        ),
        boundaries=(Boundary(0, 1, ("mm",), ()), Boundary(1, 2, ("mm_1",), ("mm_1",))),
        home={"encoder.weight": 0, "decoder.0.weight": 1, "decoder.1.weight": 2},
    )
    return schedule(plan)
