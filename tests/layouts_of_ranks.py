"""One small model under three layouts, trained by gradients that need no forward."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mllm_compile.compiler.layout import R, S
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime import checkpoint
from mllm_compile.runtime.optimizer import make_optimizer, update
from mllm_compile.runtime.placement import Placement
from mllm_compile.runtime.state import State
from mllm_compile.runtime.transport import Transport
from tests.stage_programs import alone

WIDE = Mesh((0, 1, 2, 3), (2, 1, 1, 2))
SHAPES = {"w": (4, 6), "v": (6, 2), "b": (3,), "frozen": (2, 2)}
LAYOUTS: dict[str, dict[str, Placement]] = {
    "data 2, tensor 2": {
        "w": Placement.of(SHAPES["w"], [(WIDE, (S(1, 3, 2),))]),  # three intervals on every rank
        "v": Placement.of(SHAPES["v"], [(WIDE, (S(0, 1, 2),))]),
        "b": Placement.of(SHAPES["b"], [(WIDE, (R,))]),
        "frozen": Placement.of(SHAPES["frozen"], [(WIDE, (S(0, 1, 2),))], summed=False),
    },
    "pipeline 2": {
        name: Placement.of(shape, [(alone(name in ("v", "b")), ())])
        for name, shape in SHAPES.items()
    },
    "one rank": {name: Placement.replicated(shape, (0,)) for name, shape in SHAPES.items()},
}


def lanes(layout: str) -> int:
    return 2 if layout.startswith("data") else 1


def train(transport: Transport, payload: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """``steps`` of AdamW from the start or from ``source``, then save to ``target``.

    Returns this rank's parts of parameters and moments.
    """
    rank, placements = transport.rank, LAYOUTS[payload["layout"]]
    g = torch.Generator().manual_seed(1)
    start = {n: torch.randn(shape, dtype=torch.float64, generator=g) for n, shape in SHAPES.items()}
    held = {
        name: nn.Parameter(p.part(start[name], rank).clone(), name != "frozen")
        for name, p in placements.items()
        if rank in p.held
    }
    state = State(held, {}, {n: p for n, p in placements.items() if len(p.held) > 1})
    transport.connect(state.groups)
    optimizer = make_optimizer(Optimizer("AdamW", lr=0.1), held, divided=True)
    if payload.get("source"):
        for parameter in held.values():
            parameter.data.zero_()
        checkpoint.load(checkpoint.checkpoints(payload["source"])[-1], state, optimizer, rank=rank)
    for step in range(payload["steps"]):
        for name, parameter in held.items():
            if parameter.requires_grad:
                state.accumulate(name, parameter.detach().sin() / lanes(payload["layout"]))
        update(state, optimizer, transport, 0.7)
        if step == payload.get("save_after", payload["steps"] - 1) and payload.get("target"):
            checkpoint.save(payload["target"], step, state, optimizer, rank=rank)
    found = {name: parameter.detach() for name, parameter in held.items()}
    assert optimizer is not None
    for name, parameter in held.items():
        found |= {f"{name} {k}": value for k, value in optimizer.state.get(parameter, {}).items()}
    return found


def assembled(
    layout: str, parts: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Whole parameters and moments from what all ranks returned."""
    whole = {}
    for name, placement in LAYOUTS[layout].items():
        for key in next(iter(parts[rank] for rank in placement.held)):
            if key.partition(" ")[0] == name:
                own = {rank: parts[rank][key] for rank in placement.held}
                whole[key] = own[min(own)] if own[min(own)].dim() == 0 else placement.whole(own)
    return whole
