"""Two data lanes of an encoder feed one stage that runs the samples of both."""

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.errors import RunError
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.program import Piece, Segment, StageProgram, Transfer
from mllm_compile.runtime import executor as executor_module
from mllm_compile.runtime.executor import Executor
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.outbox import Outbox
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Handle
from tests.stage_programs import alone, prepared

WIDTH = 4
MESHES = {0: Mesh((0, 1), (2, 1, 1, 1)), 1: alone(2)}
Rows = tuple[int | None, int | None]
"""The images of either lane; None where it has no program for the encoder."""


def parameters() -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(3)
    shapes = {"vision": (3, WIDTH), "scale": (WIDTH,)}
    return {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=g))
        for name, shape in shapes.items()
    }


def pixels(m: int, lane: int, rows: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * m + lane)
    return torch.randn(rows, 3, dtype=torch.float64, generator=g)


def encode(x: torch.Tensor, vision: torch.Tensor) -> tuple[torch.Tensor]:
    return (torch.tanh(x @ vision),)


def loss_of(h: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor]:
    return ((h * scale + 1).square().sum(),)


def spec(rows: int) -> TensorSpec:
    return TensorSpec.of(torch.empty(rows, WIDTH, dtype=torch.float64))


def encoder(rows: int) -> StageProgram:
    """One lane's program: it knows nothing of the other lane."""
    piece = Piece(2, "", (((0, rows),), ((0, WIDTH),)))

    def transfer(name: str) -> tuple[Transfer, ...]:
        pieces = (Piece(piece.rank, name, piece.region),) if rows else ()
        return (Transfer(1, (name,), (spec(rows),), pieces),)

    def weight_grad(x: torch.Tensor, vision: torch.Tensor, dh: torch.Tensor) -> object:
        with torch.enable_grad():
            vision = vision.detach().requires_grad_()
            return torch.autograd.grad(encode(x, vision), [vision], dh)

    x, vision, dh = pixels(0, 0, rows), parameters()["vision"].detach(), torch.zeros(rows, WIDTH)
    names = ("x:batch:pixels", "p:vision")
    return StageProgram(
        0,
        Segment(make_fx(encode)(x, vision), names, ("%h",)),
        None,
        Segment(make_fx(weight_grad)(x, vision, dh.double()), (*names, "d%h"), ("g:vision",)),
        sends_forward=transfer("%h"),
        receives_backward=transfer("d%h"),
    )


def head(rows: Rows) -> StageProgram:
    """All rows, those of lane 0 first."""
    total, pieces, start = sum(count or 0 for count in rows), [], 0
    for lane, count in enumerate(rows):
        if count:
            pieces.append((lane, (((start, start + count),), ((0, WIDTH),))))
            start += count

    def transfer(name: str) -> tuple[Transfer, ...]:
        found = tuple(Piece(rank, name, region) for rank, region in pieces)
        return (Transfer(0, (name,), (spec(total),), found),)

    def grads(h: torch.Tensor, scale: torch.Tensor) -> object:
        with torch.enable_grad():
            values = [h.detach().requires_grad_(), scale.detach().requires_grad_()]
            return torch.autograd.grad(loss_of(*values), values)

    h, scale = torch.zeros(total, WIDTH, dtype=torch.float64), parameters()["scale"].detach()
    names = ("%h", "p:scale")
    return StageProgram(
        1,
        Segment(make_fx(loss_of)(h, scale), names, ("%loss",)),
        Segment(make_fx(lambda h, s: grads(h, s)[:1])(h, scale), names, ("d%h",)),
        Segment(make_fx(lambda h, s: grads(h, s)[1:])(h, scale), names, ("g:scale",)),
        receives_forward=transfer("%h"),
        sends_backward=transfer("d%h"),
        loss="%loss",
    )


def schedule(count: int) -> Schedule:
    """1F1B with one forward ahead; the lanes share one list."""
    first: list[str] = []
    for m in range(count + 1):
        if m < count:
            first += [f"0F{m}", f"0SEND_F{m}>1"]
        if m:
            first += [f"0RECV_B{m - 1}<1", f"0W{m - 1}"]
    last = [
        f"{text}{m}{peer}"
        for m in range(count)
        for text, peer in [
            ("1RECV_F", "<0"),
            ("1F", ""),
            ("1I", ""),
            ("1SEND_B", ">0"),
            ("1W", ""),
        ]
    ]
    lane, rest = (tuple(map(Action.parse, texts)) for texts in (first, last))
    return Schedule({0: lane, 1: lane, 2: rest}, {0: 2})


@pytest.mark.parametrize(
    "rows", [[(2, 3)], [(2, 3), (1, None), (None, 2), (4, 0)], [(2, None)], [(0, 1), (1, 0)]]
)
def test_lanes_equal_one_process(rows: Sequence[Rows]) -> None:
    encoders = [[None if n is None else encoder(n) for n in lanes] for lanes in rows]
    heads = [head(lanes) for lanes in rows]
    placements = {"vision": Placement.of((3, WIDTH), [(MESHES[0], ())])}
    draw = random.Random(1)

    def rank_main(transport: LocalTransport) -> tuple[torch.Tensor | None, object, object]:
        rank = transport.rank
        programs, inputs = [], []
        for m, lanes in enumerate(rows):
            program = heads[m] if rank == 2 else encoders[m][rank]
            programs.append({} if program is None else {program.stage: program})
            count = None if rank == 2 else lanes[rank]
            values = {} if count is None else {"x:batch:pixels": pixels(m, rank, count)}
            inputs.append({rank // 2: prepared(values)})
        name = "scale" if rank == 2 else "vision"
        state = State({name: parameters()[name]}, {}, placements)
        transport.connect(state.groups)
        result = Executor(transport, state, MESHES).step(schedule(len(rows)), programs, inputs)
        state.finish(transport)
        return state.parameters[name].grad, result.losses, state.grad_norm(transport)

    results = run_threads(3, rank_main, delay=lambda: draw.random() * 1e-3)
    model = parameters()
    for m, lanes in enumerate(rows):
        batch = [pixels(m, lane, n) for lane, n in enumerate(lanes) if n is not None]
        (loss,) = loss_of(*encode(torch.cat(batch), model["vision"]), model["scale"])
        loss.backward()
        torch.testing.assert_close(results[2][1][m], loss.detach(), rtol=1e-12, atol=0)
    for rank, name in enumerate(["vision", "vision", "scale"]):
        torch.testing.assert_close(results[rank][0], model[name].grad, rtol=1e-11, atol=1e-13)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.values()])
    torch.testing.assert_close(results[0][2], norm, rtol=1e-12, atol=0)


def test_a_skipped_send_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs count the peer's receives, which it posts for the other lane."""
    sent: list[tuple[str, int]] = []

    class Recording(Outbox):
        def sent(self, send: Action, handles: Mapping[int, Sequence[Handle]]) -> None:
            sent.append((str(send), len(handles)))
            super().sent(send, handles)

    monkeypatch.setattr(executor_module, "Outbox", Recording)

    def rank_main(transport: LocalTransport) -> None:
        programs = [{}, {0: encoder(0)}]
        inputs = [{}, {0: prepared({"x:batch:pixels": pixels(0, 0, 0)})}]
        executor = Executor(transport, State({"vision": parameters()["vision"]}), MESHES)
        executor.step(Schedule.from_text("0: 0F0,0SEND_F0>1,0F1,0SEND_F1>1"), programs, inputs)

    run_threads(1, rank_main)
    assert sent == [("0SEND_F0>1", 0), ("0SEND_F1>1", 0)]


def test_without_lanes_nothing_may_be_missing() -> None:
    def rank_main(transport: LocalTransport) -> None:
        executor = Executor(transport, State({}), {0: alone(0), 1: alone(1)})
        executor.step(Schedule.from_text("0: 0F0"), [{}], [{}])

    with pytest.raises(RunError, match="during 0F0 of step 0: stage 0: expected a program for 0F0"):
        run_threads(1, rank_main)
