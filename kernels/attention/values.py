"""Values of expressions over b, q and k: tensors [batch, length] that may have size one in both.

Batch runs along dim 0, and queries or keys along dim 1, whichever the expression is of.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch import Tensor

from mllm_compile.kernels.attention.symbolic import BATCH, KEY, QUERY

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
        self.offsets: dict[sympy.Symbol, Tensor] = {}
        self._known: dict[Any, Tensor] = {
            BATCH: self.numbers(batch).unsqueeze(1),
            QUERY: self.numbers(queries).unsqueeze(0),
            KEY: self.numbers(keys).unsqueeze(0),
        }

    def numbers(self, count: int) -> Tensor:
        """int32 0, 1, … count - 1."""
        return torch.arange(count, dtype=torch.int32, device=self.device)

    def number(self, value: int) -> Tensor:
        """One int32."""
        return torch.full((1, 1), value, dtype=torch.int32, device=self.device)

    def of(self, expr: Any) -> Tensor:
        """The value of an expression: integers or truth values."""
        if expr in self.offsets:
            return self.offsets[expr]
        if expr.free_symbols & self.offsets.keys():
            return self._compute(expr)
        if expr not in self._known:
            self._known[expr] = self._compute(expr)
        return self._known[expr]

    def _compute(self, expr: Any) -> Tensor:
        if expr.is_Integer:
            return self.number(int(expr))
        if expr in (sympy.true, sympy.false):
            return torch.full((1, 1), bool(expr), device=self.device)
        if isinstance(expr, AppliedUndef):
            return self._look_up(self.tensors[int(expr.func.__name__[1:])], expr.args)
        if isinstance(expr, sympy.floor):
            unit = denominator(expr.args[0])
            return self.of(sympy.expand(unit * expr.args[0])).div(unit, rounding_mode="floor")
        if isinstance(expr, sympy.Abs):
            return self.of(expr.args[0]).abs()
        if isinstance(expr, sympy.Not):
            return ~self.of(expr.args[0])
        return reduce(_FOLDED[expr.func], map(self.of, expr.args))

    def _look_up(self, table: Tensor, indices: Sequence[Any]) -> Tensor:
        """``table[indices]``; a part of the table where that is all it takes."""
        starts = [
            self._start(index, size) for index, size in zip(indices, table.shape, strict=True)
        ]
        symbols = [symbol for symbol, _ in starts]
        if None in symbols or symbols not in ([BATCH, QUERY], [BATCH, KEY], [QUERY], [KEY]):
            return table[tuple(self.of(index).long() for index in indices)]
        for dim, (symbol, start) in enumerate(starts):
            table = table.narrow(dim, start, self.sizes[symbol])
        return table if table.dim() == 2 else table.unsqueeze(0)

    def _start(self, index: Any, size: int) -> tuple[Any, int]:
        """(symbol, n) of an index ``symbol + n`` that stays inside; else no symbol."""
        for symbol, count in self.sizes.items():
            start = index - symbol
            if start.is_Integer and 0 <= start <= size - count:
                return symbol, int(start)
        return None, 0


def denominator(expr: Any) -> int:
    """The least number that makes every coefficient of a sum an integer."""
    terms = sympy.Add.make_args(sympy.expand(expr))
    return int(sympy.ilcm(*(term.as_coeff_Mul()[0].q for term in terms), 1))
