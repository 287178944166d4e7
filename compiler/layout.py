"""How one value stands on the ranks of one mesh axis: four layouts, one law.

=================  ==========================================  ====================================
layout             the value                                   its gradient (the dual layout)
=================  ==========================================  ====================================
``R``              the same on every rank                      the same on every rank (``R``)
``V``              the same on every rank                      a partial sum (``P``)
``P``              a partial sum: the value is the sum         the same on every rank (``V``)
``S(dim, outer)``  divided along ``dim``                       divided alike (``S``)
=================  ==========================================  ====================================

A conversion of a value from layout a to layout b has the conversion of its gradient from b* to a*
as its adjoint. Every collective of a program, forward and backward, follows from this line.
"""

import re
from dataclasses import dataclass
from typing import Literal

from mllm_compile.compiler.errors import PlanError, explain

Kind = Literal["R", "V", "P", "S"]
_TEXT = re.compile(r"S\((\d+),(\d+),(\d+)\)")
_DUAL: dict[Kind, Kind] = {"R": "R", "V": "P", "P": "V", "S": "S"}


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A layout; only ``S`` has the three numbers.

    Dim ``dim`` is seen as ``[outer, size, unit]`` (unit is what remains): of the ``size`` elements
    in the middle every rank holds those that the axis' split of ``size`` elements gives it. So in
    a flattened ``[B*S]``, ``S(0, 1, B)`` divides samples and ``S(0, B, S)`` tokens.
    """

    kind: Kind
    dim: int = 0
    outer: int = 1
    size: int = 0

    def __post_init__(self) -> None:
        if self.kind == "S":
            legal = self.dim >= 0 and self.outer >= 1 and self.size >= 0
        else:
            legal = self.kind in _DUAL and (self.dim, self.outer, self.size) == (0, 1, 0)
        if not legal:
            raise PlanError(explain(f"layout {self}", expected="R, V, P or S(dim,outer,size)"))

    def __str__(self) -> str:
        """``R``, ``V``, ``P`` or ``S(dim,outer,size)``."""
        return f"S({self.dim},{self.outer},{self.size})" if self.kind == "S" else self.kind

    @staticmethod
    def parse(text: str) -> "Layout":
        """The inverse of ``str``."""
        if text in ("R", "V", "P"):
            return Layout(text)  # type: ignore[arg-type]
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(explain(f"layout {text!r}", expected="R, V, P or S(dim,outer,size)"))
        return Layout("S", *map(int, match.groups()))

    @property
    def dual(self) -> "Layout":
        """The layout of the gradient of a value that has this one."""
        return Layout(_DUAL[self.kind], self.dim, self.outer, self.size)

    @property
    def divided(self) -> bool:
        """Whether ranks hold different parts of the value."""
        return self.kind == "S"


R, V, P = Layout("R"), Layout("V"), Layout("P")


def S(dim: int, outer: int, size: int) -> Layout:
    """Divided along ``dim``, seen as [outer, size, rest]."""
    return Layout("S", dim, outer, size)


def adjoint(have: Layout, want: Layout) -> tuple[Layout, Layout]:
    """The conversion (from, to) of the gradient, for a conversion of the value."""
    return want.dual, have.dual
