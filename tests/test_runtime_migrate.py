"""A parameter comes to the ranks that newly hold it, with the optimizer's state."""

from typing import Any

import pytest
import torch
from torch import nn

from mllm_compile.compiler.layout import R, S
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import Optimizer
from mllm_compile.runtime.local_transport import LocalTransport, run_threads
from mllm_compile.runtime.migrate import move_parameter
from mllm_compile.runtime.optimizer import make_optimizer
from mllm_compile.runtime.placement import Placement
from tests.stage_programs import alone

SHAPE = (6, 4)
ONE = Placement.of(SHAPE, [(alone(0), ())])
ROWS = Placement.of(SHAPE, [(Mesh((0, 1), (1, 1, 1, 2)), (S(0, 1, 2),))])
COLUMNS = Placement.of(SHAPE, [(Mesh((2, 3), (1, 1, 1, 2)), (S(1, 1, 2),))])
THIRDS = Placement.of(SHAPE, [(Mesh((1, 2, 3), (1, 1, 1, 3)), (S(0, 1, 3),))])
COPIES = Placement.of(SHAPE, [(Mesh((2, 3), (1, 1, 1, 2)), (R,))])


@pytest.mark.parametrize(
    ("before", "after"),
    [(ONE, COLUMNS), (ROWS, COLUMNS), (COLUMNS, ONE), (ONE, THIRDS), (COPIES, ROWS), (ONE, COPIES)],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_any_placement_to_ranks_that_did_not_hold_it(
    before: Placement, after: Placement, steps: int
) -> None:
    start = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def trained(value: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        parameter = nn.Parameter(value.clone())
        optimizer = make_optimizer(Optimizer("AdamW", lr=0.1), {"w": parameter}, divided=True)
        assert optimizer is not None
        for _ in range(steps):
            parameter.grad = parameter.detach().cos()
            optimizer.step()
        return parameter, optimizer

    def rank_main(transport: LocalTransport) -> tuple[nn.Parameter | None, dict[str, Any]]:
        rank = transport.rank
        parameter, optimizer = None, None
        if rank in before.held:
            parameter, optimizer = trained(before.part(start, rank))
        elif rank in after.held:
            parameter = nn.Parameter(torch.zeros(after.held[rank].shape, dtype=torch.float64))
        return parameter, move_parameter(transport, "w", before, after, parameter, optimizer)

    results = run_threads(4, rank_main)
    whole, optimizer = trained(start)
    for rank, (parameter, kept) in enumerate(results):
        if rank not in after.held or rank in before.held:
            assert kept == {}
            continue
        assert parameter is not None
        assert torch.equal(parameter, after.part(whole.detach(), rank))
        assert kept.keys() == optimizer.state[whole].keys()
        for key, value in optimizer.state[whole].items():
            expected = value if value.dim() == 0 else after.part(value, rank)
            assert torch.equal(kept[key], expected)
