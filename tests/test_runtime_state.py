"""Gradients, norms and updates of one step, over threads."""

import math

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError, RunError
from mllm_compile.compiler.layout import R, S, V
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import Optimizer
from mllm_compile.kernels.collective.members import Reduction
from mllm_compile.runtime import state as state_module
from mllm_compile.runtime.groups import Group
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


LANES = Mesh((0, 1, 2, 3), (2, 1, 1, 2))
"""Two data lanes of tensor 2."""


def shard(placements: dict[str, Placement], rank: int, whole: dict[str, torch.Tensor]) -> State:
    held = {name: nn.Parameter(p.part(whole[name], rank).clone()) for name, p in placements.items()}
    return State(held, {}, placements)


def test_lanes_are_summed_shards_are_not_and_the_norm_counts_each_element_once() -> None:
    placements = {
        "columns": Placement.of((2, 4), [(LANES, (S(1, 1, 2),))]),
        "norm": Placement.of((3,), [(LANES, (R,))]),
        "shared": Placement.of((2,), [(LANES, (V,))]),
    }
    g = torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in placements.items()}
    whole = {n: torch.zeros(shape, dtype=torch.float64) for n, shape in shapes.items()}
    # By lane; of a V parameter every rank has a summand of its own.
    grads = [
        {n: torch.randn(s, dtype=torch.float64, generator=g) for n, s in shapes.items()}
        for _ in range(2)
    ]
    own = torch.randn(4, 2, dtype=torch.float64, generator=g)

    def rank_main(transport: LocalTransport) -> tuple[dict, torch.Tensor]:
        rank = transport.rank
        state = shard(placements, rank, whole)
        lane = grads[LANES.lane(rank)]
        state.accumulate("columns", placements["columns"].part(lane["columns"], rank))
        state.accumulate("norm", lane["norm"])
        state.accumulate("shared", own[rank])
        state.finish(transport)
        return {n: p.grad for n, p in state.parameters.items()}, state.grad_norm(transport)

    results = run_threads(4, rank_main)
    expected = {
        "columns": grads[0]["columns"] + grads[1]["columns"],
        "norm": grads[0]["norm"] + grads[1]["norm"],
        "shared": own.sum(0),
    }
    for name, placement in placements.items():
        found = placement.whole({rank: results[rank][0][name] for rank in range(4)})
        torch.testing.assert_close(found, expected[name], rtol=1e-12, atol=0)
    norm = torch.cat([value.reshape(-1) for value in expected.values()]).norm()
    for _, found in results:
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lanes", [(), (1,), (0, 1)])
def test_lanes_without_images_add_nothing_and_no_lane_at_all_means_no_gradient(
    lanes: tuple[int, ...],
) -> None:
    placements = {"vision": Placement.of((4,), [(LANES, (S(0, 1, 2),))])}

    def rank_main(transport: LocalTransport) -> torch.Tensor | None:
        state = shard(placements, transport.rank, {"vision": torch.zeros(4)})
        if LANES.lane(transport.rank) in lanes:
            state.accumulate("vision", torch.ones(2))
        state.finish(transport)
        return state.parameters["vision"].grad

    for found in run_threads(4, rank_main):
        assert (found is None) == (not lanes)
        assert found is None or found.tolist() == [len(lanes)] * 2


@pytest.mark.parametrize(("bucket", "sums"), [(2**24, 2), (8, 4), (1, 6)])
def test_few_large_sums(bucket: int, sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five parameters of float32 or less, one of float64."""
    monkeypatch.setattr(state_module, "_BUCKET", bucket)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float16]
    named = {f"w{n}": torch.zeros(4, dtype=dtype) for n, dtype in enumerate([*dtypes, *dtypes[:1]])}
    placements = {name: Placement.replicated((4,), (0, 1)) for name in named}
    calls: list[int] = []

    class Counting(Group):
        def all_reduce(self, x: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
            calls.append(x.numel())
            return super().all_reduce(x, reduction)

    def rank_main(transport: LocalTransport) -> dict[str, torch.Tensor | None]:
        state = shard(placements, transport.rank, named)
        for number, (name, value) in enumerate(named.items()):
            state.accumulate(name, torch.full_like(value, 1.0 + number + transport.rank))
        counting = Counting((0, 1), transport.rank, transport._links)
        transport.group = lambda ranks: counting  # type: ignore[method-assign]
        state.finish(transport)
        return {name: p.grad for name, p in state.parameters.items()}

    for grads in run_threads(2, rank_main):
        for number, (name, value) in enumerate(named.items()):
            found = grads[name]
            assert found is not None
            assert found.dtype == value.dtype
            assert found.tolist() == [3.0 + 2 * number] * 4
    assert len(calls) == 2 * sums
    assert sum(calls) == 2 * 6 * 4


@pytest.mark.parametrize("same", [True, False])
def test_buffers_that_lanes_update_must_be_equal(same: bool) -> None:
    def rank_main(transport: LocalTransport) -> None:
        seen = torch.tensor([math.nan, 1.0])
        state = State({}, {"bn.seen": seen}, {}, {"bn.seen": (0, 2)})
        if transport.rank != 1:
            state.set_buffer("bn.seen", seen + (0 if same else transport.rank))
        assert state.groups == {(0, 2)}
        state.finish(transport)

    if same:
        run_threads(3, rank_main)
    else:
        said = r"buffer bn.seen: expected the same new value on all data lanes.*ranks 0 and 2.*eval"
        with pytest.raises(RunError, match=said):
            run_threads(3, rank_main)


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


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_divided(
    name: str,
) -> None:
    held = {"w": nn.Parameter(torch.zeros(2, 2))}
    assert make_optimizer(Optimizer(name), held) is not None
    with pytest.raises(RequestError, match=f"name: expected an optimizer that updates .*{name}"):
        make_optimizer(Optimizer(name), held, divided=True)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adamax", "RMSprop", "NAdam", "Adagrad"])
def test_an_optimizer_that_updates_number_by_number_takes_parts(name: str) -> None:
    held = {"w": nn.Parameter(torch.zeros(2, 2))}
    assert make_optimizer(Optimizer(name), held, divided=True) is not None
