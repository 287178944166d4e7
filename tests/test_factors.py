"""The notation of operator rules, and the strategies that follow from it."""

import pytest

from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.layout import P, R, S, V
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.factors import parse
from mllm_compile.passes.sharding.strategies import Gradients, layouts, strategies

TENSOR, CONTEXT = MeshAxis("tensor", 2), MeshAxis("context", 4)
ADDMM = "+n, m k, k n -> m n | 0+1; 0+2"
SHAPES = ((6,), (4, 8), (8, 6)), ((4, 6),)


def flags(inputs, results=1, gradient=True):
    return Gradients((gradient,) * inputs, (gradient,) * results)


def by_name(found):
    return {strategy.name: (strategy.inputs, strategy.outputs) for strategy in found}


def test_a_rule_names_the_dims_of_arguments_and_results():
    factors = parse(ADDMM, *SHAPES)
    assert factors.inputs == ((("n",),), (("m",), ("k",)), (("k",), ("n",)))
    assert factors.results == ((("m",), ("n",)),)
    assert dict(factors.sizes) == {"n": 6, "m": 4, "k": 8}
    assert factors.additive == {0}
    assert factors.linear == ({0, 1}, {0, 2})


def test_composed_dims_are_solved_and_dims_of_size_one_have_no_factor():
    text = "b (g r) s d!, b g t! d!, b (g r) s t! -> b (g r) s, b"
    shapes = ((1, 8, 5, 3), (1, 2, 7, 3), (1, 1, 1, 7)), ((1, 8, 5), (1,))
    factors = parse(text, *shapes)
    assert dict(factors.sizes) == {"g": 2, "r": 4, "s": 5, "d": 3, "t": 7}
    assert factors.inputs[2] == ((), (), (), ("t",))
    assert factors.results == (((), ("g", "r"), ("s",)), ((),))
    assert factors.whole == {"d", "t"}
    one_group = parse("(g r), g -> (g r)", ((4,), (1,)), ((4,),))
    assert dict(one_group.sizes) == {"r": 4}


def test_dots_align_to_the_right_as_broadcasting_does():
    factors = parse("..., ... -> ...", ((5, 3), (2, 5, 1)), ((2, 5, 3),))
    assert factors.inputs[0] == factors.results[0][1:]
    assert factors.inputs[1] == (*factors.results[0][:2], ())
    assert parse("..., ... -> ...", ((), (2,)), ((2,),)).inputs[0] == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("m k k n -> m n", "2 arguments"),
        ("m k, k n", "one arrow"),
        ("m k, k n -> m n -> m", "one arrow"),
        ("m k, k n -> m n, m", "1 results"),
        ("m k, k -> m n", "1 dims in 'k'"),
        ("m k, k n -> k n", "k 8"),
        ("m (a b), (a b) n -> m n", r"none of \['a', 'b'\]"),
        ("m k?, k n -> m n", "names"),
        ("m k, k n -> m n | 0-1", "groups of argument numbers"),
        ("m k, k n -> m n | 2", "groups of the 2 arguments"),
    ],
)
def test_text_outside_the_notation_is_refused(text, expected):
    with pytest.raises(PlanError, match=expected):
        parse(text, ((4, 8), (8, 6)), ((4, 6),))


def test_factors_are_cut_into_parts():
    factors = parse("m k!, k! n -> m n", ((12, 8), (8, 6)), ((12, 6),)).cut({"m": (6, 2)})
    assert factors.results == ((("m.0", "m.1", "m.2"), ("n",)),)
    assert dict(factors.sizes) == {"m.0": 2, "m.1": 3, "m.2": 2, "k": 8, "n": 6}
    assert factors.whole == {"k"}


def test_strategies_follow_from_the_rule():
    found = by_name(strategies(parse(ADDMM, *SHAPES), TENSOR, flags(3)))
    assert found["whole"] == ((R, R, R), (R,))
    assert found["whole/V"] == ((V, V, V), (V,))
    assert found["m"] == ((V, S(0, 1, 2), V), (S(0, 1, 2),))
    assert found["n"] == ((S(0, 1, 2), V, S(1, 1, 2)), (S(1, 1, 2),))
    assert found["k"] == ((P, S(1, 1, 2), S(0, 1, 2)), (P,))
    assert len(found) == 6  # two linear ones, of one name


def test_without_gradient_there_is_no_v():
    found = strategies(parse(ADDMM, *SHAPES), TENSOR, flags(3, gradient=False))
    assert {layout for s in found for layout in (*s.inputs, *s.outputs) if layout == V} == set()
    assert len({s.name for s in found}) == 5


def test_an_operator_without_a_rule_is_whole():
    assert {s.name for s in strategies(None, TENSOR, flags(2))} == {"whole", "whole/V"}


def test_equal_regions_are_equal_layouts():
    """On even axes the size of a layout is the axis', on the context axis that of the factor."""
    flat = parse("(b s) -> b s", ((24,),), ((4, 6),))
    even = by_name(strategies(flat, TENSOR, flags(1)))
    assert even["b"] == ((S(0, 1, 2),), (S(0, 1, 2),))
    assert even["s"] == ((S(0, 4, 2),), (S(1, 1, 2),))
    assert by_name(strategies(flat, CONTEXT, flags(1)))["s"] == ((S(0, 4, 6),), (S(1, 1, 6),))


def test_what_does_not_divide_evenly_is_left_to_the_context_axis():
    odd = parse("m -> m", ((5,),), ((5,),))
    assert "m" not in by_name(strategies(odd, TENSOR, flags(1)))
    assert "m" in by_name(strategies(odd, CONTEXT, flags(1)))
    whole = parse("m! -> m!", ((4,),), ((4,),))
    assert "m" not in by_name(strategies(whole, CONTEXT, flags(1)))


def test_axes_nest_only_where_every_rank_divides_evenly():
    def nested(length, outer):
        factors = parse("m -> m", ((length,),), ((length,),))
        taken = Strategy("m", (), ())
        return "m" in by_name(strategies(factors, TENSOR, flags(1), [(outer, taken)]))

    assert nested(8, MeshAxis("context", 4))
    assert not nested(12, MeshAxis("context", 4))
    assert not nested(10, MeshAxis("context", 2, "zigzag"))


def test_a_special_factor_is_divided_once_and_evenly():
    table = parse("v* h, n -> n h", ((8, 4), (3,)), ((3, 4),))
    (special,) = [s for s in strategies(table, TENSOR, flags(2)) if s.special]
    assert (special.name, special.inputs[0], special.outputs) == ("v", S(0, 1, 2), (P,))
    assert not [s for s in strategies(table, CONTEXT, flags(2)) if s.special]
    again = strategies(table, TENSOR, flags(2), [(MeshAxis("expert", 2), special)])
    assert not [s for s in again if s.special]


def test_the_layouts_of_a_parameter_are_those_of_its_parts():
    parts = ((2, 3, 4), (5,))
    assert layouts(parts, TENSOR, True) == (R, V, S(0, 1, 2), S(0, 6, 2))
    assert layouts(parts, TENSOR, False) == (R, S(0, 1, 2), S(0, 6, 2))
    outer = [(MeshAxis("expert", 2), S(0, 1, 2))]
    assert layouts(parts, TENSOR, True, outer) == (R, V, S(0, 6, 2))
    assert S(1, 1, 5) in layouts(parts, CONTEXT, True)
