"""Two stages of several ranks, on any ranks, lowered by hand for every rank.

The first stage divides tokens among its ranks, unevenly; its weight is V. The second one divides
the columns of its weight; it needs all tokens, whose gradient it returns whole (R).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, R, S, V
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.program import Piece, Segment, StageProgram, Transfer
from mllm_compile.compiler.reshard import Holdings, reshard
from mllm_compile.kernels.collective import convert as _convert  # noqa: F401
from mllm_compile.kernels.collective.members import Member, members
from mllm_compile.runtime.executor import Executor, StepResult
from mllm_compile.runtime.groups import groups_of
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Transport
from tests.stage_programs import prepared

WIDTH, COLUMNS = 4, 6
TOKENS = (5, 2, 7)


def parameters() -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(5)
    shapes = {"first": (WIDTH, WIDTH), "second": (WIDTH, COLUMNS), "scale": (WIDTH,)}
    return {
        name: nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=g))
        for name, shape in shapes.items()
    }


def inputs(tokens: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDTH, dtype=torch.float64, generator=g)


def plain(held: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ held["first"])
    return (h @ held["second"]).square().sum() + (h * held["scale"]).sin().sum()


@dataclass(frozen=True)
class Wide:
    """Both stages on ``first`` and ``second``, whose ranks may be the same."""

    first: tuple[int, ...]
    second: tuple[int, ...]

    @property
    def meshes(self) -> dict[int, Mesh]:
        return {
            0: Mesh(self.first, (1, 1, len(self.first), 1)),
            1: Mesh(self.second, (1, 1, 1, len(self.second))),
        }

    @property
    def placements(self) -> dict[str, Placement]:
        one, two = self.meshes.values()
        weight: list[Layout] = [V] if one.axes else []
        columns: list[Layout] = [S(1, 1, len(self.second))] if two.axes else []
        return {
            "first": Placement.of((WIDTH, WIDTH), [(one, weight)]),
            "second": Placement.of((WIDTH, COLUMNS), [(two, columns)]),
            "scale": Placement.of((WIDTH,), [(two, [R] * len(two.axes))]),
        }

    def holdings(self, tokens: int) -> tuple[Holdings, Holdings]:
        one = self.meshes[0]
        layouts = [S(0, 1, tokens)] if one.axes else []
        sources = {
            rank: Holding.of((tokens, WIDTH), layouts, one.axes, [place] if one.axes else [])
            for place, rank in enumerate(self.first)
        }
        return sources, dict.fromkeys(self.second, Holding.whole((tokens, WIDTH)))

    def program(self, stage: int, rank: int, tokens: int) -> StageProgram:
        sources, targets = self.holdings(tokens)
        ends = (sources, targets)
        forward, backward = reshard("%h", *ends), reshard("d%h", *ends[::-1])
        spec = TensorSpec.of(torch.empty(ends[stage][rank].shape, dtype=torch.float64))
        moves = (forward, backward) if stage == 0 else (backward, forward)
        sent = [Piece(m.target, "", m.source_region) for m in moves[0] if m.source == rank]
        taken = [Piece(m.source, "", m.target_region) for m in moves[1] if m.target == rank]

        def transfers(name: str, pieces: Sequence[Piece]) -> tuple[Transfer, ...]:
            named = tuple(Piece(piece.rank, name, piece.region) for piece in pieces)
            return (Transfer(1 - stage, (name,), (spec,), named),)

        if stage == 0:
            graphs = self._first(rank, tokens, spec)
            return StageProgram(
                0,
                *graphs,
                sends_forward=transfers("%h", sent),
                receives_backward=transfers("d%h", taken),
            )
        return StageProgram(
            1,
            *self._second(rank, spec),
            receives_forward=transfers("%h", taken),
            sends_backward=transfers("d%h", sent),
            loss="%loss",
        )

    def _first(self, rank: int, tokens: int, spec: TensorSpec) -> tuple[Segment, None, Segment]:
        mesh = self.meshes[0]

        def forward(x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
            for axis in mesh.axes:
                split = str(axis.split(tokens))
                want = f"S(0,1,{tokens})"
                x = torch.ops.mllm.convert(x, "R", want, axis.name, "", split, 0, 1)
            return torch.tanh(x @ first)

        def weight_grad(x: torch.Tensor, first: torch.Tensor, dh: torch.Tensor) -> torch.Tensor:
            (found,) = torch.autograd.grad(forward(x, first), [first], dh)
            return found

        shapes = [(tokens, WIDTH), (WIDTH, WIDTH)]
        names = ("x:batch:x", "p:first")
        return (
            self._segment(0, rank, forward, shapes, names, ("%h",)),
            None,
            self._segment(
                0, rank, weight_grad, [*shapes, spec.shape], (*names, "d%h"), ("g:first",)
            ),
        )

    def _second(self, rank: int, spec: TensorSpec) -> tuple[Segment, Segment, Segment]:
        mesh = self.meshes[1]

        def forward(h: torch.Tensor, second: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            seen = h
            for axis in mesh.axes:
                seen = torch.ops.mllm.convert(h, "R", "V", axis.name)
            loss = (seen @ second).square().sum()
            for axis in mesh.axes:
                loss = torch.ops.mllm.convert(loss, "P", "R", axis.name)
            return loss + (h * scale).sin().sum()

        def grads(wanted: slice) -> Callable[..., tuple[torch.Tensor, ...]]:
            return lambda *values: torch.autograd.grad(forward(*values), values[wanted])

        shapes = [spec.shape, (WIDTH, COLUMNS // len(self.second)), (WIDTH,)]
        names = ("%h", "p:second", "p:scale")
        return (
            self._segment(1, rank, forward, shapes, names, ("%loss",)),
            self._segment(1, rank, grads(slice(0, 1)), shapes, names, ("d%h",)),
            self._segment(1, rank, grads(slice(1, 3)), shapes, names, ("g:second", "g:scale")),
        )

    def _segment(
        self,
        stage: int,
        rank: int,
        function: Callable[..., object],
        shapes: Sequence[Sequence[int]],
        names: tuple[str, ...],
        results: tuple[str, ...],
    ) -> Segment:
        """Traced at the rank's places, for shapes alone."""
        mesh = self.meshes[stage]
        places = {a.name: Member(mesh.place(rank, a.name), a.size) for a in mesh.axes}

        def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                made = function(*(value.detach().requires_grad_() for value in values))
            return made if isinstance(made, tuple) else (made,)  # type: ignore[return-value]

        with FakeTensorMode(), members(places):
            fakes = [torch.empty(tuple(shape), dtype=torch.float64) for shape in shapes]
            return Segment(make_fx(run)(*fakes), names, results)

    def schedule(self, microbatches: int) -> Schedule:
        """One microbatch after another; a rank with both stages posts receives before sends."""
        lists: dict[int, list[Action]] = {rank: [] for rank in (*self.first, *self.second)}
        for m in range(microbatches):
            for text in (
                f"1RECV_F{m}<0 0F{m} 0SEND_F{m}>1 0RECV_B{m}<1 1F{m} 1I{m} 1SEND_B{m}>0 1W{m} 0W{m}"
            ).split():
                action = Action.parse(text)
                for rank in set((self.first, self.second)[action.stage]):
                    lists[rank].append(action)
        return Schedule({rank: tuple(actions) for rank, actions in lists.items()})


def state_of(wide: Wide, rank: int) -> State:
    held = {
        name: nn.Parameter(placement.part(parameters()[name].detach(), rank).clone())
        for name, placement in wide.placements.items()
        if rank in placement.held
    }
    return State(held, {}, wide.placements)


def run_rank(
    wide: Wide, transport: Transport, state: State, programs: Sequence[dict], **kwargs: object
) -> StepResult:
    executor = Executor(transport, state, wide.meshes, **kwargs)
    work = [{0: prepared({"x:batch:x": inputs(n, n)})} for n in TOKENS[: len(programs)]]
    return executor.step(wide.schedule(len(work)), programs, work, number=7, measure=True)


def programs_of(wide: Wide, rank: int) -> list[dict]:
    return [
        {s: wide.program(s, rank, n) for s, mesh in wide.meshes.items() if rank in mesh.ranks}
        for n in TOKENS
    ]


def connect(wide: Wide, transport: Transport, state: State) -> None:
    transport.connect({*groups_of(wide.meshes.values()), *state.groups})
