"""What a rule leaves of the keys, query by query: pieces [start, end), and under which conditions.

A piece is two int32 tensors [batch, queries], either dim may be one; start >= end means nothing is
left. Pieces lie in [0, keys].
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mllm_compile.kernels.attention import algebra
from mllm_compile.kernels.attention.columns import Piece, gathered, neighbours, runs, with_end
from mllm_compile.kernels.attention.symbolic import QUERY
from mllm_compile.kernels.attention.values import Values


class Pieces:
    """Follows rules over one batch.

    ``count`` pieces at most are kept of a truth column. With ``checked``, ``conditions`` are what
    the result rests on: what would be wrong, and truth values of where it is right.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        batch: int,
        queries: int,
        keys: int,
        device: torch.device,
        count: int,
        checked: bool = False,
    ) -> None:
        self.values = Values(tensors, batch, queries, keys, device)
        self.queries, self.keys, self.count, self.checked = queries, keys, count, checked
        self.conditions: list[tuple[str, Tensor]] = []
        self._runs: dict[Any, Piece] = {}

    def of(self, rule: algebra.Rule) -> list[Piece]:
        """What the rule leaves of all keys."""
        return self._within(rule, (self.values.number(0), self.values.number(self.keys)))

    def _within(self, rule: algebra.Rule, piece: Piece) -> list[Piece]:
        start, end = piece
        match rule:
            case algebra.Where(condition):
                return [(start, torch.where(self.values.of(condition), end, start))]
            case algebra.Below(bound):
                return [(start, torch.minimum(end, self._bound(bound)))]
            case algebra.From(bound):
                return [(torch.maximum(start, self._bound(bound)), end)]
            case algebra.All(parts):
                pieces = [piece]
                for part in parts:
                    pieces = [new for old in pieces for new in self._within(part, old)]
                return pieces
            case algebra.Either(parts):
                return [new for part in parts for new in self._within(part, piece)]
            case _:
                return self._by_column(rule, piece)

    def _by_column(self, rule: algebra.OnColumns, piece: Piece) -> list[Piece]:
        match rule:
            case algebra.Same():
                return self._same(rule, piece)
            case algebra.Ordered():
                return self._ordered(rule, piece)
            case algebra.Climbing():
                return self._climbing(rule, piece)
            case algebra.Kept():
                return self._kept(rule, piece)

    def _bound(self, bound: Any) -> Tensor:
        return self.values.of(bound).clamp(0, self.keys).to(torch.int32)

    def _require(self, wrong: str, piece: Piece, holds: Callable[[], Tensor]) -> None:
        """What a piece rests on, where it has keys."""
        if self.checked:
            self.conditions.append((wrong, holds() | (piece[0] >= piece[1])))

    # ------------------------------------------------------------ runs of equal values

    def _same(self, rule: algebra.Same, piece: Piece) -> list[Piece]:
        start, end = piece
        first, last = (self._at_key(x, rule.at, piece) for x in self._runs_of(rule.column))
        self._require(
            f"equal values of {rule.column} are not contiguous",
            piece,
            lambda: self._alone(rule, piece),
        )
        if rule.negated:
            return [(start, torch.minimum(end, first)), (torch.maximum(start, last), end)]
        return [(torch.maximum(start, first), torch.minimum(end, last))]

    def _ordered(self, rule: algebra.Ordered, piece: Piece) -> list[Piece]:
        start, end = piece
        first, last = (self._at_key(x, rule.at, piece) for x in self._runs_of(rule.column))
        self._require(
            f"values of {rule.column} descend",
            piece,
            lambda: self._ascending(rule, piece),
        )
        edge = first if rule.below == rule.strict else last
        if rule.below:
            return [(start, torch.minimum(end, edge))]
        return [(torch.maximum(start, edge), end)]

    def _runs_of(self, column: Any) -> Piece:
        """The run of equal values around every key, [B|1, keys]."""
        if column not in self._runs:
            self._runs[column] = runs(self._column(column))
        return self._runs[column]

    def _column(self, column: Any) -> Tensor:
        values = self.values.of(column)
        return values.expand(values.shape[0], self.keys)

    def _at_key(self, column: Tensor, at: Any, piece: Piece) -> Tensor:
        """A column at key ``at`` of every query."""
        if at == QUERY and self.queries == self.keys:
            return column
        places = self.values.of(at)
        self._require(
            f"key {at} does not exist", piece, lambda: (places >= 0) & (places < self.keys)
        )
        return gathered(column, places.clamp(0, self.keys - 1))

    def _alone(self, rule: algebra.Same, piece: Piece) -> Tensor:
        """Whether the piece holds no other run of the value of key ``at``."""
        before, behind = neighbours(self._column(rule.column))
        places = self.values.of(rule.at).clamp(0, self.keys - 1)
        return (gathered(before, places) <= piece[0]) & (gathered(behind, places) >= piece[1])

    def _ascending(self, rule: algebra.Ordered, piece: Piece) -> Tensor:
        values = self._column(rule.column)
        places = self.values.of(rule.at).clamp(0, self.keys - 1)
        first, last = torch.minimum(piece[0], places), torch.maximum(piece[1] - 1, places)
        return self._nowhere(values[:, 1:] < values[:, :-1], first, last)

    def _nowhere(self, wrong: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Whether no step from ``first`` to ``last`` is ``wrong`` (step i leads to key i + 1)."""
        steps = torch.nn.functional.pad(wrong.cumsum(1), (1, 0))
        before, after = (gathered(steps, x.clamp(0, self.keys - 1)) for x in (first, last))
        return before == after

    # ------------------------------------------------------------ other columns

    def _climbing(self, rule: algebra.Climbing, piece: Piece) -> list[Piece]:
        for symbol, column in rule.columns:
            values, here = self._column(column), piece[0].clamp(0, self.keys - 1)
            self._require(
                f"values of {column} do not go up by one from key to key",
                piece,
                lambda values=values: self._nowhere(  # type: ignore[misc]
                    values[:, 1:] != values[:, :-1] + 1, piece[0], piece[1] - 1
                ),
            )
            self.values.offsets[symbol] = gathered(values, here) - here
        found = self._within(rule.body, piece)
        for symbol, _ in rule.columns:
            del self.values.offsets[symbol]
        return found

    def _kept(self, rule: algebra.Kept, piece: Piece) -> list[Piece]:
        start, end = piece
        kept, (_, last) = self._column(rule.column), self._runs_of(rule.column)
        places = self.values.numbers(self.keys)
        # The first key from here on for which the column is true, and is false.
        opens = with_end(torch.where(kept, places, last), self.keys)
        closes = with_end(torch.where(kept, last, places), self.keys)
        found: list[Piece] = []
        for _ in range(self.count):
            start = torch.minimum(gathered(opens, start), end)
            found.append((start, torch.minimum(gathered(closes, start), end)))
            start = found[-1][1]
        self._require(
            f"{rule.column} holds for more than {self.count} separate runs of keys",
            (start, end),
            lambda: gathered(opens, start) >= end,
        )
        return found


# ---------------------------------------------------------------- unions


def components(pieces: Sequence[Piece], keys: int) -> Tensor:
    """How many separate runs of keys each query sees in the union of several pieces."""
    (_, reached), *rest = _ascending([_emptied(piece, keys) for piece in pieces])
    count = torch.ones_like(reached)
    for start, end in rest:
        count = count + ((start > reached) & (start < end))
        reached = torch.maximum(reached, end)
    return count


def joined(pieces: Sequence[Piece], count: int, keys: int) -> list[Piece]:
    """The union of pieces as ``count`` pieces, where it has no more components."""
    if len(pieces) == 1:
        start, end = pieces[0]
        return _spread([(start, torch.maximum(start, end))], count)
    emptied = [_emptied(piece, keys) for piece in pieces]
    if count == 1:
        start = reduce(torch.minimum, (start for start, _ in emptied))
        end = reduce(torch.maximum, (end for _, end in emptied))
        return [(torch.minimum(start, end), end)]
    return _two(_ascending(emptied), keys)


def _emptied(piece: Piece, keys: int) -> Piece:
    """Pieces without keys become [keys, 0), which changes no extreme."""
    start, end = piece
    seen = start < end
    return torch.where(seen, start, keys), torch.where(seen, end, 0)


def _ascending(pieces: list[Piece]) -> list[Piece]:
    """Sorted by start: neighbours that stand wrong are exchanged, as often as it may take."""
    found = list(pieces)
    for last in range(len(found) - 1, 0, -1):
        for at in range(last):
            (start, end), (other, stop) = found[at], found[at + 1]
            swap = other < start
            found[at] = torch.where(swap, other, start), torch.where(swap, stop, end)
            found[at + 1] = torch.where(swap, start, other), torch.where(swap, end, stop)
    return found


def _two(pieces: list[Piece], keys: int) -> list[Piece]:
    """Ascending pieces as two: what follows on the first without a gap, and the rest."""
    start, end = pieces[0]
    rest: Piece = (torch.full_like(start, keys), torch.zeros_like(end))
    for other, stop in pieces[1:]:
        reached = other <= end
        rest = (
            torch.minimum(rest[0], torch.where(reached, keys, other)),
            torch.maximum(rest[1], torch.where(reached, 0, stop)),
        )
        end = torch.where(reached, torch.maximum(end, stop), end)
    behind = torch.maximum(rest[1], end)
    return [(torch.minimum(start, end), end), (torch.minimum(rest[0], behind), behind)]


def _spread(pieces: list[Piece], count: int) -> list[Piece]:
    """Empty pieces behind the others, up to ``count``."""
    return pieces + [(pieces[-1][1], pieces[-1][1])] * (count - len(pieces))
