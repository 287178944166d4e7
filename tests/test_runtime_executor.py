"""The executor on hand-made stages: gradients of one process, over threads."""

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import nn

from mllm_compile.compiler.action import Action
from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.program import StageProgram
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.state import State
from tests.stage_programs import HandStage, Values, lower, prepared, schedule

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
HELD_BY = {0: ("vision",), 1: ("tied",), 2: ("tied", "scale")}


def model(frozen: Sequence[str] = ()) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"vision": (3, WIDTH), "tied": (WIDTH, WIDTH), "scale": (WIDTH,)}
    return {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64), name not in frozen)
        for name, shape in shapes.items()
    }


def batches(rows: Sequence[int | None]) -> list[tuple[tuple[HandStage, ...], Values]]:
    """One microbatch per entry: its number of rows, or None for one without pixels."""
    made = []
    for count in rows:
        tokens = torch.randn(count if count is not None else 2, WIDTH, dtype=torch.float64)
        values = {"x:batch:tokens": tokens}
        if count is not None:
            values["x:batch:pixels"] = torch.randn(count, 3, dtype=torch.float64)
        made.append((STAGES if count is not None else TEXT_STAGES, values))
    return made


def plain(parameters: Mapping[str, nn.Parameter], work: list) -> list[torch.Tensor]:
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


def run_ranks(
    parameters: Mapping[str, nn.Parameter],
    work: list,
    *,
    delay: Callable[[], float] | None = None,
    corrupt: Callable[[int, list[Action]], Sequence[Action]] | None = None,
    window: int | None = None,
) -> tuple[list[StepResult], list[State], list[dict[int, StageProgram]]]:
    """One step of the three stages, each on a thread."""
    programs = [lower(stages, parameters, values) for stages, values in work]
    inputs = [prepared(values) for _, values in work]

    def rank_main(transport: LocalTransport) -> tuple[StepResult, State]:
        rank = transport.rank
        own = {
            name: nn.Parameter(parameters[name].detach().clone(), parameters[name].requires_grad)
            for name in HELD_BY[rank]
        }
        state = State(own, {}, {"tied": (1, 2)})
        executor = Executor(transport, state, {0: 0, 1: 1, 2: 2}, window=window)
        actions: Sequence[Action] = schedule(rank, programs, WARM_UP[rank])
        if corrupt is not None:
            actions = corrupt(rank, list(actions))
        result = executor.step(actions, programs, inputs, number=7, measure=True)
        state.finish(transport)
        return result, state

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
    results, _, _ = run_ranks(model(["vision"]), work, window=2)
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
