"""What a rule leaves of the keys, query by query: pieces [start, end), and under which conditions.

A piece is two int32 values; start >= end means nothing is left. Pieces lie in [0, keys].
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor

from mllm_compile.kernels.attention import rules
from mllm_compile.kernels.attention.columns import (
    Equals,
    Runs,
    changes_of,
    cut_at,
    descents_of,
    equals_of,
    gathered,
    outer_changes,
)
from mllm_compile.kernels.attention.per_query import PerQuery, Value, apply
from mllm_compile.kernels.attention.symbolic import KEY, QUERY
from mllm_compile.kernels.attention.values import Values

Piece = tuple[Value, Value]


class Pieces:
    """Follows a rule over one batch.

    ``count`` pieces at most are kept of a truth column. With ``checked``, ``conditions`` are what
    the result rests on: what would be wrong, and truth values of where it is right. ``widest``
    pieces hold all keys of a value, and what lies between them, and rest the less on values.
    """

    def __init__(
        self,
        rule: rules.Rule,
        tensors: Sequence[Tensor],
        sizes: tuple[int, int, int],
        device: torch.device,
        count: int,
        checked: bool = False,
        widest: bool = False,
    ) -> None:
        self.values = Values(tensors, *sizes, device)
        _, self.queries, self.keys = sizes
        self.count, self.checked, self.widest = count, checked, widest
        self.conditions: list[tuple[str, Value]] = []
        self._runs: dict[Any, Runs] = {}
        if device.type == "cpu":
            self.values.cut(_ids_of_queries(rule))
        self.found = self._within(rule, (self.values.number(0), self.values.number(self.keys)))

    def _within(self, rule: rules.Rule, piece: Piece) -> list[Piece]:
        start, end = piece
        match rule:
            case rules.Where(condition):
                seen = self.values.of(condition)
                return [(start, apply(torch.where, seen, end, start))]
            case rules.Below(bound):
                return [(start, _lower(end, self._bound(bound)))]
            case rules.From(bound):
                return [(_higher(start, self._bound(bound)), end)]
            case rules.All(parts):
                pieces = [piece]
                for part in parts:
                    pieces = [new for old in pieces for new in self._within(part, old)]
                return pieces
            case rules.Either(parts):
                return [new for part in parts for new in self._within(part, piece)]
            case _:
                return self._by_column(rule, piece)

    def _by_column(self, rule: rules.OnColumns, piece: Piece) -> list[Piece]:
        match rule:
            case rules.Same():
                return self._same(rule, piece)
            case rules.Ordered():
                return self._ordered(rule, piece)
            case rules.Climbing():
                return self._climbing(rule, piece)
            case rules.Kept():
                return self._kept(rule, piece)

    def _bound(self, bound: Any) -> Value:
        return apply(lambda x: x.clamp(0, self.keys).to(torch.int32), self.values.of(bound))

    def _require(self, wrong: str, piece: Piece, holds: Value) -> None:
        """What a piece rests on, where it has keys."""
        blind = apply(torch.ge, *piece)
        self.conditions.append((wrong, apply(torch.logical_or, holds, blind)))

    # ------------------------------------------------------------ runs of equal values

    def _same(self, rule: rules.Same, piece: Piece) -> list[Piece]:
        start, end = piece
        runs = self._runs_of(rule.column)
        _, number = self._compared(rule, piece, runs)
        first, last = _taken(runs.starts, number), _taken(runs.ends, number)
        if self.checked and (equals := self._equals_of(rule.column)) is not None:
            before, behind = _taken(equals.before, number), _taken(equals.behind, number)
            clear = apply(torch.le, before, start), apply(torch.ge, behind, end)
            if self.widest and not rule.negated:
                first = apply(torch.where, clear[0], first, _taken(equals.first, number))
                last = apply(torch.where, clear[1], last, _taken(equals.last, number))
            else:
                wrong = f"equal values of {rule.column} are not contiguous"
                self._require(wrong, piece, apply(torch.logical_and, *clear))
        if rule.negated:
            return [(start, _lower(end, first)), (_higher(start, last), end)]
        return [(_higher(start, first), _lower(end, last))]

    def _ordered(self, rule: rules.Ordered, piece: Piece) -> list[Piece]:
        start, end = piece
        values = self.values.column(rule.column)
        stretches = cut_at(outer_changes(self.values.changes(values)))
        places, number = self._compared(rule, piece, stretches)
        if self.checked:
            self._require_ascending(rule, piece)
        # The first key of the run of equal values at a place, or the end of it.
        equal = stretches.first_of(values) == stretches.first_of(values, 1)
        equal &= stretches.starts + 1 < self.keys
        edge = places if rule.below == rule.strict else apply(lambda x: x + 1, places)
        if self.values.sections is None or bool(equal.any()):
            if rule.below == rule.strict:
                edges = torch.where(equal, stretches.starts, self.keys)
                edge = _lower(edge, _taken(edges, number))
            else:
                edge = _higher(edge, _taken(torch.where(equal, stretches.ends, 0), number))
        return [(start, _lower(end, edge)) if rule.below else (_higher(start, edge), end)]

    def _compared(
        self, rule: rules.Same | rules.Ordered, piece: Piece, runs: Runs
    ) -> tuple[Value, Value]:
        """The keys that all others are compared with, and which run they lie in."""
        by = rule.at - QUERY
        if by.is_Integer and 0 <= by <= self.keys - self.queries:
            places = self.values.shifted(int(by), rule.column.subs(KEY, rule.at))
            if isinstance(places, Tensor):
                return places, runs.search(places)
            return places, PerQuery(
                lambda rows: runs.over(slice(rows.start + int(by), rows.stop + int(by)))
            )
        places = self.values.of(rule.at)
        if self.checked:
            exists = apply(lambda x: (x >= 0) & (x < self.keys), places)
            self._require(f"key {rule.at} does not exist", piece, exists)
        inside = apply(lambda x: x.clamp(0, self.keys - 1), places)
        return inside, _number(runs, inside)

    def _runs_of(self, column: Any) -> Runs:
        if column not in self._runs:
            self._runs[column] = cut_at(self.values.changes(self.values.column(column)))
        return self._runs[column]

    def _equals_of(self, column: Any) -> Equals | None:
        runs = self._runs_of(column)
        return equals_of(runs, runs.first_of(self.values.column(column)))

    def _require_ascending(self, rule: rules.Ordered, piece: Piece) -> None:
        """Values must not descend anywhere between the keys of the piece and key ``at``."""
        ascents = cut_at(descents_of(self.values.column(rule.column)))
        if ascents.starts.shape[1] > 1:
            first, last = _number(ascents, piece[0]), _number(ascents, _before(piece[1]))
            for other in (last, *self._compared_ends(rule, piece, ascents)):
                same = apply(torch.eq, first, other)
                self._require(f"values of {rule.column} descend", piece, same)

    def _compared_ends(self, rule: rules.Ordered, piece: Piece, runs: Runs) -> Sequence[Value]:
        """Runs of the keys compared with that are equal only if all between them are, too."""
        sections, by = self.values.sections, rule.at - QUERY
        if sections is None or not by.is_Integer or not 0 <= by <= self.keys - self.queries:
            return [self._compared(rule, piece, runs)[1]]
        ends = sections.starts.clamp_max(self.queries - 1), (sections.ends - 1).clamp_min(0)
        return [runs.search(places + int(by)) for places in ends]

    # ------------------------------------------------------------ other columns

    def _climbing(self, rule: rules.Climbing, piece: Piece) -> list[Piece]:
        start, end = piece
        here = apply(lambda x: x.clamp(0, self.keys - 1), start)
        for symbol, column in rule.columns:
            values = self.values.column(column)
            self.values.offsets[symbol] = apply(torch.sub, _taken(values, here), here)
            if self.checked:
                runs = cut_at(changes_of(values - self.values.column(KEY)))
                wrong = f"values of {column} do not go up by one from key to key"
                first, last = _number(runs, start), _number(runs, _before(end))
                self._require(wrong, piece, apply(torch.eq, first, last))
        found = self._within(rule.body, piece)
        for symbol, _ in rule.columns:
            del self.values.offsets[symbol]
        return found

    def _kept(self, rule: rules.Kept, piece: Piece) -> list[Piece]:
        start, end = piece
        runs = self._runs_of(rule.column)
        kept = runs.first_of(self.values.column(rule.column))
        following = torch.nn.functional.pad(runs.ends[:, 1:], (0, 1), value=self.keys)
        # From any key on, where the column is true first, and where it is false after that.
        opens = torch.where(kept, runs.starts, runs.ends)
        closes = torch.where(kept, runs.ends, following)
        found: list[Piece] = []
        for _ in range(self.count):
            number = _number(runs, start)
            start = _lower(_higher(start, _taken(opens, number)), end)
            found.append((start, _lower(_taken(closes, number), end)))
            start = found[-1][1]
        if self.checked and int((kept & (runs.starts < runs.length)).sum(1).max()) > self.count:
            again = _higher(start, _taken(opens, _number(runs, start)))
            wrong = f"{rule.column} holds for more than {self.count} separate runs of keys"
            self._require(wrong, (start, end), apply(torch.ge, again, end))
        return found


@lru_cache(maxsize=1024)
def _ids_of_queries(rule: rules.Rule) -> tuple[AppliedUndef, ...]:
    """The look-ups at queries that decide which runs of keys they see, or whether they see any.

    Those in bounds that climb from key to key do so themselves.
    """
    match rule:
        case rules.All(parts) | rules.Either(parts):
            found = {x for part in parts for x in _ids_of_queries(part)}
        case rules.Where(expr) | rules.Below(expr) | rules.From(expr):
            found = expr.atoms(AppliedUndef)
        case rules.Same(column, at) | rules.Ordered(column, at):
            found = column.subs(KEY, at).atoms(AppliedUndef)
        case _:
            return ()
    return tuple(sorted((x for x in found if QUERY in x.free_symbols), key=sympy.default_sort_key))


def _lower(one: Value, other: Value) -> Value:
    return apply(torch.minimum, one, other)


def _higher(one: Value, other: Value) -> Value:
    return apply(torch.maximum, one, other)


def _before(places: Value) -> Value:
    return apply(lambda x: x - 1, places)


def _taken(column: Tensor, places: Value) -> Value:
    return apply(partial(gathered, column), places)


def _number(runs: Runs, places: Value) -> Value:
    """Which run places lie in."""
    return runs.search(places) if isinstance(places, Tensor) else apply(runs.at, places)
