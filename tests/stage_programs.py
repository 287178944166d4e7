"""Small stages, lowered by hand: a function per stage, its backward by recomputation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from mllm_compile.compiler.action import Action
from mllm_compile.compiler.captured import Prepared, TensorSpec
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.program import Piece, Segment, StageProgram, Transfer

Values = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HandStage:
    """``function`` maps named values to named values; names as in ``compiler/program.py``."""

    index: int
    function: Callable[[Values], Values]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str | None = None


def lower(
    stages: Sequence[HandStage], parameters: Mapping[str, nn.Parameter], batch: Values
) -> dict[int, StageProgram]:
    """Trace every stage on the values of one microbatch (``x:…`` names)."""
    known: Values = {f"p:{name}": value.detach() for name, value in parameters.items()}
    known.update(batch)
    grad = {f"p:{name}" for name, value in parameters.items() if value.requires_grad}
    made_by: dict[str, int] = {}
    for stage in stages:
        taken = {name: known[name] for name in stage.inputs}
        outputs = stage.function(taken)
        if grad & set(stage.inputs):
            grad |= {name for name in stage.outputs if outputs[name].is_floating_point()}
        known.update({name: outputs[name] for name in stage.outputs})
        made_by.update(dict.fromkeys(stage.outputs, stage.index))
    return {stage.index: _lower(stage, stages, known, grad, made_by) for stage in stages}


def _lower(
    stage: HandStage,
    stages: Sequence[HandStage],
    known: Values,
    grad: set[str],
    made_by: Mapping[str, int],
) -> StageProgram:
    def forward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = stage.function(dict(zip(stage.inputs, values, strict=True)))
        return tuple(made[name] for name in stage.outputs)

    def backward(wanted: tuple[str, ...]) -> Segment | None:
        if not wanted:
            return None
        seeds = [name for name in stage.outputs if name in grad and name != stage.loss]

        def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                taken = {
                    name: value.detach().requires_grad_(name in grad)
                    for name, value in zip(stage.inputs, values[: len(stage.inputs)], strict=True)
                }
                made = stage.function(taken)
                roots = [made[name] for name in (*seeds, *([stage.loss] if stage.loss else []))]
                ones = [torch.ones_like(made[stage.loss])] if stage.loss else []
                return torch.autograd.grad(
                    roots,
                    [taken[name] for name in wanted],
                    [*values[len(stage.inputs) :], *ones],
                    materialize_grads=True,
                )

        example = [known[name] for name in stage.inputs] + [known[name] for name in seeds]
        names = (*stage.inputs, *(f"d{name}" for name in seeds))
        results = tuple(f"g:{n[2:]}" if n.startswith("p:") else f"d{n}" for n in wanted)
        return Segment(make_fx(run)(*example), names, results)

    def transfers(pairs: Mapping[int, list[str]], prefix: str = "") -> tuple[Transfer, ...]:
        return tuple(
            whole_transfer(peer, {prefix + name: known[name] for name in names})
            for peer, names in sorted(pairs.items())
            if names
        )

    inward: dict[int, list[str]] = {}
    for name in stage.inputs:
        if name in made_by:
            inward.setdefault(made_by[name], []).append(name)
    outward = {
        other.index: [name for name in other.inputs if made_by.get(name) == stage.index]
        for other in stages
    }
    example = [known[name] for name in stage.inputs]
    flows = [name for name in stage.inputs if name in grad]

    def with_grad(pairs: Mapping[int, list[str]]) -> dict[int, list[str]]:
        return {peer: [n for n in names if n in grad] for peer, names in pairs.items()}

    return StageProgram(
        stage=stage.index,
        forward=Segment(make_fx(forward)(*example), stage.inputs, stage.outputs),
        input_grad=backward(tuple(name for name in flows if name.startswith("%"))),
        weight_grad=backward(tuple(name for name in flows if name.startswith("p:"))),
        sends_forward=transfers(outward),
        receives_forward=transfers(inward),
        sends_backward=transfers(with_grad(inward), "d"),
        receives_backward=transfers(with_grad(outward), "d"),
        loss=stage.loss,
    )


def whole_transfer(peer: int, values: Values) -> Transfer:
    """Between two stages of one rank each, which have the numbers of the stages."""
    specs = tuple(TensorSpec.of(value) for value in values.values())
    pieces = tuple(
        Piece(peer, name, Holding.whole(value.shape).region) for name, value in values.items()
    )
    return Transfer(peer, tuple(values), specs, pieces)


def schedule(
    stage: int, programs: Sequence[Mapping[int, StageProgram]], warm_up: int
) -> tuple[Action, ...]:
    """1F1B: ``warm_up`` forwards, then one backward after every forward, then the rest."""
    actions: list[Action] = []
    present = [m for m, stages in enumerate(programs) if stage in stages]
    for step in range(len(present) + warm_up):
        if step < len(present):
            actions += _forward(stage, present[step], programs[present[step]][stage])
        if step >= warm_up:
            actions += _backward(
                stage, present[step - warm_up], programs[present[step - warm_up]][stage]
            )
    return tuple(actions)


def _forward(stage: int, m: int, program: StageProgram) -> list[Action]:
    return [
        *(Action(stage, "RECV_F", m, t.peer) for t in program.receives_forward),
        Action(stage, "F", m),
        *(Action(stage, "SEND_F", m, t.peer) for t in program.sends_forward),
    ]


def _backward(stage: int, m: int, program: StageProgram) -> list[Action]:
    return [
        *(Action(stage, "RECV_B", m, t.peer) for t in program.receives_backward),
        *([Action(stage, "I", m)] if program.input_grad else []),
        *(Action(stage, "SEND_B", m, t.peer) for t in program.sends_backward),
        *([Action(stage, "W", m)] if program.weight_grad else []),
    ]


def alone(rank: int) -> Mesh:
    """The mesh of a stage of one rank."""
    return Mesh((rank,), (1, 1, 1, 1))


def prepared(batch: Values) -> Prepared:
    """The inputs of one microbatch, without a captured program."""
    values = {tuple(name.split(":", 2)[1:]): value for name, value in batch.items()}
    return Prepared(program=None, values=values)  # type: ignore[arg-type]
