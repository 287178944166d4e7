"""Gradients, norms and updates of one step, over threads."""

import math

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError, RunError
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.optimizer import make_optimizer, update
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from tests.stage_programs import lower
from tests.three_stages import HELD_BY, batches, model, plain, run_rank, state_of


def parameter(*values: float, trainable: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64), trainable)


def test_the_norm_counts_a_tied_parameter_once_and_ranks_without_any() -> None:
    def rank_main(transport: LocalTransport) -> torch.Tensor:
        held: dict[str, nn.Parameter] = {}
        if transport.rank in (0, 2):
            held["tied"] = parameter(0.0, 0.0)
        if transport.rank == 2:
            held["own"] = parameter(0.0)
        state = State(held, {}, {"tied": Placement.replicated((2,), (0, 2))})
        for name in held:
            value = [1.0, 2.0] if name == "tied" else [7.0]
            state.accumulate(name, torch.tensor(value, dtype=torch.float64))
        state.finish(transport)
        return state.grad_norm(transport)

    norms = run_threads(4, rank_main)
    assert [norm.item() for norm in norms] == [math.sqrt(2**2 + 4**2 + 7**2)] * 4


@pytest.mark.parametrize("present", [(0,), (2,), (0, 2), ()])
def test_a_tied_gradient_may_be_absent_on_some_holders(present: tuple[int, ...]) -> None:
    def rank_main(transport: LocalTransport) -> torch.Tensor | None:
        held = {"tied": parameter(0.0)} if transport.rank != 1 else {}
        state = State(held, {}, {"tied": Placement.replicated((1,), (2, 0))})
        if transport.rank in present:
            state.accumulate("tied", torch.tensor([1.0 + transport.rank], dtype=torch.float64))
        state.finish(transport)
        return held["tied"].grad if held else None

    first, other, last = run_threads(3, rank_main)
    assert other is None
    if not present:
        assert first is None
        assert last is None
    else:
        assert first is not None
        assert last is not None
        assert first.tolist() == last.tolist() == [sum(1.0 + rank for rank in present)]


def test_sums_of_many_small_bfloat16_gradients_are_not_lost() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    state = State({"w": weight})
    for _ in range(1024):
        state.accumulate("w", torch.ones(1, dtype=torch.bfloat16))
    run_threads(1, lambda transport: state.finish(transport))
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.item() == 1024  # in bfloat16 the sum would stop at 256


def test_an_accumulated_gradient_is_a_copy() -> None:
    state = State({"w": parameter(0.0)})
    gradient = torch.ones(1, dtype=torch.float64)
    state.accumulate("w", gradient)
    state.accumulate("w", gradient)
    assert gradient.item() == 1.0


def test_gradients_that_must_not_be_are_refused() -> None:
    state = State({"frozen": parameter(0.0, trainable=False), "w": parameter(0.0)})
    with pytest.raises(RunError, match="gradient of frozen: expected none"):
        state.accumulate("frozen", torch.ones(1, dtype=torch.float64))
    with pytest.raises(RunError, match=r"gradient of w: expected \[1\], got \[2\]"):
        state.accumulate("w", torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_three_steps_of_a_pipeline_equal_the_plain_optimizer(
    name: str, clip_norm: float | None
) -> None:
    work, request = batches([2, None, 3]), Optimizer(name, lr=0.05, weight_decay=0.1)

    programs = [lower(stages, model(), values) for stages, values in work]

    def rank_main(transport: LocalTransport) -> tuple[State, list[torch.Tensor]]:
        state = state_of(transport.rank, model())
        optimizer = make_optimizer(request, state.parameters)
        norms = []
        for _ in range(3):
            run_rank(transport, model(), work, programs=programs, state=state)
            norms.append(update(state, optimizer, transport, clip_norm))
        return state, norms

    parameters = model()
    reference = make_optimizer(request, parameters)
    assert reference is not None
    expected_norms = []
    for _ in range(3):
        plain(parameters, work)
        limit = clip_norm or math.inf
        expected_norms.append(nn.utils.clip_grad_norm_(list(parameters.values()), limit))
        reference.step()
        reference.zero_grad()
    for rank, (state, norms) in enumerate(run_threads(3, rank_main)):
        torch.testing.assert_close(
            torch.stack(norms), torch.stack(expected_norms), rtol=1e-10, atol=0
        )
        for key in HELD_BY[rank]:
            torch.testing.assert_close(
                state.parameters[key], parameters[key], rtol=1e-10, atol=1e-12
            )


def test_a_rank_without_trainable_parameters_needs_no_optimizer() -> None:
    assert make_optimizer(Optimizer(), {"w": parameter(0.0, trainable=False)}) is None
    assert make_optimizer(Optimizer(), {}) is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Optimizer("Adamw"), r"\[optimizer\] name: expected one of .*AdamW.*, got 'Adamw'"),
        (Optimizer("LBFGS"), "got 'LBFGS'"),
        (Optimizer("lr_scheduler"), "got 'lr_scheduler'"),
        (Optimizer("Rprop", weight_decay=0.1), "Rprop: expected no weight_decay"),
        (Optimizer("Muon"), "Muon: .*2D"),
    ],
)
def test_bad_optimizers_are_refused(request_: Optimizer, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        make_optimizer(request_, {"w": parameter(0.0)})
