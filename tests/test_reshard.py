"""Boundaries between any two layouts: every element once, nothing else; the adjoint likewise."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.holding import Holding
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.reshard import Move, check_moves, reshard
from tests.resharding import (
    carry_out,
    grid,
    held,
    inbound,
    least_inbound,
    local,
    meshes,
    outbound,
)

Side = tuple[Mesh, str]


def check_both_ways(source: Side, target: Side, rows: Sequence[int], rest: Sequence[int]) -> None:
    """Forward and backward on real tensors, against cutting the whole value up directly."""
    shape = (sum(rows), *rest)
    value = torch.arange(math.prod(shape)).double().reshape(shape)
    holdings = [held(mesh, rows, rest, layouts) for mesh, layouts in (source, target)]
    tensors = [
        {rank: local(value, mesh, rank, rows, layouts) for rank in mesh.ranks}
        for mesh, layouts in (source, target)
    ]
    for here, there in ((0, 1), (1, 0)):
        moves = reshard("x", holdings[here], holdings[there])
        shapes = {rank: tensor.shape for rank, tensor in tensors[there].items()}
        assert shapes == {rank: torch.Size(h.shape) for rank, h in holdings[there].items()}
        for rank, tensor in carry_out(moves, tensors[here], shapes).items():
            torch.testing.assert_close(tensor, tensors[there][rank], rtol=0, atol=0)
            least = least_inbound(tensors[here], tensors[there], rank)
            assert inbound(moves).get(rank, 0) == least


def test_all_pairs_of_data_sizes_with_ragged_and_empty_samples() -> None:
    rows = [3, 0, 5, 1, 0, 0, 7, 2, 4, 1]
    for sizes in product(range(1, 9), repeat=2):
        for first in (0, 4, 8):
            source, target = grid(data=sizes[0]), grid(data=sizes[1], first=first)
            check_both_ways((source, ""), (target, ""), rows, [2])


LAYOUTS = {0: [""], 1: ["R", "r", "s", "h"], 2: ["ss", "sh", "hs", "Rs", "sR", "RR", "hh"]}


def test_pairs_of_tensor_context_and_data_on_any_ranks() -> None:
    choose = random.Random(0)
    rows = [8, 0, 24, 16, 8, 0]
    for source, other in product(meshes((1, 2, 4)), repeat=2):
        if choose.random() > 0.2:
            continue
        sizes = {name: other.size(name) for name in ("tensor", "context", "data")}
        first = choose.choice((0, len(source.ranks) // 2, len(source.ranks)))
        target = grid(**sizes, first=first, split=choose.choice(("contiguous", "zigzag")))
        sides = [(mesh, choose.choice(LAYOUTS[len(mesh.axes)])) for mesh in (source, target)]
        check_both_ways(sides[0], sides[1], rows, [32, 16])


@pytest.mark.parametrize("split", ["contiguous", "zigzag"])
@pytest.mark.parametrize("tokens", [0, 1, 5, 15])
def test_uneven_tokens(split: str, tokens: int) -> None:
    for context in (2, 3, 4):
        divided = grid(context=context, split=split)
        check_both_ways((grid(data=2, first=2), ""), (divided, "s"), [1, 2], [tokens, 3])
        check_both_ways((grid(tensor=4), "R"), (divided, "s"), [1, 2], [tokens, 3])


def test_one_dim_divided_by_context_and_then_by_tensor() -> None:
    nested = grid(tensor=2, context=2, split="zigzag")
    check_both_ways((grid(data=3), ""), (nested, "rr"), [8, 8, 8], [3])
    check_both_ways((grid(tensor=4), "h"), (nested, "ss"), [2, 1, 0], [16, 4])


def test_replicas_send_equal_shares() -> None:
    for source, target in product((1, 2, 3, 4, 8), (1, 2, 3, 5, 8)):
        sides = [grid(tensor=source), grid(tensor=target, first=8)]
        holdings = [held(mesh, [840], [4], "R" * len(mesh.axes)) for mesh in sides]
        sent = outbound(reshard("x", *holdings))
        assert set(sent.values()) == {840 * 4 * target // source}


def test_a_number_moves_once_to_every_rank() -> None:
    sources, targets = (
        {rank: Holding.whole(()) for rank in ranks} for ranks in ((0, 1, 2), (2, 3, 4))
    )
    moves = reshard("x", sources, targets)
    assert [(move.source, move.target) for move in moves] == [(0, 3), (1, 4), (2, 2)]
    got = carry_out(
        moves, dict.fromkeys(sources, torch.tensor(7.0).double()), dict.fromkeys(targets, ())
    )
    assert all(float(number) == 7 for number in got.values())


def test_a_quarter_of_the_bytes_of_a_leader_and_a_broadcast() -> None:
    """Encoder 1x4 -> LLM 4x1 whose tensor ranks divide the value: a leader bridge brings in 16A."""
    rows = [577] * 4
    sources, targets = held(grid(data=4), rows, [8], ""), held(grid(4, first=4), rows, [8], "s")
    activation = 577 * 8
    assert sum(inbound(reshard("x", sources, targets)).values()) == 4 * activation
    assert set(inbound(reshard("x", sources, targets)).values()) == {activation}
    assert sum(inbound(reshard("x", targets, sources)).values()) == 4 * activation


@pytest.mark.parametrize(
    ("source", "target", "arrives", "returns"),
    [
        ((1, 4), (2, 2), 2, 1),  # a leader bridge: 2A and a broadcast of it
        ((1, 4), (4, 1), 4, 1),
        ((2, 2), (4, 1), 4, 2),
        ((4, 1), (1, 4), 1, 4),
    ],
)
def test_bridges_without_a_leader(
    source: tuple[int, int], target: tuple[int, int], arrives: int, returns: int
) -> None:
    """(tensor, data) on other ranks, replicated over tensor: bytes per rank, in samples of four."""
    rows = [6] * 4
    meshes = [grid(source[0], 1, source[1]), grid(target[0], 1, target[1], first=4)]
    there = [held(mesh, rows, [], "R" * len(mesh.axes)) for mesh in meshes]
    assert set(inbound(reshard("x", there[0], there[1])).values()) == {6 * arrives}
    assert set(inbound(reshard("x", there[1], there[0])).values()) == {6 * returns}


@pytest.mark.parametrize("dim", [0, 1])
def test_fan_in_on_the_same_ranks_gathers_and_returns_without_a_message(dim: int) -> None:
    """Tensor 2, data 4 -> tensor 4, data 2; samples lie along ``dim``."""
    wide, narrow = grid(2, 1, 4), grid(4, 1, 2)
    value = (
        torch.arange(8 * 3).double().reshape(8, 3)
        if dim == 0
        else torch.arange(24.0).double().reshape(3, 8)
    )

    def holdings(mesh: Mesh) -> dict[int, Holding]:
        lanes = mesh.size("data")
        shape = [8 // lanes if at == dim else 3 for at in range(2)]
        return {
            rank: Holding.whole(shape).within(dim, 1, 8 // lanes, mesh.lane(rank) * 8 // lanes, 8)
            for rank in mesh.ranks
        }

    slices = {rank: value.chunk(4, dim)[wide.lane(rank)] for rank in range(8)}
    moves = reshard("x", holdings(wide), holdings(narrow))
    shapes = {rank: value.chunk(2, dim)[0].shape for rank in range(8)}
    for rank, made in carry_out(moves, slices, shapes).items():
        assert torch.equal(made, value.chunk(2, dim)[narrow.lane(rank)])
    assert inbound(moves) == dict.fromkeys(range(8), 6)  # half of what each rank needs
    assert inbound(reshard("dx", holdings(narrow), holdings(wide))) == {}


def test_fan_out_on_the_same_ranks_slices_and_gathers_the_gradients_of_siblings() -> None:
    """Gradients of ones, twos, … of the siblings come back as blocks in their order."""
    narrow, wide = (held(grid(8 // lanes, 1, lanes), [1] * 8, [3], "R") for lanes in (2, 4))
    assert inbound(reshard("x", narrow, wide)) == {}
    lane = grid(2, 1, 4).lane
    gradients = {rank: torch.full((2, 3), lane(rank) + 1.0).double() for rank in range(8)}
    made = carry_out(reshard("dx", wide, narrow), gradients, dict.fromkeys(range(8), (4, 3)))
    assert [made[0][:, 0].tolist(), made[7][:, 0].tolist()] == [[1, 1, 2, 2], [3, 3, 4, 4]]


def test_equal_layouts_move_nothing_between_ranks() -> None:
    same = held(grid(2, 2, 2), [4] * 4, [8], "rs")
    assert inbound(reshard("x", same, same)) == {}


def test_fan_in_of_four_images_and_back() -> None:
    one, four = held(grid(first=4), [577] * 4, [5], ""), held(grid(data=4), [577] * 4, [5], "")
    regions = [move.target_region[0] for move in reshard("x", four, one)]
    assert regions == [((577 * i, 577 * (i + 1)),) for i in range(4)]
    assert [move.target for move in reshard("x", one, four)] == [0, 1, 2, 3]


def test_elements_that_no_rank_holds_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"value x: rank 1: expected ranks that hold it, .*\[4:6\]"):
        reshard("x", {0: Holding.whole((4,))}, {1: Holding.whole((6,))})


def broken(change: Callable[[Move], list[Move]]) -> list[Move]:
    """The moves of [8] from two lanes to one rank; the second of them changed."""
    moves = reshard("x", *two_lanes_to_one())
    return [moves[0], *change(moves[1])]


def two_lanes_to_one() -> tuple[dict[int, Holding], dict[int, Holding]]:
    lanes = {rank: Holding(((((0, 5),), ((5, 8),))[rank],)) for rank in range(2)}
    return lanes, {2: Holding.whole((8,))}


def test_moves_as_planned_pass_the_check() -> None:
    check_moves(*two_lanes_to_one(), broken(lambda move: [move]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda move: [], r"rank 2, elements \[5:8\]: .* once, got nothing"),
        (
            lambda move: [replace(move, source_region=(((0, 2),),), target_region=(((5, 7),),))],
            r"rank 2, elements \[7:8\]: .*got nothing",
        ),
        (lambda move: [move, move], r"elements \[5:8\]: .*got it 2 times, from ranks \[1, 1\]"),
        (
            lambda move: [replace(move, source_region=(((1, 3), (0, 1)),))],
            r"rank 1 -> rank 2: expected elements \[5:8\], got \[6:8,5:6\]",
        ),
        (
            lambda move: [replace(move, source_region=(((0, 4),),))],
            r"rank 1, region \[0:4\]: expected a part",
        ),
        (
            lambda move: [replace(move, source_region=(((0, 2), (1, 2)),))],
            r"rank 1, region \[0:2,1:2\]: expected a part",
        ),
        (lambda move: [replace(move, source=7)], r"rank 7, region"),
    ],
)
def test_wrong_moves_are_found(change: Callable[[Move], list[Move]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_moves(*two_lanes_to_one(), broken(change))
