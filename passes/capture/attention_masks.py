"""What the mask of an attention becomes: key intervals, or a dense mask and the reason for it.

Intervals may hold for some values of a mask's tensors only. Then the values of the batch at hand
are looked at, and that they fit becomes a guard: another batch, for which they would be wrong, has
a program of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mllm_compile.kernels.attention import mask as predicates
from mllm_compile.kernels.attention.intervals import (
    intervals_needed,
    mask_fits,
    mask_intervals,
    rests_on_values,
)
from mllm_compile.kernels.attention.symbolic import OutsideAlgebra


@dataclass(frozen=True, slots=True)
class Facts:
    """What can be known while a model runs; outside of a trace, everything.

    ``value`` of a tensor, None where it depends on parameters. ``hold`` notes that a truth value
    is true, and that the program depends on it.
    """

    value: Callable[[Tensor], Tensor | None] = lambda tensor: tensor
    hold: Callable[[Tensor], None] = lambda truth: None


ALL_KNOWN = Facts()


@dataclass(frozen=True, slots=True)
class Mask:
    """``dense`` [batch, 1, queries, keys], and ``intervals`` for the same; if None, ``reason``.

    ``blind`` if a query may see no key, where that was asked for.
    """

    dense: Tensor
    intervals: Tensor | None
    reason: str
    blind: bool = False


def make(
    rule: predicates.Predicate,
    tensors: list[Tensor],
    shape: tuple[int, int, int],
    device: torch.device,
    facts: Facts,
    eager: bool = False,
) -> Mask:
    """The mask of a predicate for (batch, queries, keys); what is not used is dropped later.

    ``eager`` asks whether a query may see no key.
    """
    key = predicates.register(rule)

    def dense(given: list[Tensor]) -> Tensor:
        found: Tensor = predicates.mask(given, key, *shape, device)
        return found

    def intervals(given: list[Tensor]) -> Tensor:
        found: Tensor = mask_intervals(given, key, count, *shape, device)
        return found

    try:
        count = _count(tensors, key, shape, facts)
    except OutsideAlgebra as error:
        made = dense(tensors)
        return Mask(made, None, str(error), eager and _blind(dense, made, tensors, facts))
    made = intervals(tensors)
    return Mask(dense(tensors), made, "", eager and _blind(intervals, made, tensors, facts))


def _blind(
    make: Callable[[list[Tensor]], Tensor], made: Tensor, tensors: list[Tensor], facts: Facts
) -> bool:
    """``blind`` of a mask by the values of its tensors; without any it is of no batch."""
    try:
        values = _values(tensors, facts)
    except OutsideAlgebra:
        return True
    with torch.utils._python_dispatch._disable_current_modes():
        value = make(values)
    return blind(made, facts if tensors else Facts(), value)


def _count(tensors: list[Tensor], key: int, shape: tuple[int, int, int], facts: Facts) -> int:
    """How many intervals per query it takes. OutsideAlgebra says why none do."""
    if not rests_on_values(key, tensors):
        return 1
    values = _values(tensors, facts)
    with torch.utils._python_dispatch._disable_current_modes():
        count = intervals_needed(values, key, *shape)
    if tensors:
        facts.hold(mask_fits(tensors, key, count, *shape))
    return count


def blind(seen: Tensor, facts: Facts, value: Tensor | None = None) -> bool:
    """Whether a query may see no key at all; that none does becomes a guard.

    Args:
        seen: which pairs may attend, boolean or as numbers that are added to scores, [..., keys];
            or int32 intervals [..., n, 2].
        facts: of the model that runs.
        value: of ``seen``, where ``facts`` do not have it.

    """
    value = facts.value(seen) if value is None else value
    if value is None or value.is_meta:
        return True
    with torch.utils._python_dispatch._disable_current_modes():
        if not _every_query_sees(value).all():
            return True
    facts.hold(_every_query_sees(seen).all())
    return False


def _every_query_sees(seen: Tensor) -> Tensor:
    if seen.dtype is torch.int32:
        return (seen[..., 1] > seen[..., 0]).any(-1)
    if seen.is_floating_point():
        return seen.amax(-1) > torch.finfo(seen.dtype).min
    return seen.any(-1)


def _values(tensors: Sequence[Tensor], facts: Facts) -> list[Tensor]:
    found = [facts.value(tensor) for tensor in tensors]
    if any(value is None or value.is_meta for value in found):
        raise OutsideAlgebra("it depends on values that are not known before the model runs")
    return [value for value in found if value is not None]
