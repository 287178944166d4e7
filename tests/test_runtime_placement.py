"""Which ranks hold which part of a parameter, and whose gradients add up."""

import pytest
import torch

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.layout import P, R, S, V
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.runtime.pieces import is_whole, pack, unpack
from mllm_compile.runtime.placement import Placement

# Two data lanes of context 2 x tensor 2.
WIDE = Mesh(tuple(range(8)), (2, 1, 2, 2))


def test_v_axes_and_lanes_add_up_parts_do_not() -> None:
    placed = Placement.of((4, 6), [(WIDE, (V, S(1, 1, 2)))])
    assert placed.sums == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert placed.divided
    assert placed.first == {0, 1}
    assert placed.group(6) == (0, 2, 4, 6)
    assert placed.held[5].region == (((0, 4),), ((3, 6),))


def test_copies_on_an_r_axis_have_the_whole_gradient_already() -> None:
    placed = Placement.of((3,), [(WIDE, (V, R))])
    assert placed.sums == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert not placed.divided
    assert placed.first == {0}
    assert Placement.of((3,), [(WIDE, (R, R))]).sums == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Placement.of((3,), [(WIDE, (V, R))], summed=False).sums == ()


def test_stages_that_share_a_parameter_add_up_too() -> None:
    one, two = Mesh((0, 1), (1, 1, 1, 2)), Mesh((2, 3), (1, 1, 1, 2))
    placed = Placement.of((4,), [(one, (S(0, 1, 2),)), (two, (S(0, 1, 2),))])
    assert placed.sums == ((0, 2), (1, 3))
    on_one_rank = Placement.of((4,), [(one, (R,)), (one, (R,))])
    assert on_one_rank.sums == ()
    assert Placement.replicated((4,), (3, 1)).sums == ((1, 3),)


def test_placements_that_cannot_be_are_refused() -> None:
    one, two = Mesh((0, 1), (1, 1, 1, 2)), Mesh((1, 2), (1, 1, 1, 2))
    with pytest.raises(PlanError, match=r"rank 1: expected one layout in all of its stages"):
        Placement.of((4,), [(one, (S(0, 1, 2),)), (two, (S(0, 1, 2),))])
    with pytest.raises(PlanError, match="layout P"):
        Placement.of((4,), [(one, (P,))])
    whole, half = Holding.whole((4,)), Holding((((0, 2),),))
    with pytest.raises(PlanError, match=r"expected parts with the 4 elements of \[4\], got 6"):
        Placement((4,), {0: whole, 1: half})
    with pytest.raises(PlanError, match="a rank in one sum at most"):
        Placement((4,), {0: whole, 1: whole}, ((0, 1), (1,)))
    with pytest.raises(PlanError, match="the same part on ranks"):
        Placement((4,), {0: half, 1: Holding((((2, 4),),))}, ((0, 1),))


def test_parts_and_the_whole() -> None:
    whole = torch.arange(48.0).view(8, 6)
    zigzag = Holding((((0, 2), (6, 8)), ((0, 1), (4, 6))))
    rest = [Holding((((2, 6),), ((0, 6),))), Holding((((0, 2), (6, 8)), ((1, 4),)))]
    placed = Placement((8, 6), dict(enumerate([zigzag, *rest])))
    parts = {rank: placed.part(whole, rank) for rank in placed.held}
    assert parts[0].tolist() == whole[[0, 1, 6, 7]][:, [0, 4, 5]].tolist()
    assert torch.equal(placed.whole(parts), whole)


def test_regions_are_packed_in_the_order_in_which_they_are_listed() -> None:
    x = torch.arange(12.0).view(3, 4)
    region = (((2, 3), (0, 1)), ((1, 3),))
    packed = pack(x, region)
    assert packed.tolist() == [[9.0, 10.0], [1.0, 2.0]]
    back = torch.zeros(3, 4)
    unpack(packed, back, region)
    assert back.tolist() == [[0, 1, 2, 0], [0, 0, 0, 0], [0, 9, 10, 0]]
    assert pack(torch.tensor(3.0), ()).tolist() == 3.0


def test_what_is_whole_and_contiguous_is_not_copied() -> None:
    x = torch.arange(12.0).view(3, 4)
    region = Holding.whole(x.shape).region
    assert is_whole(region, x)
    assert pack(x, region).data_ptr() == x.data_ptr()
    rows = (((1, 3),), ((0, 4),))
    assert not is_whole(rows, x)
    assert pack(x, rows).data_ptr() == x[1:].data_ptr()
    assert pack(x.t(), region[::-1]).is_contiguous()
    lazy = torch.tensor([1 + 2j]).conj().expand(3)
    assert pack(lazy, (((0, 3),),)).tolist() == [1 - 2j] * 3
    assert not pack(lazy, (((0, 3),),)).is_conj()


def test_stages_with_unequally_many_gradients_of_a_part_are_refused():
    """One stage has the same gradient twice (R), the other once: no sum would be right for all."""
    wide, alone = Mesh((0, 1), (1, 1, 1, 2)), Mesh((0,), (1, 1, 1, 1))
    with pytest.raises(PlanError, match="as many gradients of a part in every stage"):
        Placement.of((4,), [(wide, (R,)), (alone, ())])
    assert Placement.of((4,), [(wide, (V,)), (alone, ())]).sums == ((0, 1),)
    assert Placement.of((4,), [(wide, (R,)), (alone, ())], summed=False).sums == ()
