"""Layouts, splits and meshes: their laws, and what they refuse."""

from itertools import product

import pytest

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.layout import Layout, P, R, S, V, adjoint
from mllm_compile.compiler.mesh import Mesh
from mllm_compile.compiler.request import ModuleSpec, Parallel
from mllm_compile.compiler.split import Split

LAYOUTS = (R, V, P, S(1, 2, 8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dual_is_an_involution_and_text_round_trips(layout: Layout) -> None:
    assert layout.dual.dual == layout
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(("have", "want"), product(LAYOUTS, LAYOUTS))
def test_adjoint_of_an_adjoint_is_the_conversion(have: Layout, want: Layout) -> None:
    assert adjoint(*adjoint(have, want)) == (have, want)


def test_replicated_and_varying_values_differ_in_their_gradients_alone() -> None:
    assert (R.dual, V.dual, P.dual) == (R, P, V)


@pytest.mark.parametrize("text", ["Q", "S(1)", "S(-1,1,1)", "S(0,0,4)", ""])
def test_bad_layouts_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="layout"):
        Layout.parse(text) if text != "S(0,0,4)" else S(0, 0, 4)


@pytest.mark.parametrize(("length", "ranks"), product(range(12), range(1, 6)))
def test_splits_cover_everything_once(length: int, ranks: int) -> None:
    for split in (Split.contiguous(length, ranks), Split.zigzag(length, ranks)):
        held = [i for part in split.parts for a, b in part for i in range(a, b)]
        assert sorted(held) == list(range(length))
        assert split.ranks == ranks
        assert split.length == length
        assert Split.parse(str(split)) == split
        assert max(split.sizes) - min(split.sizes) <= 2


def test_zigzag_pairs_early_with_late_blocks() -> None:
    assert str(Split.zigzag(16, 2)) == "0:4,12:16|4:12"


@pytest.mark.parametrize("text", ["0:2|1:3", "0:2|3:4", "0:2,0:2"])
def test_splits_that_lose_or_repeat_elements_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="exactly one rank"):
        Split.parse(text)


def test_mesh_has_tensor_fastest_and_pipeline_slowest() -> None:
    spec = ModuleSpec(
        ("m",), tuple(range(4, 20)), Parallel(tensor=2, context=2, data=2, pipeline=2)
    )
    mesh = Mesh.of(spec, 1)
    assert mesh.ranks == tuple(range(12, 20))
    assert mesh.group(12, "tensor") == (12, 13)
    assert mesh.group(12, "context") == (12, 14)
    assert mesh.group(12, "data") == (12, 16)
    assert mesh.group(13, "context", "data") == (13, 15, 17, 19)
    assert mesh.lanes() == ((12, 13, 14, 15), (16, 17, 18, 19))
    assert [(axis.name, axis.size) for axis in mesh.axes] == [("context", 2), ("tensor", 2)]


@pytest.mark.parametrize(
    ("tensor", "data", "groups"),
    [(2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]), (4, 2, [(0, 1, 2, 3), (4, 5, 6, 7)])],
)
def test_tensor_groups_as_tabulated(tensor: int, data: int, groups: list[tuple[int, ...]]) -> None:
    mesh = Mesh.of(ModuleSpec(("m",), tuple(range(8)), Parallel(tensor=tensor, data=data)), 0)
    assert sorted({mesh.group(rank, "tensor") for rank in range(8)}) == groups


def test_a_mesh_that_does_not_fill_its_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="mesh"):
        Mesh((0, 1, 2), (1, 1, 1, 2))
