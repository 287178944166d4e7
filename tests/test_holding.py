"""What a rank holds: against torch's own ways to cut a tensor up; and regions."""

import random
from itertools import product

import pytest
import torch

from mllm_compile.compiler import regions
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import Layout, P, R, S, V
from mllm_compile.compiler.mesh import MeshAxis
from tests.resharding import grid, part

WHOLE = torch.arange(2 * 6 * 8).reshape(2 * 6 * 8)
EXPERT, TENSOR = MeshAxis("expert", 2), MeshAxis("tensor", 2)


def test_a_dim_of_three_factors_divided_on_any_two_of_them() -> None:
    """[2, 6, 8] as one dim: context takes tokens (6), tensor one of the factors."""
    context = MeshAxis("context", 3, "zigzag")
    blocks = [(0, 5), (1, 4), (2, 3)]
    tensor_layouts = {0: S(0, 1, 2), 1: S(0, 2, 2), 2: S(0, 12, 2)}
    for place, (factor, layout), half in product(range(3), tensor_layouts.items(), range(2)):
        value = WHOLE.reshape(2, 6, 8)[:, list(blocks[place])].chunk(2, factor)[half]
        held = Holding.of([96], (S(0, 2, 6), layout), (context, TENSOR), (place, half))
        assert part(WHOLE, held.region).tolist() == value.flatten().tolist()
        assert held.shape == (16,)


def test_three_axes_divide_one_factor_one_inside_the_other() -> None:
    axes = (EXPERT, MeshAxis("context", 2), TENSOR)
    for places in product(range(2), repeat=3):
        held = Holding.of([8, 3], (S(0, 1, 2), S(0, 1, 8), S(0, 1, 2)), axes, places)
        at = 4 * places[0] + 2 * places[1] + places[2]
        assert held.region == (((at, at + 1),), ((0, 3),))


def test_uneven_tokens_with_a_divided_factor_outside() -> None:
    """[4, 5]: expert takes the first factor, context 3 and 2 of the second."""
    for expert, context in product(range(2), range(2)):
        axes = (EXPERT, MeshAxis("context", 2))
        held = Holding.of([20], (S(0, 1, 2), S(0, 4, 5)), axes, (expert, context))
        tokens = WHOLE[:20].reshape(4, 5).chunk(2)[expert][:, [slice(0, 3), slice(3, 5)][context]]
        assert part(WHOLE, held.region).tolist() == tokens.flatten().tolist()


def test_fewer_tokens_than_ranks_and_none() -> None:
    axis = MeshAxis("context", 3)
    shapes = [Holding.of([2, n], (S(1, 1, n),), (axis,), (2,)).shape for n in (0, 2, 3)]
    assert shapes == [(2, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ((R, V), "layout V of a value .* expected R, or S"),
        ((P, R), "layout P"),
        ((S(1, 1, 2), R), r"layout S\(1,1,2\) of a value of shape \[96\]"),
        ((S(0, 1, 7), R), "expected a multiple of 7"),
        ((S(0, 1, 6), S(0, 2, 2)), r"layout S\(0,2,2\) behind S\(0,1,6\): expected factors"),
        ((S(0, 1, 96), S(0, 32, 3)), "factors that do not cross"),
        ((S(0, 1, 6), S(0, 1, 3)), "expected a multiple of 3 elements .* got 32"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layouts: tuple[Layout, Layout], message: str) -> None:
    axes = (MeshAxis("context", 3), MeshAxis("tensor", 3))
    with pytest.raises(PlanError, match=message):
        Holding.of([96], layouts, axes, (0, 0))


@pytest.mark.parametrize("region", ["0:2,1:3", "2:2", "3:1"])
def test_holdings_have_every_index_once(region: str) -> None:
    pairs = tuple(tuple(map(int, pair.split(":"))) for pair in region.split(","))
    with pytest.raises(PlanError, match="every index once"):
        Holding((pairs,))  # type: ignore[arg-type]


def test_lanes_of_a_value_with_a_factor_outside_of_the_samples() -> None:
    """[2 experts, tokens] as one dim: each lane's tokens lie behind each expert."""
    whole = torch.arange(2 * 5)
    lanes = [whole.reshape(2, 5)[:, :3].flatten(), whole.reshape(2, 5)[:, 3:].flatten()]
    for lane, (rows, offset) in enumerate(((3, 0), (2, 3))):
        held = Holding.whole([2 * rows]).within(0, 2, rows, offset, 5)
        assert part(whole, held.region).tolist() == lanes[lane].tolist()
    assert Holding.whole([0, 3]).within(0, 2, 0, 3, 5).size == 0


def test_a_rank_holds_nothing_that_another_part_of_its_axis_holds() -> None:
    mesh = grid(tensor=2, context=2, data=1, split="zigzag")
    parts = [
        Holding.of([10, 4], (S(0, 1, 10), S(1, 1, 2)), mesh.axes, places)
        for places in product(range(2), repeat=2)
    ]
    found = [bits for bits, _ in regions.cells([held.region for held in parts], 15)]
    assert sorted(found) == [1, 2, 4, 8]


def test_taking_and_locating_are_inverse() -> None:
    choose = random.Random(1)
    for _ in range(300):
        edges = sorted(choose.sample(range(30), 8))
        indices = tuple(zip(edges[::2], edges[1::2], strict=True))
        indices = tuple(choose.sample(indices, 4))
        everything = [i for start, stop in indices for i in range(start, stop)]
        cut = sorted(choose.sample(range(len(everything) + 1), 2))
        positions = regions.interval(*cut)
        taken = regions.take(indices, positions)
        assert [i for a, b in taken for i in range(a, b)] == everything[slice(*cut)]
        assert regions.locate(indices, taken) == positions


def test_positions_outside_are_refused() -> None:
    with pytest.raises(PlanError, match=r"region: expected positions within 3, got \[2:4\]"):
        regions.take(((5, 8),), ((2, 4),))
