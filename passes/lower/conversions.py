"""Decide by which conversions, one axis each, a value gets from one layout to another.

Where two axes divide one factor of a dim the inner one divides what the outer one left: before the
outer one changes, the inner one steps aside (to R), and comes back afterwards. Of all orders of the
axes the one that moves least is taken, backward included. It depends on global sizes alone: all
ranks of a stage must take the same.
"""

from functools import lru_cache
from itertools import permutations
from math import prod

from mllm_compile.compiler.layout import Layout, R, adjoint
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.sharding import Layouts

Step = tuple[int, Layouts, Layouts]
"""The axis that changes, the layouts before and after."""

Cost = tuple[float, int]
"""Elements that every rank sends, and the number of conversions."""


@lru_cache(maxsize=65536)
def path(
    have: Layouts, want: Layouts, shape: tuple[int, ...], axes: tuple[MeshAxis, ...], grad: bool
) -> tuple[Cost, tuple[Step, ...]]:
    """The cheapest conversions from ``have`` to ``want`` of a value of this (global) shape."""
    changed = [at for at in range(len(axes)) if have[at] != want[at]]
    found = []
    for order in permutations(changed):
        steps = _steps(have, want, order)
        moved = sum(_moved(step, shape, axes, grad) for step in steps)
        found.append(((moved, len(steps)), steps))
    return min(found, key=lambda item: item[0])


def _steps(have: Layouts, want: Layouts, order: tuple[int, ...]) -> tuple[Step, ...]:
    state, steps = list(have), []

    def change(at: int, layout: Layout) -> None:
        before = tuple(state)
        state[at] = layout
        steps.append((at, before, tuple(state)))

    def move(at: int) -> None:
        for inner in reversed(range(at + 1, len(state))):
            if any(_same_factor(state[inner], layout) for layout in (state[at], want[at])):
                change(inner, R)
        change(at, want[at])

    for at in (*order, *range(len(have))):
        if state[at] != want[at]:
            move(at)
    return tuple(steps)


def _same_factor(one: Layout, other: Layout) -> bool:
    return one.divided and other.divided and (one.dim, one.outer) == (other.dim, other.outer)


def _moved(step: Step, shape: tuple[int, ...], axes: tuple[MeshAxis, ...], grad: bool) -> float:
    """Elements that every rank sends in this step, and in its adjoint if there is one."""
    at, before, after = step
    sizes = [prod(shape) / _ways(layouts, axes) for layouts in (before, after)]
    moved = _sent(before[at], after[at], *sizes)
    if grad:
        moved += _sent(*adjoint(before[at], after[at]), *reversed(sizes))
    return moved * (axes[at].size - 1) / axes[at].size


def _ways(layouts: Layouts, axes: tuple[MeshAxis, ...]) -> int:
    pairs = zip(layouts, axes, strict=True)
    return prod(axis.size for layout, axis in pairs if layout.divided)


def _sent(have: Layout, want: Layout, before: float, after: float) -> float:
    """What a ring sends for the collective, of local sizes before and after; times n / (n - 1)."""
    if have.kind == "P" and want.kind in "RV":
        return 2 * before
    if have.kind == "P":
        return before
    if have.divided and want.kind in "RV":
        return after
    return before if have.divided and want.divided else 0.0
