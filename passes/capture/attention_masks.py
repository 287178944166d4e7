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
    """``dense`` [batch, 1, queries, keys], and ``intervals`` for the same; if None, ``reason``."""

    dense: Tensor
    intervals: Tensor | None
    reason: str


def make(
    rule: predicates.Predicate,
    tensors: list[Tensor],
    shape: tuple[int, int, int],
    device: torch.device,
    facts: Facts,
) -> Mask:
    """The mask of a predicate for (batch, queries, keys); what is not used is dropped later."""
    key = predicates.register(rule)
    dense: Tensor = predicates.mask(tensors, key, *shape, device)
    try:
        count = _count(tensors, key, shape, facts)
    except OutsideAlgebra as error:
        return Mask(dense, None, str(error))
    intervals: Tensor = mask_intervals(tensors, key, count, *shape, device)
    return Mask(dense, intervals, "")


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


def _values(tensors: Sequence[Tensor], facts: Facts) -> list[Tensor]:
    found = [facts.value(tensor) for tensor in tensors]
    if any(value is None or value.is_meta for value in found):
        raise OutsideAlgebra("it depends on values that are not known before the model runs")
    return [value for value in found if value is not None]
