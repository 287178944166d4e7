"""The executor on hand-made stages: gradients of one process, over threads."""

import random
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.program import Segment, StageProgram, Transfer
from mllm_compile.runtime.boxed import boxed
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.state import State
from tests.stage_programs import Values, alone, lower, prepared, whole_transfer
from tests.three_stages import HELD_BY, WIDTH, Work, batches, model, plain, plan_of, run_rank


def run_ranks(
    parameters: Mapping[str, nn.Parameter],
    work: Work,
    *,
    delay: Callable[[], float] | None = None,
    corrupt: Callable[[int, list[Action]], Sequence[Action]] | None = None,
    windows: Mapping[int, int] | None = None,
) -> tuple[list[StepResult], list[State], list[dict[int, StageProgram]]]:
    """One step of the three stages, each on a thread."""
    programs = [lower(stages, parameters, values) for stages, values in work]
    plan = plan_of(programs, windows)
    if corrupt is not None:
        actions = {rank: tuple(corrupt(rank, list(own))) for rank, own in plan.actions.items()}
        plan = Schedule(actions, plan.windows)

    def rank_main(transport: LocalTransport) -> tuple[StepResult, State]:
        return run_rank(transport, parameters, work, programs=programs, plan=plan)

    results = run_threads(3, rank_main, delay=delay)
    return [r for r, _ in results], [s for _, s in results], programs


@pytest.mark.parametrize("rows", [(3,), (2, 5), (3, 1, 4, 1, 5, 2), (2, None, 0, 3), (None, None)])
@pytest.mark.parametrize("frozen", [(), ("vision",), ("tied",), ("vision", "tied", "scale")])
def test_gradients_equal_one_process(rows: Sequence[int | None], frozen: Sequence[str]) -> None:
    work = batches(rows)
    parameters = model(frozen)
    results, states, _ = run_ranks(parameters, work)
    losses = plain(parameters, work)
    for microbatch, loss in enumerate(losses):
        torch.testing.assert_close(results[2].losses[microbatch], loss, rtol=1e-12, atol=0)
    assert not results[0].losses
    for rank, state in enumerate(states):
        assert set(state.parameters) == set(HELD_BY[rank])
        for name, parameter in state.parameters.items():
            expected = parameters[name].grad
            if expected is None:
                assert parameter.grad is None
            else:
                torch.testing.assert_close(parameter.grad, expected, rtol=1e-12, atol=1e-13)


def test_gradients_of_several_consumers_are_all_there() -> None:
    """The encoder's output feeds both later stages: leaving one out must show."""
    work = batches([3])
    parameters = model()
    plain(parameters, work)
    expected = parameters["vision"].grad
    assert expected is not None

    def without_skip(rank: int, actions: list[Action]) -> Sequence[Action]:
        dropped = {Action.parse("0RECV_B0<2"), Action.parse("2SEND_B0>0")}
        return [action for action in actions if action not in dropped]

    with pytest.raises(RunError, match=r"rank 0 \(stage 0\) failed during 0W0 of step 7.*stage 2"):
        run_ranks(parameters, work, corrupt=without_skip)


def test_random_delays_change_nothing() -> None:
    work = batches([2, 0, 3, None, 1])
    first = run_ranks(model(), work)[1]
    for seed in range(3):
        source = random.Random(seed)
        again = run_ranks(model(), work, delay=lambda source=source: source.random() * 3e-3)[1]
        for one, two in zip(first, again, strict=True):
            for name in one.parameters:
                assert torch.equal(one.parameters[name].grad, two.parameters[name].grad)


def test_tied_replicas_get_the_identical_sum() -> None:
    _, states, _ = run_ranks(model(), batches([2, 3]))
    assert torch.equal(states[1].parameters["tied"].grad, states[2].parameters["tied"].grad)


def test_measures() -> None:
    work = batches([2, 3, None, 0])
    results, _, _ = run_ranks(model(), work)
    encoder_, first, last = (result.measures for result in results)
    # Two microbatches send h to both stages and the positions to the last; the empty one nothing.
    assert encoder_.messages_forward == 2 * 3
    assert encoder_.bytes_forward == 5 * (2 * WIDTH * 8 + 8)
    assert encoder_.messages_backward == 0
    assert first.messages_forward == 3
    assert first.messages_backward == 2
    assert last.messages_backward == 2 + 3
    assert all(result.measures.host_reads == 0 for result in results)
    assert all((result.measures.peak_live_bytes or 0) > 0 for result in results)


def test_nothing_flows_back_over_a_frozen_edge() -> None:
    results, states, programs = run_ranks(model(["vision"]), batches([2, 3]))
    assert programs[0][0].weight_grad is None
    assert programs[0][1].input_grad is None
    assert results[1].measures.messages_backward == 0
    assert results[0].measures.bytes_backward == 0
    assert states[0].parameters["vision"].grad is None


def test_a_narrow_window_does_not_hang() -> None:
    work = batches([2] * 8)
    results, _, _ = run_ranks(model(["vision"]), work, windows={0: 2})
    assert len(results[2].losses) == 8


def test_live_values_do_not_pile_up() -> None:
    """With 1F1B the peak of the last stage does not grow with the number of microbatches."""
    few, _, _ = run_ranks(model(), batches([2] * 3))
    many, _, _ = run_ranks(model(), batches([2] * 9))
    for one, two in zip(few[1:], many[1:], strict=True):
        assert one.measures.peak_live_bytes == two.measures.peak_live_bytes


def test_a_failing_graph_names_rank_stage_and_action() -> None:
    work = batches([2, 3])

    def bad_order(rank: int, actions: list[Action]) -> Sequence[Action]:
        return [Action(1, "F", 1), *actions] if rank == 1 else actions

    with pytest.raises(RunError, match=r"rank 1 \(stage 1\) failed during 1F1 of step 7: %h"):
        run_ranks(model(), work, corrupt=bad_order)


def test_a_deadlock_is_reported_not_waited_for() -> None:
    work = batches([2])

    def never_sends(rank: int, actions: list[Action]) -> Sequence[Action]:
        return [a for a in actions if str(a) != "0SEND_F0>1"]

    with pytest.raises(RunError, match=r"deadlock: .*rank 1 waits to receive from rank 0"):
        run_ranks(model(), work, corrupt=never_sends)


def single(
    function: Callable[..., tuple[torch.Tensor, ...]],
    inputs: Values,
    outputs: tuple[str, ...],
    *,
    sends: tuple[Transfer, ...] = (),
) -> StageProgram:
    """A stage with a forward only."""
    graph = make_fx(function)(*inputs.values())
    segment = Segment(graph, tuple(inputs), outputs)
    return StageProgram(0, segment, None, None, sends, (), (), (), loss="%loss")


def test_buffers_take_their_new_values_from_one_microbatch_to_the_next() -> None:
    def count(seen: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return seen * x, seen + 1

    buffer, x = torch.tensor(1.0), torch.tensor(10.0)
    program = single(count, {"b:seen": buffer, "x:batch:x": x}, ("%loss", "u:seen"))
    state = State({}, {"seen": buffer})
    work = [{0: prepared({"x:batch:x": x})}] * 3
    schedule_ = Schedule({0: tuple(Action(0, "F", m) for m in range(3))})

    def rank_main(transport: LocalTransport) -> StepResult:
        return Executor(transport, state, {0: alone(0)}).step(schedule_, [{0: program}] * 3, work)

    (result,) = run_threads(1, rank_main)
    assert [result.losses[m].item() for m in range(3)] == [10.0, 20.0, 30.0]
    assert state.buffers["seen"].item() == 4.0
    assert buffer.item() == 1.0


@pytest.mark.parametrize(
    ("reads", "count"),
    [
        (lambda x: torch.ops.aten.nonzero(x).sum(), 1),
        (lambda x: x[x > 0].sum(), 1),
        (lambda x: x[x.long()].sum(), 0),
    ],
)
def test_host_reads_are_counted(reads: Callable[..., torch.Tensor], count: int) -> None:
    x = torch.tensor([0.0, 1.0])
    program = single(lambda x: (reads(x),), {"x:batch:x": x}, ("%loss",))

    def rank_main(transport: LocalTransport) -> StepResult:
        executor = Executor(transport, State({}), {0: alone(0)})
        work = [{0: prepared({"x:batch:x": x})}]
        return executor.step(Schedule.from_text("0: 0F0"), [{0: program}], work, measure=True)

    assert run_threads(1, rank_main)[0].measures.host_reads == count


def test_a_value_that_is_not_as_announced_is_refused() -> None:
    x = torch.ones(2)
    send = whole_transfer(1, {"%loss": x.double()})
    program = single(lambda x: (x + 1,), {"x:batch:x": x}, ("%loss",), sends=(send,))

    def rank_main(transport: LocalTransport) -> None:
        executor = Executor(
            transport, State({}), {0: alone(0), 1: alone(1)}, names={0: "model.vision"}
        )
        schedule_ = Schedule.from_text("0: 0F0,0SEND_F0>1")
        executor.step(schedule_, [{0: program}], [{0: prepared({"x:batch:x": x})}])

    message = r"rank 0 \(stage 0, model.vision\) failed during 0SEND_F0>1 .*float64.*got .*float32"
    with pytest.raises(RunError, match=message):
        run_threads(1, rank_main)


def test_measuring_does_not_switch_compiled_segments_off() -> None:
    ran = []

    def backend(graph: fx.GraphModule, inputs: object) -> Callable[..., object]:
        def compiled(*values: torch.Tensor) -> object:
            ran.append(True)
            return graph.forward(*values)

        return compiled

    x = torch.ones(2)
    program = single(lambda x: (x.sum(),), {"x:batch:x": x}, ("%loss",))
    graph = torch.compile(program.forward.graph, backend=backend)
    program = replace(program, forward=replace(program.forward, graph=graph))

    def rank_main(transport: LocalTransport) -> None:
        executor = Executor(transport, State({}), {0: alone(0)})
        work = [{0: prepared({"x:batch:x": x})}]
        executor.step(Schedule.from_text("0: 0F0"), [{0: program}], work, measure=True)

    run_threads(1, rank_main)
    assert ran == [True]


def test_an_input_is_freed_after_its_last_use() -> None:
    alive: list[bool] = []

    def look(total: torch.Tensor) -> torch.Tensor:
        alive.append(watched() is not None)
        return total

    graph = fx.Graph()
    total = graph.call_method("sum", (graph.placeholder("x"),))
    graph.output((graph.call_function(look, (total,)),))
    call = boxed(fx.GraphModule({}, graph))
    inputs = [torch.ones(3)]
    watched = weakref.ref(inputs[0])
    assert call(inputs)[0].item() == 3.0
    assert inputs == []
    assert alive == [False]
