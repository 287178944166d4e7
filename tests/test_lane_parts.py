"""Boundary values of unequally many data lanes: which part each has, and what is refused."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mllm_compile.compiler.errors import PlanError
from tests.lane_programs import Lanes, Microbatch, deliver

PATHS = (("encoder",), ("decoder",))


class Rows(nn.Module):
    """Rows of tokens, encoded and decoded one by one; ``form`` is what crosses in between."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 2)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "flat":
            x = x.flatten(0, 1)
        if self.form == "twice":  # two copies of the batch, one behind the other
            x = x.expand(2, *x.shape).flatten(0, 2)
        if self.form == "tokens first":
            x = x.transpose(0, 1)
        value = self.encoder(x.mean(0) if self.form == "pooled" else x)
        return self.decoder(value).square().sum()


class Prompted(nn.Module):
    """Encodes rows with a learned prompt, the same for all samples, that is read again later."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.prompt = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        prompt = self.prompt(torch.ones(3, 4, dtype=x.dtype))
        return self.rows(x + prompt), prompt


class Prompt(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = Prompted(), nn.Linear(4, 2)
        self.encoder.prompt.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        value, prompt = self.encoder(x)
        return self.decoder(value + prompt).square().sum()


def rows(*lengths: int) -> list[Tensor]:
    return [torch.randn(length, 4) for length in lengths]


def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
    length = max(map(len, samples))
    return {"x": torch.stack([pad(sample, (0, 0, 0, length - len(sample))) for sample in samples])}


def lanes(model: nn.Module, samples: Sequence[Tensor], encoders: int, decoders: int) -> Lanes:
    microbatch = Microbatch(model, samples, padded)
    return microbatch.lanes(PATHS, [(1, encoders), (1, decoders)], shared=False)


@pytest.mark.parametrize("form", ["batch first", "tokens first", "flat", "twice"])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (1, 4)])
def test_samples_in_any_dim(form: str, sizes: tuple[int, int]) -> None:
    found = lanes(Rows(form), rows(5, 5, 5, 5), *sizes)
    for start, end in ((0, 1), (1, 0)):
        for (rank, name), tensor in deliver(found, start, end).items():
            torch.testing.assert_close(tensor, found.local(end, rank, name))


@pytest.mark.parametrize(
    ("form", "lengths", "sizes", "message"),
    [
        ("batch first", (5, 3), (2, 1), r"differ only in rows.*\[\[1, 5, 4\], \[1, 3, 4\]\] ->"),
        ("flat", (5, 3), (2, 1), r"differ only in rows.*got \[\[5, 4\], \[3, 4\]\] -> \[\[10, 4\]"),
        ("flat", (2, 2, 3, 1, 1, 1), (3, 2), "equally many rows for every sample, got 1 and 2"),
        ("pooled", (5, 5), (2, 1), "belong to one sample, got one that is reduced over them"),
    ],
)
def test_values_that_lanes_do_not_share_out_are_refused(
    form: str, lengths: tuple[int, ...], sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        deliver(lanes(Rows(form), rows(*lengths), *sizes), 0, 1)
    assert "pad all samples of a microbatch alike" in str(error.value)
    assert "test_lane_parts.py" in str(error.value)


def test_rows_that_lanes_pad_alike_only_by_chance_are_still_told_apart() -> None:
    """3 lanes of 2·2, 2·3, 2·1 rows are 12; 2 lanes of 3·3 and 3·1 rows too."""
    found = lanes(Rows("flat"), rows(2, 2, 3, 1, 1, 1), 3, 2)
    shapes = [
        sum(len(found.values[id(plan)]["addmm_default"]) for plan in side) for side in found.plans
    ]
    assert shapes == [12, 12]


def test_a_value_that_is_the_same_on_all_lanes() -> None:
    found = lanes(Prompt(trains=False), rows(3, 3, 3, 3), 1, 4)
    for (rank, name), tensor in deliver(found, 0, 1).items():
        torch.testing.assert_close(tensor, found.local(1, rank, name))
    with pytest.raises(PlanError, match="no gradient of a value that is the same on all lanes"):
        deliver(lanes(Prompt(trains=True), rows(3, 3, 3, 3), 1, 4), 0, 1)


def test_lanes_whose_boundaries_differ_are_refused() -> None:
    found = lanes(Rows("flat"), rows(5, 5, 5, 5), 4, 2)
    plan = found.plans[0][2]
    quiet = replace(plan.boundaries[0], gradients=())
    found.plans[0][2] = replace(plan, boundaries=(quiet,))
    with pytest.raises(PlanError, match=r"stage 0, data lane 2: .*with gradient.*without"):
        found.links(1, found.ranks(1)[0])
    found.plans[0] = [replace(each, boundaries=()) for each in found.plans[0]]
    with pytest.raises(PlanError, match="stage 0: expected a data lane with its values"):
        found.links(1, found.ranks(1)[0])


def test_one_rank_each_exchanges_whole_values() -> None:
    found = lanes(Rows("batch first"), rows(5, 5), 1, 1)
    (sent,), (got,) = found.links(0, 0)["sends_forward"], found.links(1, 1)["receives_forward"]
    assert [piece.region for piece in sent.pieces] == [(((0, 2),), ((0, 5),), ((0, 4),))]
    assert (sent.pieces[0].rank, got.pieces[0].rank, sent.values) == (1, 0, got.values)
