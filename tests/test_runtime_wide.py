"""Stages of several ranks, several stages on one rank: the gradients of one process."""

import random
from dataclasses import replace

import pytest
import torch

from mllm_compile.compiler.action import Schedule
from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.launch import launch
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.optimizer import make_optimizer, update
from mllm_compile.runtime.state import State
from tests.stage_programs import prepared
from tests.wide_stages import (
    TOKENS,
    Wide,
    connect,
    inputs,
    parameters,
    plain,
    programs_of,
    run_rank,
    state_of,
)

LAYOUTS = [
    Wide((0, 1), (2, 3, 4)),
    Wide((0, 1, 2), (0, 1)),  # shared ranks: pieces to the rank itself
    Wide((0, 1), (1, 0)),
    Wide((0,), (0,)),
    Wide((2,), (0, 1, 2)),
    Wide((0, 1, 2), (1,)),
]


@pytest.mark.parametrize("wide", LAYOUTS, ids=str)
def test_two_steps_equal_one_process(wide: Wide) -> None:
    ranks = len({*wide.first, *wide.second})
    programs = [programs_of(wide, rank) for rank in range(ranks)]
    draw = random.Random(0)

    def rank_main(transport: LocalTransport) -> tuple[list, dict, State]:
        state = state_of(wide, transport.rank)
        connect(wide, transport, state)
        optimizer = make_optimizer(Optimizer("AdamW", lr=0.1), state.parameters, divided=True)
        found = []
        for _ in range(2):
            result = run_rank(wide, transport, state, programs[transport.rank])
            norm = update(state, optimizer, transport, 0.5)
            found.append((sum(map(float, result.losses.values())), float(norm)))
        result = run_rank(wide, transport, state, programs[transport.rank])
        state.finish(transport)
        return found, {name: p.grad for name, p in state.parameters.items()}, state

    results = run_threads(ranks, rank_main, delay=lambda: draw.random() * 1e-3)
    model = parameters()
    reference = make_optimizer(Optimizer("AdamW", lr=0.1), model)
    assert reference is not None
    for step in range(3):
        losses = [plain(model, inputs(n, n)) for n in TOKENS]
        torch.stack(losses).sum().backward()
        losses = [loss.detach() for loss in losses]
        if step == 2:
            break
        norm = torch.nn.utils.clip_grad_norm_(list(model.values()), 0.5)
        for found, _, _ in results:
            assert found[step][1] == pytest.approx(float(norm), rel=1e-12)
        total = sum(found[step][0] for found, _, _ in results)
        assert total == pytest.approx(sum(map(float, losses)), rel=1e-12)
        reference.step()
        reference.zero_grad()
    for name, placement in wide.placements.items():
        grads = {rank: results[rank][1][name] for rank in placement.held}
        values = {rank: results[rank][2].parameters[name].detach() for rank in placement.held}
        torch.testing.assert_close(placement.whole(values), model[name], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(placement.whole(grads), model[name].grad, rtol=1e-9, atol=1e-12)
        for rank, other in [(a, b) for g in placement.sums for a in g for b in g]:
            assert torch.equal(grads[rank], grads[other])


def test_shared_ranks_between_processes() -> None:
    results = launch("tests.rank_targets:wide", {"dies_at": ""}, 2)
    model = parameters()
    losses = [plain(model, inputs(n, n)) for n in TOKENS]
    torch.stack(losses).sum().backward()
    assert not results[1][0]
    for m, loss in enumerate(losses):
        torch.testing.assert_close(results[0][0][m], loss.detach(), rtol=1e-12, atol=0)
    for name, placement in Wide((0, 1), (0, 1)).placements.items():
        grads = {rank: results[rank][1][name] for rank in placement.held}
        torch.testing.assert_close(placement.whole(grads), model[name].grad, rtol=1e-11, atol=1e-13)


def test_pieces_to_the_rank_itself_are_no_messages() -> None:
    def measured(wide: Wide, ranks: int) -> list:
        programs = [programs_of(wide, rank) for rank in range(ranks)]

        def rank_main(transport: LocalTransport) -> StepResult:
            return run_rank(
                wide, transport, state_of(wide, transport.rank), programs[transport.rank]
            )

        return [result.measures for result in run_threads(ranks, rank_main)]

    (alone,) = measured(Wide((0,), (0,)), 1)
    assert alone.messages_forward == alone.bytes_forward == alone.messages_backward == 0
    first, second = measured(Wide((0, 1), (0, 1)), 2)
    rows = [(n + 1) // 2 for n in TOKENS], [n // 2 for n in TOKENS]
    assert first.messages_forward == second.messages_forward == len(TOKENS)
    assert first.bytes_forward == sum(rows[0]) * 4 * 8
    assert second.bytes_forward == sum(rows[1]) * 4 * 8
    assert first.bytes_backward == second.bytes_backward == 0  # replicas keep their own rows
    apart = measured(Wide((0, 1), (2, 3, 4)), 5)
    assert sum(m.bytes_forward for m in apart) == 3 * sum(TOKENS) * 4 * 8
    assert sum(m.bytes_backward for m in apart) == sum(TOKENS) * 4 * 8


def test_a_value_read_before_its_rank_sends_it_is_refused() -> None:
    wide = Wide((0,), (0,))
    programs = programs_of(wide, 0)

    def rank_main(transport: LocalTransport) -> None:
        executor = Executor(transport, state_of(wide, 0), wide.meshes)
        schedule = Schedule.from_text("0: 1RECV_F0<0,1F0,0F0,0SEND_F0>1")
        executor.step(schedule, programs, [{0: prepared({"x:batch:x": inputs(5, 5)})}])

    said = "during 1F0 of step 0: 0SEND_F0>1: expected to come before"
    with pytest.raises(RunError, match=said):
        run_threads(1, rank_main)


def test_pieces_that_leave_a_gap_are_refused() -> None:
    wide = Wide((0, 1), (2,))
    programs = [programs_of(wide, rank) for rank in range(3)]
    (transfer,) = programs[2][0][1].receives_forward
    short = replace(transfer, pieces=transfer.pieces[:1])
    programs[2][0][1] = replace(programs[2][0][1], receives_forward=(short,))

    def rank_main(transport: LocalTransport) -> None:
        state = state_of(wide, transport.rank)
        run_rank(wide, transport, state, programs[transport.rank])

    with pytest.raises(RunError, match=r"1RECV_F0<0 .*ranks 0, 1.*%h: expected 20 elements.* 12"):
        run_threads(3, rank_main)
