"""Rules: which keys a query sees, as sets of keys that give intervals.

A *rule* says which keys a query sees; every rule gives intervals, and so do ``All`` (their
intersection) and ``Either`` (their union). A *column* is an expression of k and b alone: it has one
value per key. Rules on columns hold under conditions on the column's values, which ``intervals``
checks: without look-ups at k there are none.

=====================  ===========================================================================
``k + f(q) <= 0``      ``Below``, ``From``: bounds are expressions of q and b
floor, abs, min, max   taken apart into bounds: ``floor(x/m) <= r`` is ``x < m*(r+1)``
no k                   ``Where``: all keys or none
``c(k) == c(at(q))``   ``Same``: the run of equal values around key ``at``
``c(k) <= c(at(q))``   ``Ordered``: up to that run, where values ascend
``p(k)``               ``Kept``: runs of keys that a truth column holds for
other look-ups at k    ``Climbing``: where values go up by one per key, ``c(k)`` is ``k + offset``
=====================  ===========================================================================
"""

from dataclasses import dataclass
from math import prod

import sympy
from sympy.logic.boolalg import Boolean


@dataclass(frozen=True, slots=True)
class Where:
    """All keys where the condition holds, none elsewhere."""

    condition: Boolean


@dataclass(frozen=True, slots=True)
class Below:
    """Keys before ``end``."""

    end: sympy.Expr


@dataclass(frozen=True, slots=True)
class From:
    """Keys from ``start`` on."""

    start: sympy.Expr


@dataclass(frozen=True, slots=True)
class Same:
    """Keys whose column equals that of key ``at``; with ``negated`` all others."""

    column: sympy.Expr
    at: sympy.Expr
    negated: bool


@dataclass(frozen=True, slots=True)
class Ordered:
    """Keys whose column is below (else above) that of key ``at``, or, unless ``strict``, equal."""

    column: sympy.Expr
    at: sympy.Expr
    below: bool
    strict: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys that a truth column holds for."""

    column: Boolean


@dataclass(frozen=True, slots=True)
class Climbing:
    """``body``, in which every symbol stands for ``column(k) - k``, the same for all keys seen."""

    columns: tuple[tuple[sympy.Symbol, sympy.Expr], ...]
    body: "Rule"


@dataclass(frozen=True, slots=True)
class All:
    """Keys that all parts see; bounds come first, what needs the fewest conditions."""

    parts: tuple["Rule", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Keys that any of the parts sees."""

    parts: tuple["Rule", ...]


OnColumns = Same | Ordered | Kept | Climbing
Rule = Where | Below | From | OnColumns | All | Either


def is_certain(rule: Rule) -> bool:
    """Whether a rule gives its intervals whatever the values of its columns."""
    if isinstance(rule, All | Either):
        return all(map(is_certain, rule.parts))
    return isinstance(rule, Where | Below | From)


def num_pieces(rule: Rule) -> int:
    """Into how many pieces a rule takes all keys apart, at most."""
    match rule:
        case All(parts):
            return prod(map(num_pieces, parts))
        case Either(parts):
            return sum(map(num_pieces, parts))
        case Climbing(_, body):
            return num_pieces(body)
        case Kept() | Same(negated=True):
            return 2
    return 1
