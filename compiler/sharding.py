"""What the shard pass decides: how every node of a module runs on the axes of its mesh."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mllm_compile.compiler.layout import Layout, R
from mllm_compile.compiler.mesh import MeshAxis

Layouts = tuple[Layout, ...]
"""One layout for every axis of a Sharding, in its order (the outer axis first)."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run one operator along one axis: layouts of its tensor arguments and results.

    ``name`` is the divided factor, or ``whole``, ``whole/V``, ``linear``. ``special`` names the
    factor that needs an operator of its own (a divided vocabulary, say); the plain operator runs
    on local values otherwise.
    """

    name: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    special: str = ""


@dataclass(frozen=True)
class Sharding:
    """Decisions for all stages of one module; names are those of ``captured.main``.

    ``strategies``: for every node that the module runs (placed ones, not replicas), one strategy
    per axis. ``layouts`` of what a stage takes in: parameters by placeholder name, and values that
    cross a boundary into or within the module, as they arrive. ``sent``: the layout in which a
    value leaves a stage of this module. Whatever is not named is whole (R): replicated nodes,
    buffers, batch entries. Layouts at boundaries are R or S. ``notes`` say, for people, what runs
    whole and what that costs.
    """

    axes: tuple[MeshAxis, ...] = ()
    strategies: Mapping[str, tuple[Strategy, ...]] = field(default_factory=dict)
    layouts: Mapping[str, Layouts] = field(default_factory=dict)
    sent: Mapping[str, Layouts] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> Layouts:
        """R on every axis."""
        return (R,) * len(self.axes)
