"""Values of expressions over b, q and k: tensors [batch, length] that may have size one in both.

Batch runs along dim 0, and queries or keys along dim 1, whichever the expression is of. Where all
that an expression takes of a query are look-ups of ids, it has one value per *section*: ids come in
long runs, and sections are the runs of all ids together. Other values of queries are put off.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor

from mllm_compile.kernels.attention.columns import Runs, changes_of, cut_at
from mllm_compile.kernels.attention.per_query import Block, PerQuery, Value, apply, blocks
from mllm_compile.kernels.attention.symbolic import BATCH, KEY, QUERY

LENGTH = 16
"""Queries per section, on average, for which sections are worth while."""

_FOLDED: dict[type, Callable[[Tensor, Tensor], Tensor]] = {
    sympy.Add: torch.add,
    sympy.Mul: torch.mul,
    sympy.Max: torch.maximum,
    sympy.Min: torch.minimum,
    sympy.And: torch.logical_and,
    sympy.Or: torch.logical_or,
    sympy.Le: torch.le,
    sympy.Lt: torch.lt,
    sympy.Ge: torch.ge,
    sympy.Gt: torch.gt,
    sympy.Eq: torch.eq,
    sympy.Ne: torch.ne,
}


class Values:
    """Evaluates expressions over one batch; equal expressions once.

    ``offsets`` are the values of further symbols, which may change.
    """

    def __init__(
        self, tensors: Sequence[Tensor], batch: int, queries: int, keys: int, device: torch.device
    ) -> None:
        self.tensors, self.device = tensors, device
        self.sizes = {BATCH: batch, QUERY: queries, KEY: keys}
        self.offsets: dict[sympy.Symbol, Value] = {}
        self.sections: Runs | None = None
        self._cut: dict[AppliedUndef, Any] = {}
        self._changes: dict[int, tuple[Tensor, Tensor]] = {}
        self._parts: dict[Any, Tensor] = {}
        self._known: dict[Any, Value] = {
            BATCH: self._numbers(0, batch).T,
            QUERY: PerQuery(lambda rows: self._numbers(rows.start, rows.stop)),
        }

    def _numbers(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, dtype=torch.int32, device=self.device).unsqueeze(0)

    def column(self, expr: Any) -> Tensor:
        """The values of an expression of keys, [B|1, keys]."""
        found = self.of(expr)
        assert isinstance(found, Tensor)
        keys = self.sizes[KEY]
        return found if found.shape[1] == keys else found.expand(found.shape[0], keys)

    def number(self, value: int) -> Tensor:
        """One int32."""
        return torch.full((1, 1), value, dtype=torch.int32, device=self.device)

    # ------------------------------------------------------------ sections

    def cut(self, look_ups: Iterable[AppliedUndef]) -> None:
        """Make sections of the look-ups at queries that have long runs; reads them on the host."""
        borders: list[Tensor] = []
        for look_up in look_ups:
            part = self._part(look_up)
            changes = None if part is None else self.changes(part)
            if changes is not None and int(changes.count_nonzero()) * LENGTH < changes.numel():
                borders.append(changes)
                self._cut[look_up] = sympy.S.Zero
        if borders:
            self.sections = cut_at(reduce(torch.logical_or, borders))

    def changes(self, values: Tensor) -> Tensor:
        """``changes_of`` a part of a table or a column; once, where several take the same part."""
        if id(values) not in self._changes:
            self._changes[id(values)] = values, changes_of(values)
        return self._changes[id(values)][1]

    def shifted(self, by: int, expr: Any) -> Value:
        """``q + by`` for every query, or, where ``expr`` is the same all through, every section."""
        if self.sections is not None and QUERY not in expr.xreplace(self._cut).free_symbols:
            return self.sections.starts.clamp_max(self.sizes[QUERY] - 1) + by
        return PerQuery(lambda rows: self._numbers(rows.start + by, rows.stop + by))

    def blocks(self) -> Iterator[Block]:
        """All queries, block by block."""
        return blocks(self.sizes[BATCH], self.sizes[QUERY], self.sections, self.device)

    # ------------------------------------------------------------ expressions

    def of(self, expr: Any) -> Value:
        """The value of an expression: integers or truth values."""
        if expr in self.offsets:
            return self.offsets[expr]
        if self.offsets and expr.free_symbols & self.offsets.keys():
            return self._compute(expr)
        if expr not in self._known:
            self._known[expr] = self._compute(expr)
        return self._known[expr]

    def _compute(self, expr: Any) -> Value:
        if expr == KEY:
            return self._numbers(0, self.sizes[KEY])
        if expr.is_Integer:
            return self.number(int(expr))
        if expr in (sympy.true, sympy.false):
            return torch.full((1, 1), bool(expr), device=self.device)
        if isinstance(expr, AppliedUndef):
            return self._look_up(expr)
        if isinstance(expr, sympy.floor):
            unit = denominator(expr.args[0])
            argument = self.of(sympy.expand(unit * expr.args[0]))
            return apply(lambda x: x.div(unit, rounding_mode="floor"), argument)
        if isinstance(expr, sympy.Abs):
            return apply(torch.abs, self.of(expr.args[0]))
        if isinstance(expr, sympy.Piecewise):
            (one, condition), (other, _) = expr.args
            return apply(torch.where, *map(self.of, (condition, one, other)))
        if isinstance(expr, sympy.Not):
            return apply(torch.logical_not, self.of(expr.args[0]))
        return reduce(partial(apply, _FOLDED[expr.func]), map(self.of, expr.args))

    def _look_up(self, look_up: AppliedUndef) -> Value:
        """The table at its indices; a part of the table where that is all it takes."""
        part = self._part(look_up)
        if part is None:
            table = self.tensors[place_of(look_up)]
            return apply(
                lambda *indices: table[tuple(index.long() for index in indices)],
                *map(self.of, look_up.args),
            )
        if QUERY not in look_up.free_symbols:
            return part
        if look_up in self._cut and self.sections is not None:
            return self.sections.first_of(part)
        return PerQuery(lambda rows: part[:, rows])

    def _part(self, look_up: AppliedUndef) -> Tensor | None:
        """What is looked up in order, [B|1, queries or keys]; None where nothing is."""
        place = place_of(look_up)
        table = self.tensors[place]
        found = [self._start(*index) for index in zip(look_up.args, table.shape, strict=True)]
        symbols = [symbol for symbol, _ in found]
        if symbols not in ([BATCH, QUERY], [BATCH, KEY], [QUERY], [KEY]):
            return None
        ranges = tuple((start, self.sizes[symbol]) for symbol, start in found)
        if (place, ranges) not in self._parts:
            for dim, inside in enumerate(ranges):
                table = table.narrow(dim, *inside)
            self._parts[place, ranges] = table if table.dim() == 2 else table.unsqueeze(0)
        return self._parts[place, ranges]

    def _start(self, index: Any, size: int) -> tuple[Any, int]:
        """(symbol, n) of an index ``symbol + n`` that stays inside; else no symbol."""
        for symbol, count in self.sizes.items():
            start = index - symbol
            if start.is_Integer and 0 <= start <= size - count:
                return symbol, int(start)
        return None, 0


def place_of(look_up: AppliedUndef) -> int:
    """Which tensor it looks something up in."""
    return int(look_up.func.__name__[1:])


def denominator(expr: Any) -> int:
    """The least number that makes every coefficient of a sum an integer."""
    terms = sympy.Add.make_args(sympy.expand(expr))
    return int(sympy.ilcm(*(term.as_coeff_Mul()[0].q for term in terms), 1))
