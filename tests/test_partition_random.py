"""Random models, requests and programs of one model: every law holds, and parameters never move."""

import random

import pytest
import torch
from torch import nn

from mllm_compile.compiler.errors import RequestError
from mllm_compile.passes.pipeline import make_plan
from tests.requests import request
from tests.small_graphs import capture

PARTS, STEPS = 4, 12


class Wired(nn.Module):
    """Parts of a few maps, joined at random; which parts run is a matter of the batch."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        names = [f"p{k}" for k in range(PARTS)]
        self.parts = nn.ModuleDict(
            {n: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for n in names}
        )
        self.glue = nn.ModuleDict()
        self.steps = []
        for place in range(STEPS):
            part = names[place * PARTS // STEPS]
            sources = [draw.randrange(-1, place) for _ in range(2)] if place else [-1, -1]
            self.steps.append((part, draw.randrange(3), sources, draw.choice("---gd")))
            if self.steps[-1][-1] == "g":
                self.glue[str(place)] = nn.Linear(4, 4)
        for parameter in self.parameters():
            parameter.requires_grad_(draw.random() < 0.6)

    def forward(self, x, **present):
        values = {-1: x}
        for place, (part, chosen, sources, after) in enumerate(self.steps):
            if part in ("p0", "p1") and part not in present:
                continue
            a, b = (values.get(source, x) for source in sources)
            made = self.parts[part][chosen](a * (x > 0) + b + present.get(part, 0.0))
            made = self.glue[str(place)](made) if after == "g" else made
            values[place] = made.detach() if after == "d" else made
        return sum(value.square().mean() for value in list(values.values())[-3:])


def inputs(*parts):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(3, 4, generator=generator) for name in ("x", *parts)}


@pytest.mark.parametrize("seed", range(25))
def test_laws_hold_and_parameters_stay(seed):
    draw = random.Random(seed)
    model = Wired(seed)
    modules = [(f"parts.p{k}", draw.randint(1, 3)) for k in range(PARTS)]
    if draw.random() < 0.5:
        modules = modules[1:]
    wanted = request(*modules, microbatches=draw.randint(1, 4))
    placement = {}
    programs = [inputs("p0", "p1"), inputs("p1"), inputs(), inputs("p0")]
    draw.shuffle(programs)
    for batch in programs:
        plan = planned(wanted, capture(model, batch), placement)
        if plan is None:
            return
        assert plan.placement.items() >= placement.items()
        placement = plan.placement
        stages = {(name, s.index) for s in plan.stages for name in s.parameters}
        assert stages <= {(name, stage) for (_, name, _), stage in placement.items()}


def planned(wanted, program, placement):
    """The plan; None where a refusal is right.

    A module may have too few places to cut, or an uncovered part may be needed earlier than
    another program placed it.
    """
    try:
        return make_plan(wanted, program, placement)
    except RequestError as error:
        uncovered = "which no module of the request holds" in str(error) and placement
        if "places to cut" not in str(error) and not uncovered:
            raise
        return None
