"""One denominator for each term of the loss, over all microbatches of a step.

A mean over labels, or over anything else, is a sum divided by a count. Every microbatch brings its
own counts; the step divides all of them by the total. Programs of one step may have other terms (an
audio loss only where there is audio): a term is known by where the model divides, and its total is
over the microbatches that have it, as in the plain model's global batch.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isclose

import torch

from mllm_compile.compiler.captured import Captured, Prepared
from mllm_compile.compiler.errors import PlanError, RequestError, explain

Term = tuple[str, str, int]
"""(owner, source line, occurrence) of the first node that divides by the count."""


def with_global_denominators(prepared: Sequence[Prepared]) -> tuple[Prepared, ...]:
    """Put the sum over all microbatches in place of each microbatch's own count.

    Raises:
        RequestError: the microbatches' losses have different terms that cannot be told apart.
    """
    terms = [_terms(item.program) for item in prepared]
    _check_told_apart(terms)
    totals: dict[Term, torch.Tensor] = {}
    for item, named in zip(prepared, terms, strict=True):
        for name, term in named.items():
            value = item.values["denominator", name]
            totals[term] = totals[term] + value if term in totals else value
    return tuple(
        replace(
            item,
            values={
                **item.values,
                **{("denominator", name): totals[term] for name, term in named.items()},
            },
        )
        for item, named in zip(prepared, terms, strict=True)
    )


def totals_are_fed(fed: Sequence[Prepared], counted: Sequence[Prepared]) -> None:
    """Every microbatch and lane divides a term of the loss by its count over all that have it."""
    totals: dict[Term, float] = {}
    for item in counted:
        for name, term in _terms(item.program).items():
            totals[term] = totals.get(term, 0.0) + float(item.values["denominator", name])
    for place, item in enumerate(fed):
        for name, term in _terms(item.program).items():
            found = float(item.values["denominator", name])
            if not isclose(found, totals[term], rel_tol=1e-6):
                where = f"part {place}, denominator %{name} at {term[1]} ({term[0]})"
                raise PlanError(explain(where, expected=str(totals[term]), got=str(found)))


def _terms(program: Captured) -> dict[str, Term]:
    """Denominator name -> the term it belongs to."""
    seen: Counter[tuple[str, str]] = Counter()
    terms: dict[str, Term] = {}
    placeholders = program.main.graph.find_nodes(op="placeholder")
    for node, item in zip(placeholders, program.inputs, strict=True):
        if item.kind == "denominator":
            meta: dict[str, str] = next((user.meta for user in node.users), {})
            place = (meta.get("owner", ""), meta.get("where", ""))
            terms[item.name] = (*place, seen[place])
            seen[place] += 1
    return terms


def check_alike(both: Captured, single: Sequence[Captured]) -> None:
    """Two samples together must have the terms that they have one by one.

    Raises:
        RequestError: the loss counts something else where a batch holds one sample alone.

    """
    alone = {(owner, where) for program in single for owner, where, _ in _terms(program).values()}
    together = {(owner, where) for owner, where, _ in _terms(both).values()}
    for owner, where in sorted(place for place in alone ^ together if place[1]):
        raise RequestError(
            explain(
                f"the loss at {where} ({owner or 'the model itself'})",
                expected="the same means in a batch of one sample and of two",
                got="a mean in one of them alone",
                remedy="set microbatch_size = 2 or more, or microbatches = 1",
            )
        )


def _check_told_apart(terms: Sequence[dict[str, Term]]) -> None:
    """Programs with other terms than the rest may not have two terms from one source line."""
    if len({tuple(named.values()) for named in terms}) == 1:
        return
    for named in terms:
        for owner, where, occurrence in named.values():
            if occurrence:
                raise RequestError(
                    explain(
                        f"the loss at {where} ({owner or 'the model itself'})",
                        expected="the same terms in every microbatch",
                        got="several terms from this line, and fewer in some microbatches",
                        remedy="compute each term in a line of its own, or set microbatches = 1",
                    )
                )
