"""Layouts that Megatron-LM (arXiv 2605.27678) and Cornstarch (arXiv 2503.11367) test or refuse.

Grids come out as in their tables, up to the order of data and pipeline ranks; what those systems
refuse (sizes that do not divide, context or pipeline on either side of shared ranks, partly
overlapping ranks) is legal here and gives the plain model's loss and gradients.
"""

import pytest

from mllm_compile.compiler.errors import RequestError
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import ModuleSpec, Parallel, Request
from mllm_compile.verify import verify
from tests.parity import assert_passed, workload_of

ENCODER = ("model.vision_tower", "model.multi_modal_projector")
DECODER = ("model.language_model", "lm_head")


def mesh(first: int, count: int, **sizes: int) -> Mesh:
    ranks = tuple(range(first, first + count))
    return Mesh.of(ModuleSpec(("m",), ranks, Parallel(**sizes)), 0)


def groups(grid: Mesh, *axes: str) -> list[tuple[int, ...]]:
    return sorted({grid.group(rank, *axes) for rank in grid.ranks})


def test_places_of_two_layouts_on_the_same_ranks() -> None:
    """T1: tensor 2 x data 4 and tensor 4 x data 2 on ranks 0 to 7, as (data, tensor)."""
    for sizes in ({"tensor": 2, "data": 4}, {"tensor": 4, "data": 2}):
        grid = mesh(0, 8, **sizes)
        places = [(grid.place(rank, "data"), grid.place(rank, "tensor")) for rank in range(8)]
        assert places == [divmod(rank, sizes["tensor"]) for rank in range(8)]


def test_grids_may_begin_at_any_rank() -> None:
    """T2: ranks 4 to 7; T23: an offset adds to every group."""
    grid = mesh(4, 4, tensor=2, data=2)
    assert groups(grid, "tensor") == [(4, 5), (6, 7)]
    assert groups(grid, "data") == [(4, 6), (5, 7)]


def test_three_axes() -> None:
    """T23: tensor 2, context 2, data 2; the slowest one last."""
    grid = mesh(0, 8, tensor=2, context=2, data=2)
    assert groups(grid, "tensor", "context") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert groups(grid, "data") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_tensor_and_context_groups_of_a_decoder() -> None:
    """C8: an encoder with tensor 2, a decoder with tensor 2 and context 2, on six ranks."""
    assert groups(mesh(0, 2, tensor=2), "tensor") == [(0, 1)]
    grid = mesh(2, 4, tensor=2, context=2)
    assert groups(grid, "tensor") == [(2, 3), (4, 5)]
    assert groups(grid, "context") == [(2, 4), (3, 5)]


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ({"tensor": 3}, 4),  # T26, C10: sizes that do not fill the ranks
        ({"tensor": 2, "data": 2}, 6),
        ({"context": 2}, 3),
    ],
)
def test_ranks_that_the_sizes_do_not_fill_are_refused(sizes: dict[str, int], count: int) -> None:
    with pytest.raises(RequestError, match="the product of its sizes"):
        ModuleSpec(("m",), tuple(range(count)), Parallel(**sizes))


def test_ranks_with_a_gap_are_refused_and_overlapping_ones_are_not() -> None:
    """T27, T29, T39."""
    first = ModuleSpec(("a",), (0, 1, 2, 3), Parallel(tensor=4))
    with pytest.raises(RequestError, match="without a gap"):
        Request((first, ModuleSpec(("b",), (5,))))
    with pytest.raises(RequestError, match="without a gap"):
        Request((ModuleSpec(("b",), (1,)),))
    overlapping = ModuleSpec(("b",), (2, 3, 4, 5), Parallel(tensor=2, pipeline=2))
    assert Request((first, overlapping)).num_ranks == 6


Sizes = dict[str, int]
FAST: list[tuple[str, Sizes, Sizes, int]] = [
    ("T10", {"tensor": 2, "data": 4}, {"tensor": 4, "data": 2}, 0),
    ("T5: data 3 and 2", {"data": 3}, {"data": 2}, 0),
]
SLOW: list[tuple[str, Sizes, Sizes, int]] = [
    ("T10", {"tensor": 4, "data": 2}, {"tensor": 2, "data": 4}, 0),
    ("T5: pipeline", {"tensor": 2, "data": 2}, {"tensor": 2, "pipeline": 2}, 0),
    ("T5: context", {"data": 4}, {"tensor": 2, "context": 2}, 0),
    ("T5: context of the encoder", {"context": 2}, {"data": 2}, 0),
    ("T39: partly overlapping", {"data": 3}, {"tensor": 2, "pipeline": 2}, 2),
    ("T20", {}, {}, 1),
    ("T20", {}, {"pipeline": 3}, 1),
    ("T20", {"tensor": 2}, {"tensor": 2, "pipeline": 3}, 2),
    ("T20", {"tensor": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, 4),
    ("T20", {"tensor": 2, "pipeline": 2}, {"data": 4}, 4),
    ("T20", {"data": 2}, {"pipeline": 3}, 2),
    ("C34", {"tensor": 2}, {"tensor": 2}, 2),
    ("C34", {"tensor": 2, "pipeline": 2}, {"tensor": 2, "pipeline": 2}, 4),
    ("C34", {"context": 2}, {"context": 2}, 2),
    ("C34", {"pipeline": 2, "context": 2}, {"pipeline": 2, "context": 2}, 4),
    ("C34", {"pipeline": 2}, {"context": 2}, 2),
    ("C34", {"tensor": 2, "context": 2}, {"tensor": 2, "context": 2}, 4),
    ("C34", {"tensor": 2, "pipeline": 2}, {"tensor": 2, "context": 2}, 4),
]


def agrees(encoder: Sizes, decoder: Sizes, start: int) -> None:
    """``start``: the decoder's first rank."""
    modules, first = [], 0
    for paths, sizes in ((ENCODER, encoder), (DECODER, decoder)):
        parallel = Parallel(**sizes)
        modules.append(ModuleSpec(paths, tuple(range(first, first + parallel.size)), parallel))
        first = start
    request = Request(tuple(modules), microbatches=2, microbatch_size=4, dtype="float64")
    assert_passed(verify(request, workload_of("llava"), in_process=True))


@pytest.mark.parametrize(("case", "encoder", "decoder", "start"), FAST)
def test_agrees(case: str, encoder: Sizes, decoder: Sizes, start: int) -> None:
    agrees(encoder, decoder, start)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "encoder", "decoder", "start"), SLOW)
def test_more_agree(case: str, encoder: Sizes, decoder: Sizes, start: int) -> None:
    agrees(encoder, decoder, start)
