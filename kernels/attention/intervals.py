"""``mllm::mask_intervals``: the keys that queries see by a mask predicate, as intervals.

A predicate's rule (``algebra``) is followed query by query: from all keys, every part of it narrows
the piece [start, end) that is left, or splits it. All is O(queries + keys) tensor code of static
shapes. Rules on columns hold under conditions on the values; ``mllm::mask_fits`` checks them, once
per batch and on the host, and ``mllm::mask_intervals`` relies on them.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from mllm_compile.kernels.attention import rules
from mllm_compile.kernels.attention.algebra import rule_of as stated_rule
from mllm_compile.kernels.attention.mask import PREDICATES
from mllm_compile.kernels.attention.per_query import PerQuery, Value, apply
from mllm_compile.kernels.attention.pieces import Pieces
from mllm_compile.kernels.attention.symbolic import BATCH, OutsideAlgebra, expression
from mllm_compile.kernels.attention.unions import fit, joined

MOST = 2


@lru_cache(maxsize=4096)
def _analysed(key: int, kinds: tuple[tuple[Any, torch.dtype], ...]) -> tuple[Any, rules.Rule]:
    tensors = [torch.empty((), dtype=dtype).expand(shape) for shape, dtype in kinds]
    truth = expression(PREDICATES[key], tensors)
    return truth, stated_rule(truth)


def rule_of(key: int, tensors: Sequence[Tensor]) -> rules.Rule:
    """The rule of a registered predicate. OutsideAlgebra says why there is none."""
    return _analysed(key, _kinds(tensors))[1]


def _kinds(tensors: Sequence[Tensor]) -> tuple[tuple[Any, torch.dtype], ...]:
    return tuple((tuple(map(int, x.shape)), x.dtype) for x in tensors)


def rests_on_values(key: int, tensors: Sequence[Tensor]) -> bool:
    """Whether one interval per query may be too few, or wrong, for some values of the tensors."""
    rule = rule_of(key, tensors)
    return not (rules.is_certain(rule) and rules.num_pieces(rule) == 1)


def intervals_needed(
    tensors: Sequence[Tensor], key: int, batch: int, queries: int, keys: int
) -> int:
    """How many intervals per query it takes, 1 or 2. OutsideAlgebra says why not even 2 do."""
    rule = rule_of(key, tensors)
    broken: list[str] = []
    for count in range(1, MOST + 1):
        broken = _broken(rule, tensors, count, (batch, queries, keys))
        if not broken:
            return count
    raise OutsideAlgebra(broken[0])


def _broken(
    rule: rules.Rule, tensors: Sequence[Tensor], count: int, sizes: tuple[int, int, int]
) -> list[str]:
    """The conditions that ``count`` intervals per query need and the values do not meet.

    Equal values that are not contiguous do no harm where others fill the gaps: where the widest
    pieces have the same union.
    """
    if 0 in sizes:
        return []
    device = tensors[0].device if tensors else torch.device("cpu")
    pieces = Pieces(rule, tensors, sizes, device, count, checked=True)
    broken = _failed(pieces, _conditions(pieces))
    if not broken or rules.is_certain(rule):
        return broken
    widest = Pieces(rule, tensors, sizes, device, count, checked=True, widest=True)
    edges = (joined(x.found, count, x.keys) for x in (pieces, widest))
    same = [("", apply(torch.eq, one, other)) for one, other in zip(*edges, strict=True)]
    return broken if _failed(widest, [*_conditions(widest), *same]) else []


def _conditions(pieces: Pieces) -> list[tuple[str, Value]]:
    if len(pieces.found) <= pieces.count:
        return pieces.conditions
    many = f"queries see more than {pieces.count} separate runs of keys"
    return [*pieces.conditions, (many, fit(pieces.found, pieces.count, pieces.keys))]


def _failed(pieces: Pieces, conditions: Sequence[tuple[str, Value]]) -> list[str]:
    """What is wrong for some query."""
    broken = [why for why, holds in conditions if isinstance(holds, Tensor) and not _all(holds)]
    left = [(why, holds) for why, holds in conditions if isinstance(holds, PerQuery)]
    for block in pieces.values.blocks() if left else ():
        broken = broken or [why for why, holds in left if not _all(block.of(holds))]
    return broken


def _all(truth: Tensor) -> bool:
    return int(truth.count_nonzero()) == truth.numel()


@torch.library.custom_op("mllm::mask_fits", mutates_args=())
def mask_fits(
    tensors: list[Tensor], key: int, count: int, batch: int, queries: int, keys: int
) -> Tensor:
    """Whether ``count`` intervals per query say what predicate ``key`` does: one truth value.

    It reads values on the host.
    """
    with torch.no_grad():
        broken = _broken(rule_of(key, tensors), tensors, count, (batch, queries, keys))
        return torch.tensor(not broken)


@mask_fits.register_fake
def _(tensors: list[Tensor], key: int, count: int, batch: int, queries: int, keys: int) -> Tensor:
    return torch.empty((), dtype=torch.bool)


@torch.library.custom_op("mllm::mask_intervals", mutates_args=())
def mask_intervals(
    tensors: list[Tensor],
    key: int,
    count: int,
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Tensor:
    """The intervals of predicate ``key`` over its tensors: int32 [B|1, queries, count, 2].

    Dim 0 is one where no sample differs. They are right wherever ``mask_fits`` is true.
    """
    with torch.no_grad():
        rule = rule_of(key, tensors)
        samples = _samples(key, tensors, batch)
        if 0 in (queries, keys):
            return torch.zeros(samples, queries, count, 2, dtype=torch.int32, device=device)
        pieces = Pieces(rule, tensors, (batch, queries, keys), device, count)
        edges = joined(pieces.found, count, keys)
        out = torch.empty(samples, queries, count, 2, dtype=torch.int32, device=device)
        flat = out.view(samples, queries, 2 * count)
        for block in pieces.values.blocks():
            for place, edge in enumerate(edges):
                flat[:, block.rows, place] = block.of(edge)
        return out


@mask_intervals.register_fake
def _(
    tensors: list[Tensor],
    key: int,
    count: int,
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Tensor:
    samples = _samples(key, tensors, batch)
    return torch.empty(samples, queries, count, 2, dtype=torch.int32, device=device)


def _samples(key: int, tensors: Sequence[Tensor], batch: int) -> int:
    return batch if BATCH in _analysed(key, _kinds(tensors))[0].free_symbols else 1
