"""Terms of a loss that are of one sample each: right in any split if all samples have them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from torch import fx

from mllm_compile.passes.capture.spread import Lookup, Recipe, Spread, packet, place
from mllm_compile.passes.capture.spread_recipes import Recipes, aten


class NotASum(Exception):
    """The loss is not a sum over samples; the message names the operator and its line."""


@dataclass(frozen=True)
class Term:
    """What sample ``row`` of ``count`` adds to a sum, how, and the operator that gives it."""

    count: int
    row: int
    recipe: Recipe
    where: str


def check_term(node: fx.Node, spread: Spread) -> None:
    """What one sample contributes is the same in every split, whatever it is made of.

    Raises:
        NotASum: it is of several samples, but not of all.

    """
    if not spread.rows or not spread.single or spread.dims:
        raise NotASum(f"{place(node)} is there for some samples of the batch alone")


def check_terms(loss: fx.Node, order: Iterable[fx.Node], lookup: Lookup, recipes: Recipes) -> None:
    """All samples must have the same terms, computed in the same way, in the sum ``loss``.

    Raises:
        NotASum: they have not.

    """
    found: dict[fx.Node, list[Term]] = {}
    for node in order:
        found[node] = _terms(node, found, lookup, recipes)
    by_count = sorted(found[loss], key=lambda term: term.count)
    for count, group in groupby(by_count, lambda term: term.count):
        terms = list(group)
        every = Counter(term.row for term in terms)
        if len({every[row] for row in range(count)}) > 1:
            raise NotASum(f"{terms[0].where} is there for some samples of the batch alone")
        first = Counter(term.recipe for term in terms if term.row == 0)
        for row in range(1, count):
            other = Counter(term.recipe for term in terms if term.row == row)
            if other != first:
                where = next(t.where for t in terms if t.row == row and t.recipe in other - first)
                raise NotASum(f"{where} treats one sample of the batch unlike another")


def _terms(
    node: fx.Node, found: dict[fx.Node, list[Term]], lookup: Lookup, recipes: Recipes
) -> list[Term]:
    spread, adds = lookup(node), packet(node) is aten.add
    sources = [n for n in node.args if isinstance(n, fx.Node)] if adds else node.all_input_nodes
    if spread.part is not None and spread.single and not spread.dims:
        if not adds or len(sources) < 2 or not all(map(found.__getitem__, sources)):
            rows, count = spread.part
            return [Term(count, row, spread.recipe, place(node)) for row in rows]
    elif not spread.pooled:
        return []
    return [
        Term(t.count, t.row, recipes.with_term(node, i, t.recipe, lookup), t.where)
        for i, source in enumerate(sources)
        for t in found[source]
    ]
