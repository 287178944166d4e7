"""A mask predicate as an expression: truth over the symbols b, q, k and look-ups in its tensors.

The predicate is called once, on tensors of one element that stand for the indices, and every
operator it uses adds to the expression of its result. A look-up in tensor i is ``t<i>(indices)``,
an integer; truth values stored in a tensor are ``t<i>(indices) != 0``.
"""

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from mllm_compile.kernels.attention.mask import Predicate, all_dispatch_keys, bind

BATCH, HEAD, QUERY, KEY = sympy.symbols("b h q k", integer=True, nonnegative=True)
aten = torch.ops.aten


class OutsideAlgebra(Exception):
    """Why a predicate, or the values of its tensors, do not give intervals."""


def expression(predicate: Predicate, tensors: Sequence[Tensor]) -> Boolean:
    """What ``predicate`` says of a pair; of ``tensors`` only shapes and dtypes are read.

    OutsideAlgebra names the first operator that has no expression.
    """
    with _disable_current_modes(), all_dispatch_keys(), torch.no_grad():
        stand_ins = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in tensors]
        truth = _called(predicate, stand_ins)
    if HEAD in truth.free_symbols:
        raise OutsideAlgebra("heads see different keys")
    return truth


def _called(predicate: Predicate, stand_ins: Sequence[Tensor]) -> Boolean:
    with _Expressions() as known:
        for place, stand_in in enumerate(stand_ins):
            known.tables[stand_in] = place
        indices = [known.stand_for(symbol) for symbol in (BATCH, HEAD, QUERY, KEY)]
        indices[2] = indices[2] + predicate.query_offset
        indices[3] = indices[3] + predicate.key_offset
        function = bind(predicate.function, stand_ins[: predicate.num_tensors])
        try:
            result = function(*indices)
        except OutsideAlgebra:
            raise
        except Exception as error:
            raise OutsideAlgebra(f"{type(error).__name__} on single indices") from error
        truth = sympy.true if result is True else _truth(known.of(torch.as_tensor(result)))
        if predicate.padded:
            padding = known.look_up(stand_ins[-1], (indices[0], indices[3]))
            truth = sympy.And(truth, _truth(padding))
    return truth


class _Expressions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The expression of every tensor that an operator makes while this is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: Any = WeakIdKeyDictionary()
        self.tables: Any = WeakIdKeyDictionary()

    def stand_for(self, symbol: sympy.Symbol) -> Tensor:
        index = torch.zeros(1, dtype=torch.int64)
        self.made[index] = symbol
        return index

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        operator = func.overloadpacket
        if operator is aten.index:
            self.made[out] = self.look_up(*args)
        elif operator in CONSTANTS:
            return out  # without an expression it is its value
        elif operator is aten.bitwise_not and out.dtype is not torch.bool:
            raise OutsideAlgebra("bits of numbers")
        elif operator in RULES:
            named = {name: _literal(x) for name, x in (kwargs or {}).items()}
            values = [self.of(x) if isinstance(x, Tensor) else _literal(x) for x in args]
            self.made[out] = RULES[operator](*values, **named)
        elif operator in CASTS and not out.is_floating_point():
            value = self.of(args[0])
            self.made[out] = _truth(value) if out.dtype is torch.bool else value
        elif isinstance(out, Tensor):
            raise OutsideAlgebra(f"{func}")
        return out

    def of(self, tensor: Tensor) -> Any:
        """The expression of a tensor: as it was made, or the one number that it holds."""
        if tensor in self.made:
            return self.made[tensor]
        if tensor in self.tables or tensor.numel() != 1 or tensor.is_floating_point():
            raise OutsideAlgebra(f"{tensor.dtype} {list(tensor.shape)} is used as a whole")
        with _disable_current_modes():
            return _literal(tensor.item())

    def look_up(self, table: Tensor, indices: Sequence[Tensor | None]) -> Any:
        place = self.tables.get(table)
        if place is None or table.is_floating_point():
            raise OutsideAlgebra("a look-up in something that is no integer tensor of its own")
        if len(indices) != table.dim() or any(index is None for index in indices):
            raise OutsideAlgebra(f"a look-up of whole rows of {list(table.shape)}")
        found = sympy.Function(f"t{place}", integer=True)(*(self.of(x) for x in indices))  # type: ignore[arg-type]
        return _truth(found) if table.dtype is torch.bool else found


def _literal(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    if isinstance(value, int):
        return sympy.Integer(value)
    if isinstance(value, float) and math.isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    raise OutsideAlgebra(f"{value!r} among the arguments of an operator")


def _is_truth(value: Any) -> bool:
    return isinstance(value, Boolean) and not isinstance(value, sympy.Expr)


def _truth(value: Any) -> Boolean:
    return value if _is_truth(value) else sympy.Ne(value, 0)


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on numbers; truth values are none."""

    def rule(*values: Any, alpha: int = 1) -> Any:
        if any(map(_is_truth, values)):
            raise OutsideAlgebra("truth values are used as numbers")
        return function(*values[:1], *(value * alpha for value in values[1:]))

    return rule


def _logic(function: Callable[..., Any], *, negated: bool = False) -> Callable[..., Any]:
    def rule(*values: Any) -> Any:
        if not all(map(_is_truth, values)):
            raise OutsideAlgebra("bits of numbers")
        return sympy.Not(function(*values)) if negated else function(*values)

    return rule


def _same(one: Any, other: Any) -> Any:
    if not (_is_truth(one) or _is_truth(other)):
        return sympy.Eq(one, other)
    (yes, no), (also, neither) = _one_or_zero(one), _one_or_zero(other)
    return sympy.Or(sympy.And(yes, also), sympy.And(no, neither))


def _one_or_zero(value: Any) -> tuple[Boolean, Boolean]:
    """Whether it is what true is as a number, and what false is."""
    if _is_truth(value):
        return value, sympy.Not(value)
    return sympy.Eq(value, 1), sympy.Eq(value, 0)


def _multiplied(one: Any, other: Any) -> Any:
    return (
        sympy.And(one, other) if _is_truth(one) and _is_truth(other) else _numbers(mul)(one, other)
    )


def _clamped(value: Any, low: Any = None, high: Any = None, **limits: Any) -> Any:
    low, high = limits.get("min", low), limits.get("max", high)
    value = value if low is None else _numbers(sympy.Max)(value, low)
    return value if high is None else _numbers(sympy.Min)(value, high)


def _floor_divided(value: Any, divisor: Any) -> Any:
    if not (divisor.is_Integer and divisor > 0):
        raise OutsideAlgebra(f"a division by {divisor}")
    return sympy.floor(value / divisor)


def _divided(value: Any, divisor: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        raise OutsideAlgebra("a division that does not round")
    divided = _numbers(_floor_divided)
    if rounding_mode == "floor" or value.is_nonnegative:
        return divided(value, divisor)
    return divided(sympy.Max(value, 0), divisor) - divided(sympy.Max(-value, 0), divisor)


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    if not _is_truth(one) and not _is_truth(other):
        return sympy.Piecewise((one, _truth(condition)), (other, True))
    if not (_is_truth(one) and _is_truth(other)):
        raise OutsideAlgebra("a choice between a number and a truth value")
    return sympy.Or(sympy.And(condition, one), sympy.And(sympy.Not(condition), other))


CONSTANTS = {
    aten.new_zeros, aten.new_ones, aten.zeros, aten.ones, aten.full, aten.scalar_tensor,
    aten.lift_fresh, aten.lift_fresh_copy, aten.arange,
}  # fmt: skip
CASTS = {aten._to_copy, aten.clone, aten.alias, aten.detach}
RULES: dict[Any, Callable[..., Any]] = {
    aten.add: _numbers(lambda x, y: x + y),
    aten.sub: _numbers(lambda x, y: x - y),
    aten.rsub: _numbers(lambda x, y: y - x),
    aten.mul: _multiplied,
    aten.neg: _numbers(lambda x: -x),
    aten.abs: _numbers(sympy.Abs),
    aten.maximum: _numbers(sympy.Max),
    aten.minimum: _numbers(sympy.Min),
    aten.clamp: _clamped,
    aten.clamp_min: _numbers(sympy.Max),
    aten.clamp_max: _numbers(sympy.Min),
    aten.floor_divide: _numbers(_floor_divided),
    aten.div: _divided,
    aten.remainder: _numbers(lambda x, y: x - y * _floor_divided(x, y)),
    aten.le: _numbers(sympy.Le),
    aten.lt: _numbers(sympy.Lt),
    aten.ge: _numbers(sympy.Ge),
    aten.gt: _numbers(sympy.Gt),
    aten.eq: _same,
    aten.ne: lambda x, y: sympy.Not(_same(x, y)),
    aten.where: _chosen,
    aten.logical_and: lambda x, y: sympy.And(_truth(x), _truth(y)),
    aten.logical_or: lambda x, y: sympy.Or(_truth(x), _truth(y)),
    aten.logical_xor: lambda x, y: sympy.Xor(_truth(x), _truth(y)),
    aten.logical_not: lambda x: sympy.Not(_truth(x)),
    aten.bitwise_and: _logic(sympy.And),
    aten.bitwise_or: _logic(sympy.Or),
    aten.bitwise_xor: _logic(sympy.Xor),
    aten.bitwise_not: _logic(sympy.Not),
    aten.__and__: _logic(sympy.And),
    aten.__or__: _logic(sympy.Or),
}
