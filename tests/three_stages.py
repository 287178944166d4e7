"""A pipeline of three small stages with all that makes pipelines hard.

The encoder's output feeds both later stages (a skip edge, gradients of two consumers), integer
positions cross a boundary, one weight stands in two stages, microbatches differ in size, may be
empty, and may lack the encoder.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.program import StageProgram
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Transport
from tests.stage_programs import HandStage, Values, alone, lower, prepared, schedule

Work = list[tuple[tuple[HandStage, ...], Values]]

WIDTH = 4
WARM_UP = {0: 2, 1: 1, 2: 0}


def encoder(v: Values) -> Values:
    return {
        "%h": torch.tanh(v["x:batch:pixels"] @ v["p:vision"]),
        "%where": v["x:batch:pixels"].argmax(1),
    }


def first_half(v: Values) -> Values:
    return {"%a": torch.tanh(v["%h"] @ v["p:tied"] + v["x:batch:tokens"])}


def first_half_of_text(v: Values) -> Values:
    return {"%a": torch.tanh(v["x:batch:tokens"] @ v["p:tied"])}


def second_half(v: Values) -> Values:
    picked = v["%h"].gather(1, v["%where"][:, None])
    return {"%loss": ((v["%a"] @ v["p:tied"]) * v["p:scale"] + picked).square().sum()}


def second_half_of_text(v: Values) -> Values:
    return {"%loss": ((v["%a"] @ v["p:tied"]) * v["p:scale"]).square().sum()}


STAGES = (
    HandStage(0, encoder, ("x:batch:pixels", "p:vision"), ("%h", "%where")),
    HandStage(1, first_half, ("%h", "p:tied", "x:batch:tokens"), ("%a",)),
    HandStage(2, second_half, ("%a", "%h", "%where", "p:tied", "p:scale"), ("%loss",), "%loss"),
)
TEXT_STAGES = (
    HandStage(1, first_half_of_text, ("p:tied", "x:batch:tokens"), ("%a",)),
    HandStage(2, second_half_of_text, ("%a", "p:tied", "p:scale"), ("%loss",), "%loss"),
)
MESHES = {stage: alone(stage) for stage in range(3)}
HELD_BY = {0: ("vision",), 1: ("tied",), 2: ("tied", "scale")}


def model(frozen: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(0)  # threads build models at the same moment
    shapes = {"vision": (3, WIDTH), "tied": (WIDTH, WIDTH), "scale": (WIDTH,)}
    return {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=g), name not in frozen)
        for name, shape in shapes.items()
    }


def batches(rows: Sequence[int | None]) -> Work:
    """One microbatch per entry: its number of rows, or None for one without pixels."""
    torch.manual_seed(1)
    made: Work = []
    for count in rows:
        tokens = torch.randn(count if count is not None else 2, WIDTH, dtype=torch.float64)
        values = {"x:batch:tokens": tokens}
        if count is not None:
            values["x:batch:pixels"] = torch.randn(count, 3, dtype=torch.float64)
        made.append((STAGES if count is not None else TEXT_STAGES, values))
    return made


def plain(parameters: Mapping[str, nn.Parameter], work: Work) -> list[torch.Tensor]:
    """The stages one after another, differentiated by autograd."""
    losses = []
    for stages, values in work:
        known = {**values, **{f"p:{name}": value for name, value in parameters.items()}}
        for stage in stages:
            known.update(stage.function(known))
        if known["%loss"].requires_grad:
            known["%loss"].backward()
        losses.append(known["%loss"].detach())
    return losses


def plan_of(
    programs: Sequence[Mapping[int, StageProgram]], windows: Mapping[int, int] | None = None
) -> Schedule:
    """1F1B of all three ranks."""
    actions = {stage: schedule(stage, programs, warm_up) for stage, warm_up in WARM_UP.items()}
    return Schedule(actions, windows or {})


def state_of(rank: int, parameters: Mapping[str, nn.Parameter]) -> State:
    """Own copies of the parameters of the rank's stage."""
    own = {
        name: nn.Parameter(parameters[name].detach().clone(), parameters[name].requires_grad)
        for name in HELD_BY[rank]
    }
    return State(own, {}, {"tied": Placement.replicated((WIDTH, WIDTH), (1, 2))})


def run_rank(
    transport: Transport,
    parameters: Mapping[str, nn.Parameter],
    work: Work,
    *,
    programs: Sequence[Mapping[int, StageProgram]] | None = None,
    plan: Schedule | None = None,
    publish: Callable[[str], None] | None = None,
    state: State | None = None,
) -> tuple[StepResult, State]:
    """One step, number 7, of this rank's stage.

    Without a ``state`` it makes one from the parameters and sums the tied gradients.
    """
    programs = programs or [lower(stages, parameters, values) for stages, values in work]
    own = state or state_of(transport.rank, parameters)
    executor = Executor(transport, own, MESHES, publish=publish)
    inputs = [dict.fromkeys(MESHES, prepared(values)) for _, values in work]
    result = executor.step(plan or plan_of(programs), programs, inputs, number=7, measure=True)
    if state is None:
        transport.connect(own.groups)
        own.finish(transport)
    return result, own
