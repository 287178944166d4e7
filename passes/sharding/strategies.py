"""The ways to run one operator along one mesh axis, all derived from its factors.

*whole*: everything is R. *whole/V*: everything is V, as in a chain of weights whose readers are
divided. One for every factor that may be divided: arguments without it are V (R where no gradient
flows), results without it P; additive arguments are P where the results are. *linear*: partial sums
pass through an operator that is linear in them. Tensors of an operator without a rule are whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from mllm_compile.compiler.derivative import edges_of
from mllm_compile.compiler.graph import is_element, tensors_of
from mllm_compile.compiler.layout import Layout, P, R, S, V
from mllm_compile.compiler.mesh import MeshAxis
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.sharding import Strategy
from mllm_compile.passes.sharding.factors import Dims, Factors

UNEVEN = "context"
"""The axis whose ranks may hold different numbers of elements, none among them."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Over which arguments, and into which results, of a node a gradient flows."""

    inputs: tuple[bool, ...]
    results: tuple[bool, ...]

    @staticmethod
    def of(node: fx.Node, plan: Plan) -> "Gradients":
        """Read the plan; results that cannot have a gradient have none."""
        sources = node.all_input_nodes if is_element(node) else edges_of(node)
        reached = node.name in plan.needs_grad
        return Gradients(
            tuple((source.name, node.name) in plan.grad_edges for source in sources),
            tuple(
                reached and item is not None and (item.is_floating_point() or item.is_complex())
                for item in tensors_of(node)
            ),
        )


def strategies(
    factors: Factors | None,
    axis: MeshAxis,
    gradients: Gradients,
    outer: Sequence[tuple[MeshAxis, Strategy]] = (),
) -> tuple[Strategy, ...]:
    """Every way to run a node along ``axis``; layouts are in the order of its rule.

    ``factors`` is None without a rule. ``outer`` holds what was decided for this node on the axes
    outside of this one: a factor that they divide must divide evenly once more. Special operators
    are divided along one axis alone, and into equal blocks.
    """
    count, results = len(gradients.inputs), len(gradients.results)
    found = [
        Strategy("whole", (R,) * count, (R,) * results),
        Strategy("whole/V", (V,) * count, (V,) * results),
    ]
    if factors is not None:
        found += _divided(factors, axis, outer)
        found += _linear(factors, results)
    unique: dict[tuple[tuple[Layout, ...], ...], Strategy] = {}
    for strategy in found:
        inputs = _without_idle(strategy.inputs, gradients.inputs)
        outputs = _without_idle(strategy.outputs, gradients.results)
        known = Strategy(strategy.name, inputs, outputs, strategy.special)
        unique.setdefault((inputs, outputs), known)
    return tuple(unique.values())


def layouts(
    parts: Sequence[Sequence[int]],
    axis: MeshAxis,
    gradient: bool,
    outer: Sequence[tuple[MeshAxis, Layout]] = (),
) -> tuple[Layout, ...]:
    """The layouts in which a stage may hold a parameter: R, V (if trained), S of every part.

    ``parts``: for every dim the sizes of its parts, the outer one first (``Refinement.parts``).
    ``outer``: the layouts of the same value on the axes outside of this one. A value that crosses
    a boundary takes the same ones but V.
    """
    found = [R, V] if gradient else [R]
    for dim, sizes in enumerate(parts):
        outside = 1
        for size in sizes:
            nested = [
                other
                for other, layout in outer
                if layout.divided and (layout.dim, layout.outer) == (dim, outside)
            ]
            if _divides(size, axis, nested):
                found.append(S(dim, outside, _size(size, axis)))
            outside *= size
    return tuple(found)


def _without_idle(given: Sequence[Layout], gradients: Sequence[bool]) -> tuple[Layout, ...]:
    """V is R where no gradient flows."""
    return tuple(
        R if layout == V and not gradient else layout
        for layout, gradient in zip(given, gradients, strict=True)
    )


def _divided(
    factors: Factors, axis: MeshAxis, outer: Sequence[tuple[MeshAxis, Strategy]]
) -> Iterator[Strategy]:
    taken = {strategy.name for _, strategy in outer if strategy.special}
    for factor, size in factors.sizes.items():
        special = factor if factor in factors.special else ""
        nested = [other for other, strategy in outer if strategy.name == factor]
        refused = special and (taken or axis.name == UNEVEN)
        if (
            factor in factors.whole
            or factor in taken
            or refused
            or not _divides(size, axis, nested)
        ):
            continue

        def layout(dims: Dims, name: str = factor) -> Layout | None:
            place = factors.place(dims, name)
            return None if place is None else S(*place, _size(factors.sizes[name], axis))

        outputs = [layout(dims) for dims in factors.results]
        summed = not any(outputs)
        inputs = [
            layout(dims) or (P if summed and index in factors.additive else V)
            for index, dims in enumerate(factors.inputs)
        ]
        yield Strategy(factor, tuple(inputs), tuple(found or P for found in outputs), special)


def _linear(factors: Factors, results: int) -> Iterator[Strategy]:
    for group in factors.linear:
        inputs = tuple(P if i in group else V for i in range(len(factors.inputs)))
        yield Strategy("linear", inputs, (P,) * results)


def _size(size: int, axis: MeshAxis) -> int:
    """How a layout names the divided extent: equal regions must be equal layouts."""
    return size if axis.name == UNEVEN else axis.size


def _divides(size: int, axis: MeshAxis, nested: Sequence[MeshAxis]) -> bool:
    """Whether the axis can divide what the axes outside of it left of ``size`` elements."""
    if size < 2:
        return False
    pieces = {size}
    for other in nested:
        pieces = {part for piece in pieces for part in other.split(piece).sizes}
    uneven = axis.name == UNEVEN and not nested
    return uneven or all(piece % axis.size == 0 for piece in pieces)
