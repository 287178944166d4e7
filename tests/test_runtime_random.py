"""Random DAGs of stages, freezes, absent stages and delays, under the schedules we make."""

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn

from mllm_compile.compiler.dry_run import dry_run
from mllm_compile.compiler.program import StageProgram
from mllm_compile.compiler.stage import Boundary, Stage
from mllm_compile.compiler.variant import Variant
from mllm_compile.passes.schedule import make_schedule
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.state import State
from tests.stage_programs import HandStage, Values, alone, lower, prepared
from tests.three_stages import Work, plain

Edges = list[tuple[int, int]]


def made(index: int, sources: Sequence[int], last: bool) -> HandStage:
    """tanh of a weighted sum of what it receives and of an input; the last one sums up."""

    def function(values: Values) -> Values:
        total = values[f"x:batch:{index}"]
        for source in sources:
            total = total + values[f"%v{source}"]
        result = torch.tanh(total * values[f"p:w{index}"])
        return {"%loss": result.square().sum()} if last else {f"%v{index}": result}

    inputs = (*(f"%v{s}" for s in sources), f"p:w{index}", f"x:batch:{index}")
    return HandStage(
        index, function, inputs, ("%loss",) if last else (f"%v{index}",), "%loss" if last else None
    )


def microbatch(
    draw: random.Random, count: int, edges: Edges
) -> tuple[tuple[HandStage, ...], Values]:
    """Some stages absent; of the rest those from which the loss is reached. Any number of rows."""
    present = {s for s in range(count) if s == count - 1 or draw.random() < 0.8}
    reached = {count - 1}
    for source, target in sorted(edges, reverse=True):
        if target in reached and source in present:
            reached.add(source)
    stages = tuple(
        made(s, [a for a, b in edges if b == s and a in reached], s == count - 1)
        for s in sorted(reached)
    )
    rows = draw.choice([0, 1, 1, 2, 5])
    return stages, {f"x:batch:{s}": torch.randn(rows, 3).double() for s in reached}


def variant_of(programs: Mapping[int, StageProgram]) -> Variant:
    boundaries = []
    for stage, program in programs.items():
        back = {transfer.peer: transfer.values for transfer in program.receives_backward}
        for transfer in program.sends_forward:
            gradients = tuple(name[2:] for name in back.get(transfer.peer, ()))
            values = tuple(name[1:] for name in transfer.values)
            boundaries.append(Boundary(stage, transfer.peer, values, gradients))
    trains = frozenset(stage for stage, program in programs.items() if program.weight_grad)
    return Variant(frozenset(programs), trains, tuple(boundaries))


@pytest.mark.parametrize("seed", range(20))
def test_random_pipelines_equal_one_process(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    count = draw.randint(1, 6)
    edges = [(a, b) for a in range(count) for b in range(a + 1, count) if draw.random() < 0.5]
    work: Work = [microbatch(draw, count, edges) for _ in range(draw.randint(1, 8))]
    parameters = {
        f"w{s}": nn.Parameter(torch.randn(3).double(), draw.random() < 0.6) for s in range(count)
    }
    programs = [lower(stages, parameters, values) for stages, values in work]
    stages = tuple(Stage(s, 0, s, (s,), (f"n{s}",), (), ()) for s in range(count))
    variants = [variant_of(stages_) for stages_ in programs]
    schedule = make_schedule(stages, variants, zero_bubble=draw.random() < 0.5)
    dry_run(schedule, stages, variants)

    def rank_main(transport: LocalTransport) -> tuple[StepResult, State]:
        name = f"w{transport.rank}"
        own = nn.Parameter(parameters[name].detach().clone(), parameters[name].requires_grad)
        state = State({name: own})
        executor = Executor(transport, state, {s: alone(s) for s in range(count)})
        inputs = [dict.fromkeys(range(count), prepared(values)) for _, values in work]
        result = executor.step(schedule, programs, inputs)
        state.finish(transport)
        return result, state

    results = run_threads(count, rank_main, delay=lambda: draw.random() * 1e-3)
    losses = plain(parameters, work)
    for k, loss in enumerate(losses):
        torch.testing.assert_close(results[-1][0].losses[k], loss, rtol=1e-12, atol=1e-14)
    for name, parameter in parameters.items():
        found = results[int(name[1:])][1].parameters[name].grad
        if parameter.grad is None:
            assert found is None
        else:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-11, atol=1e-13)
