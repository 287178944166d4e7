"""The interval algebra of mask predicates: which rule an expression over q and k states."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from mllm_compile.kernels.attention.rules import (
    All,
    Below,
    Climbing,
    Either,
    From,
    Kept,
    Ordered,
    Rule,
    Same,
    Where,
    num_pieces,
)
from mllm_compile.kernels.attention.symbolic import KEY, QUERY, OutsideAlgebra
from mllm_compile.kernels.attention.values import denominator

_FIRST = (Where, Below, From, All, Same, Ordered, Climbing, Kept, Either)
MOST_PIECES = 32
"""Beyond which a dense mask is the better answer: every two are compared, query by query."""


@lru_cache(maxsize=1024)
def rule_of(truth: Boolean) -> Rule:
    """The rule that an expression states. OutsideAlgebra where it states none of the above."""
    rule = _rule(sympy.to_nnf(truth, simplify=False))
    if num_pieces(rule) > MOST_PIECES:
        raise OutsideAlgebra(f"{num_pieces(rule)} alternatives")
    return rule


def _rule(truth: Boolean) -> Rule:
    if KEY not in truth.free_symbols:
        return Where(truth)
    if isinstance(truth, sympy.And):
        return _all(map(_rule, _told_by_equals(truth.args)))
    if QUERY not in truth.free_symbols and _look_ups(truth):
        return Kept(truth)
    if isinstance(truth, sympy.Or):
        return _either(sorted(truth.args, key=sympy.default_sort_key))
    if isinstance(truth, sympy.Rel):
        return _relation(truth)
    raise OutsideAlgebra(f"{truth}")


def _all(parts: Iterable[Rule]) -> Rule:
    flat = [x for part in parts for x in (part.parts if isinstance(part, All) else (part,))]
    kept = [part.column for part in flat if isinstance(part, Kept)]
    flat = _climbing_once([part for part in flat if not isinstance(part, Kept)])
    flat += [Kept(sympy.And(*kept))] if kept else []
    flat.sort(key=lambda part: _FIRST.index(type(part)))
    return flat[0] if len(flat) == 1 else All(tuple(flat))


def _climbing_once(parts: list[Rule]) -> list[Rule]:
    """Bounds by the same climbing columns together, with what is ordered by one of them."""
    bodies: dict[Any, list[Rule]] = {}
    columns = {(each,) for part in parts if isinstance(part, Climbing) for each in part.columns}
    ordered = {column: (symbol, column) for ((symbol, column),) in columns}
    rest: list[Rule] = []
    for part in parts:
        if isinstance(part, Ordered) and part.column in ordered:
            above = part.column - part.column.subs(KEY, part.at)
            part = _climbing((above if part.below else -above) + int(part.strict), [part.column])
        if isinstance(part, Climbing):
            bodies.setdefault(part.columns, []).append(part.body)
        else:
            rest.append(part)
    return rest + [Climbing(columns, _all(body)) for columns, body in bodies.items()]


def _either(disjuncts: Sequence[Boolean]) -> Rule:
    """Those without keys are one condition, and those of keys alone one truth column."""
    conditions = [x for x in disjuncts if KEY not in x.free_symbols]
    columns = [x for x in disjuncts if QUERY not in x.free_symbols and _look_ups(x)]
    rest = [x for x in disjuncts if x not in conditions and x not in columns]
    together = [sympy.Or(*group) for group in (conditions, columns) if group]
    return Either(tuple(map(_rule, (*together, *rest))))


def _told_by_equals(conjuncts: Iterable[Boolean]) -> list[Boolean]:
    """Where ``c(k) == c(q)`` is asked for, what else is asked of ``c(k)`` is asked of ``c(q)``."""
    found = sorted(conjuncts, key=sympy.default_sort_key)
    for place in range(len(found)):
        each = found[place]  # as those before it have left it: two may not vanish by each other
        same = _same(each) if isinstance(each, sympy.Eq) else None
        if same is not None and isinstance(same.column, AppliedUndef):
            value = same.column.subs(KEY, same.at)
            found = [x if at == place else x.subs(same.column, value) for at, x in enumerate(found)]
    return found


def _look_ups(expr: Any) -> list[AppliedUndef]:
    """The outermost look-ups whose indices contain k."""
    found = [x for x in expr.atoms(AppliedUndef) if KEY in x.free_symbols]
    inner = {y for x in found for index in x.args for y in index.atoms(AppliedUndef)}
    return sorted((x for x in found if x not in inner), key=sympy.default_sort_key)


def _relation(truth: sympy.Rel) -> Rule:
    """A relation between numbers, as ``difference <= 0`` or as two of them."""
    choice = next(iter(sorted(truth.atoms(sympy.Piecewise), key=sympy.default_sort_key)), None)
    if choice is not None:
        (one, condition), (other, _) = choice.args
        first, second = truth.subs(choice, one), truth.subs(choice, other)
        either = sympy.Or(sympy.And(condition, first), sympy.And(sympy.Not(condition), second))
        return _rule(sympy.to_nnf(either, simplify=False))
    difference = sympy.expand(truth.lhs - truth.rhs)
    if isinstance(truth, sympy.Eq | sympy.Ne):
        same = _same(truth)
        if same is not None:
            return same
        sides = [_not_above(difference), _not_above(-difference)]
        if isinstance(truth, sympy.Eq):
            return _all(sides)
        return Either((_not_above(difference + 1), _not_above(1 - difference)))
    strict = isinstance(truth, sympy.StrictLessThan | sympy.StrictGreaterThan)
    if isinstance(truth, sympy.GreaterThan | sympy.StrictGreaterThan):
        difference = -difference
    return _not_above(difference + 1 if strict else difference)


def _same(truth: sympy.Rel) -> Same | None:
    """``c(k) == c(at)``, wherever the terms stand."""
    column, rest = _column(sympy.expand(truth.lhs - truth.rhs))
    at = None if column is None else _at(column, -rest)
    return None if at is None else Same(column, at, isinstance(truth, sympy.Ne))


def _column(difference: Any) -> tuple[Any, Any]:
    """The terms with look-ups at k, if they are of no query, with a positive first; and the rest.

    Both change their sign together.
    """
    terms = sympy.Add.make_args(difference)
    own = [term for term in terms if _look_ups(term)]
    column = sympy.Add(*own)
    rest = difference - column
    if not own or QUERY in column.free_symbols or KEY in rest.free_symbols:
        return None, rest
    negative = min(own, key=sympy.default_sort_key).could_extract_minus_sign()
    return (-column, -rest) if negative else (column, rest)


def _at(column: Any, value: Any) -> Any:
    """The key, an expression of q, at which the column has this value; None if none is known."""
    own = _look_ups(column)[0]
    for other in value.atoms(AppliedUndef):
        if other.func != own.func or len(other.args) != len(own.args):
            continue
        for index, known in zip(own.args, other.args, strict=True):
            at = sympy.expand(known - (index - KEY))
            if KEY not in index.free_symbols or KEY in at.free_symbols:
                continue
            if sympy.expand(column.subs(KEY, at) - value) == 0:
                return at
    return None


def _not_above(difference: Any) -> Rule:
    """``difference <= 0``."""
    difference = sympy.expand(difference)
    look_ups = _look_ups(difference)
    if look_ups:
        return _ordered(difference) or _climbing(difference, look_ups)
    if KEY not in difference.free_symbols:
        return Where(sympy.Le(difference, 0))
    factor = difference.coeff(KEY)
    rest = sympy.expand(difference - factor * KEY)
    if KEY in rest.free_symbols or not factor.is_Integer:
        return _taken_apart(difference)
    if factor > 0:
        return Below(sympy.floor(-rest / factor) + 1)
    return From(-sympy.floor(rest / factor))


def _ordered(difference: Any) -> Ordered | None:
    """``c(k) <= c(at)`` and its like: below or above, strictly or not."""
    column, rest = _column(difference)
    if column is None:
        return None
    below = sympy.expand(difference - column - rest) == 0
    for slack in (0, 1):
        at = _at(column, -rest - slack if not below else -rest + slack)
        if at is not None:
            return Ordered(column, at, below, bool(slack))
    return None


def _climbing(difference: Any, look_ups: list[AppliedUndef]) -> Rule:
    if QUERY not in difference.free_symbols:
        return Kept(sympy.Le(difference, 0))
    columns = []
    for look_up in look_ups:
        if QUERY in look_up.free_symbols:
            raise OutsideAlgebra(f"{look_up} looks up pairs")
        offset = sympy.Symbol(f"offset[{look_up}]", integer=True)
        columns.append((offset, look_up))
        difference = difference.subs(look_up, KEY + offset)
    return Climbing(tuple(columns), _not_above(difference))


def _taken_apart(difference: Any) -> Rule:
    """One term that is an abs, min, max or floor of something with k, and the rest."""
    for term in sympy.Add.make_args(difference):
        factor, inner = term.as_coeff_Mul()
        if KEY not in inner.free_symbols or not factor.is_Integer:
            continue
        rest = difference - term
        if isinstance(inner, sympy.Abs | sympy.Max | sympy.Min):
            argument = inner.args[0]
            options = (argument, -argument) if isinstance(inner, sympy.Abs) else inner.args
            parts = tuple(_not_above(factor * option + rest) for option in options)
            every = (factor > 0) != isinstance(inner, sympy.Min)
            return _all(parts) if every else Either(parts)
        if isinstance(inner, sympy.floor) and KEY not in rest.free_symbols:
            return _floor(factor, inner.args[0], rest)
    raise OutsideAlgebra(f"{difference} <= 0")


def _floor(factor: Any, argument: Any, rest: Any) -> Rule:
    """``factor * floor(argument) + rest <= 0``; the argument times ``unit`` is an integer."""
    unit = denominator(argument)
    if factor > 0:
        return _not_above(unit * argument - unit * (sympy.floor(-rest / factor) + 1) + 1)
    return _not_above(unit * -sympy.floor(rest / factor) - unit * argument)
