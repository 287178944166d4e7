"""Values that two axes divide: local shapes and every change of layouts, against plain indexing."""

import itertools

import pytest
import torch

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.layout import Layout, P, R, S, V
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.passes.lower.conversions import path
from mllm_compile.passes.lower.local_graph import LocalGraph, Value
from mllm_compile.passes.lower.local_values import LocalRank
from tests.localized import assembled, shard
from tests.thread_ranks import run_ranks

# Rows are (4 samples, 8 tokens); either axis divides tokens or columns, or both do.
SHAPE = (32, 8)
CONTEXT = (R, V, P, S(0, 4, 8), S(1, 1, 8))
TENSOR = (R, V, P, S(0, 4, 2), S(0, 1, 2), S(1, 1, 2))
STATES = list(itertools.product(CONTEXT, TENSOR))


def axes_of(split="contiguous"):
    return (MeshAxis("context", 2, split), MeshAxis("tensor", 2))


def local(dense, layouts, axes, places, seed):
    """One rank's form of a dense tensor; partial sums have random summands."""
    generator = torch.Generator().manual_seed(seed)
    for axis, layout in zip(axes, layouts, strict=True):
        if layout == P:
            noise = torch.randn(dense.shape, generator=generator, dtype=dense.dtype)
            dense = noise if places[axis.name] == 0 else dense - noise
    return shard(dense, layouts, axes, places)


def check(parts, layouts, axes, places, dense):
    sums = tuple(V if layout == P else R if layout == V else layout for layout in layouts)
    got = assembled(parts, sums, axes, places, tuple(dense.shape))
    torch.testing.assert_close(got, dense, rtol=1e-12, atol=1e-12)
    for part, where in zip(parts, places, strict=True):
        if P not in layouts:
            expected = shard(dense, layouts, axes, where)
            torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def converted(have, want, axes, places):
    """A function of the local tensor, and the node that it ends in."""
    rank = LocalRank.of(axes, places)
    graph = LocalGraph(rank)
    value = Value("x", SHAPE, True, {"val": torch.empty(SHAPE, dtype=torch.float64)})
    graph.placeholder(value, have)
    made = graph.form(value, want, {})
    graph.graph.output(made)
    return torch.fx.GraphModule({}, graph.graph)


@pytest.mark.parametrize(
    ("split", "wants"), [("contiguous", STATES[::3]), ("zigzag", STATES[1::3])]
)
@pytest.mark.parametrize("have", STATES, ids=str)
def test_changes_and_their_adjoints(have, split, wants):
    torch.manual_seed(0)
    axes = axes_of(split)
    dense, cotangent = torch.randn(2, *SHAPE, dtype=torch.float64)

    def body(places):
        found = []
        for want in wants:
            x = local(dense, have, axes, places, 1).requires_grad_()
            y = converted(have, want, axes, places)(x)
            dual = tuple(layout.dual for layout in want)
            y.backward(local(cotangent, dual, axes, places, 2))
            found.append((y.detach(), x.grad))
        return places, found

    results, logs = run_ranks({axis.name: axis.size for axis in axes}, body)
    places = [where for where, _ in results]
    for at, want in enumerate(wants):
        check([found[at][0] for _, found in results], want, axes, places, dense)
        dual = tuple(layout.dual for layout in have)
        check([found[at][1] for _, found in results], dual, axes, places, cotangent)
    assert len({tuple(what for _, what, _ in log) for log in logs}) == 1


def test_the_inner_axis_steps_aside():
    """Tokens of the context axis cannot be gathered while the tensor axis divides them again."""
    have, want = (S(0, 4, 8), S(0, 4, 2)), (R, S(0, 4, 2))
    _, steps = path(have, want, SHAPE, axes_of(), True)
    assert [(at, str(after[at])) for at, _, after in steps] == [
        (1, "R"),
        (0, "R"),
        (1, "S(0,4,2)"),
    ]
    _, alone = path((S(0, 4, 8), S(1, 1, 2)), (R, S(1, 1, 2)), SHAPE, axes_of(), True)
    assert len(alone) == 1


def test_what_moves_least_comes_first():
    """A partial sum is added up while it is small: sliced before, gathered after."""
    _, steps = path((P, R), (R, S(0, 1, 2)), SHAPE, axes_of(), False)
    assert [at for at, _, _ in steps] == [1, 0]
    _, steps = path((P, S(0, 1, 2)), (R, R), SHAPE, axes_of(), False)
    assert [at for at, _, _ in steps] == [0, 1]


def test_forms_are_shared_and_taken_from_the_nearest():
    """One all-reduce serves readers of R and of V; without gradient they are the same."""
    axes = axes_of()
    graph = LocalGraph(LocalRank.of(axes, {"context": 0, "tensor": 0}))
    meta = {"val": torch.empty(SHAPE)}
    value = Value("x", SHAPE, True, meta)
    graph.placeholder(value, (P, R))
    whole = graph.form(value, (R, R), {})
    assert graph.form(value, (R, R), {}) is whole
    varying = graph.form(value, (V, R), {})
    assert varying.args[0] is whole
    assert varying.args[1:3] == ("R", "V")
    plain = Value("y", SHAPE, False, meta)
    graph.placeholder(plain, (P, R))
    assert graph.form(plain, (R, R), {}) is graph.form(plain, (V, R), {})


@pytest.mark.parametrize(
    ("at", "layouts", "layout", "expected"),
    [
        (0, (R, S(0, 1, 2)), S(0, 4, 8), "S(0,2,8)"),
        (1, (S(0, 4, 8), R), S(0, 4, 2), "S(0,4,2)"),
        (1, (S(0, 1, 4), R), S(0, 4, 2), "S(0,2,2)"),
        (1, (S(0, 4, 8), R), S(0, 1, 2), "S(0,1,2)"),
    ],
)
def test_outer_counts_what_is_here(at, layouts, layout, expected):
    rank = LocalRank.of(axes_of(), {"context": 0, "tensor": 0})
    assert rank.division(SHAPE, layouts, at, layout)[0] == expected


def test_lengths_that_do_not_divide_are_refused():
    rank = LocalRank.of(axes_of(), {"context": 0, "tensor": 0})
    with pytest.raises(PlanError, match="tensor"):
        rank.division((5, 8), (R, R), 1, Layout("S", 0, 1, 2))
