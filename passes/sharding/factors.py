"""Factor notation: what an operator does to the dims of its tensors, in one line.

``"+n, m k, k n -> m n | 0+1; 0+2"`` is ``addmm``: before the arrow its tensor arguments, behind it
its results, dim by dim. A *factor* is a named extent; equal names run together. A factor that no
result has is summed over.

========== =====================================================================================
``(g r)``  a dim made of several factors, the outer one first; marks stand inside or behind
``1``      a dim of size one; so is, whatever stands there, every dim that has size one
``...``    any number of dims, aligned to the right as in broadcasting
``d!``     *whole*: never divided (the operator looks along it)
``v*``     *special*: divided by an operator of its own
``+n``     *additive* argument: added once to a result that may be a partial sum
``| 0; 1`` groups of arguments in each of which the operator is linear, jointly (``0+1``)
========== =====================================================================================
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import prod

from mllm_compile.compiler.errors import PlanError, explain

Shape = tuple[int, ...]
Dims = tuple[tuple[str, ...], ...]
"""For every dim of a tensor its factors, the outer one first; none where the size is one."""

_TOKEN = re.compile(r"\s*(\([^()]*\)[!*]?|\.\.\.|1(?!\w)|[A-Za-z]\w*[!*]?)")
_CELL = re.compile(r"([A-Za-z_]\w*)([!*]?)")


@dataclass(frozen=True)
class Factors:
    """The factors of one operator call: see the notation. ``sizes`` has all of them, in order."""

    inputs: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int] = field(hash=False)
    whole: frozenset[str] = frozenset()
    special: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()

    def place(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """(dim, product of the sizes of the factors outside of it), if the tensor has it."""
        for dim, names in enumerate(dims):
            if factor in names:
                outside = names[: names.index(factor)]
                return dim, prod(self.sizes[name] for name in outside)
        return None

    def divisible(self, factor: str) -> bool:
        """Whether ranks may hold parts of the factor at all."""
        return factor not in self.whole and self.sizes[factor] > 1

    def cut(self, points: Mapping[str, Sequence[int]]) -> "Factors":
        """Every factor in parts: ``{"m": (4,)}`` makes ``m`` of 12 into ``m.0`` 3 and ``m.1`` 4.

        A point is the number of elements inside of it; points divide each other and the size.
        """
        parts: dict[str, list[str]] = {}
        sizes: dict[str, int] = {}
        for name, size in self.sizes.items():
            chain = [size, *sorted(points.get(name, ()), reverse=True), 1]
            plain = len(chain) == 2
            parts[name] = [name] if plain else [f"{name}.{i}" for i in range(len(chain) - 1)]
            for part, (outer, inner) in zip(parts[name], pairwise(chain), strict=True):
                sizes[part] = outer // inner

        def renamed(tensors: tuple[Dims, ...]) -> tuple[Dims, ...]:
            return tuple(
                tuple(tuple(part for name in dim for part in parts[name]) for dim in dims)
                for dims in tensors
            )

        def marked(names: frozenset[str]) -> frozenset[str]:
            return frozenset(part for name in names for part in parts[name])

        return Factors(
            renamed(self.inputs),
            renamed(self.results),
            sizes,
            marked(self.whole),
            marked(self.special),
            self.additive,
            self.linear,
        )


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a rule beside its shape; ``dims`` still names factors of size one."""

    shape: Shape
    dims: Dims
    whole: frozenset[str]
    special: frozenset[str]


@lru_cache(maxsize=1 << 16)
def parse(text: str, inputs: tuple[Shape, ...], results: tuple[Shape, ...]) -> Factors:
    """Read a rule beside the shapes of its arguments and results.

    PlanError, with the rule, for text outside the notation and for shapes that contradict it.
    """
    body, _, groups = text.partition("|")
    left, _, right = body.partition("->")
    if "->" not in body or "->" in right:
        raise _wrong(text, "one arrow between arguments and results")
    sources, targets = left.split(",") if inputs else [], right.split(",")
    if (len(sources), len(targets)) != (len(inputs), len(results)) or (not inputs and left.strip()):
        raise _wrong(text, f"{len(inputs)} arguments and {len(results)} results")
    specs = [*(spec.strip().removeprefix("+") for spec in sources), *targets]
    pairs = zip(specs, (*inputs, *results), strict=True)
    tensors = [_tensor(text, spec, shape) for spec, shape in pairs]
    sizes = _sizes(text, tensors)
    dims = [_checked(text, tensor, sizes) for tensor in tensors]
    return Factors(
        tuple(dims[: len(inputs)]),
        tuple(dims[len(inputs) :]),
        {name: size for name, size in sizes.items() if size != 1},
        _proper(sizes, (tensor.whole for tensor in tensors)),
        _proper(sizes, (tensor.special for tensor in tensors)),
        frozenset(i for i, spec in enumerate(sources) if spec.strip().startswith("+")),
        _groups(text, groups, len(inputs)),
    )


def _wrong(text: str, expected: str, got: str = "") -> PlanError:
    return PlanError(explain(f"rule {text!r}", expected=expected, got=got))


def _proper(sizes: Mapping[str, int], marks: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset(name for names in marks for name in names if sizes[name] != 1)


def _groups(text: str, groups: str, inputs: int) -> tuple[frozenset[int], ...]:
    parts = [part.strip() for part in groups.split(";") if part.strip()]
    if any(re.fullmatch(r"\d+(\+\d+)*", part) is None for part in parts):
        raise _wrong(text, "groups of argument numbers, as in | 0+1; 2", repr(groups))
    found = tuple(frozenset(map(int, part.split("+"))) for part in parts)
    if any(number >= inputs for group in found for number in group):
        raise _wrong(text, f"groups of the {inputs} arguments", repr(groups))
    return found


def _tensor(text: str, spec: str, shape: Shape) -> _Tensor:
    tokens = _TOKEN.findall(spec)
    if _TOKEN.sub("", spec).strip():
        raise _wrong(text, "names, (a b), 1 and ..., with marks ! and *", repr(spec.strip()))
    if "..." in tokens:
        at, missing = tokens.index("..."), len(shape) - len(tokens) + 1
        tokens[at : at + 1] = [f"_{place}" for place in range(missing, 0, -1)]
    if len(tokens) != len(shape):
        raise _wrong(text, f"{len(tokens)} dims in {spec.strip()!r}", f"shape {shape}")
    cells = [(_CELL.findall(token), token[-1]) for token in tokens]
    dims = tuple(tuple(name for name, _ in names) for names, _ in cells)
    marks = [(name, mark or last) for names, last in cells for name, mark in names]
    whole = frozenset(name for name, mark in marks if mark == "!")
    special = frozenset(name for name, mark in marks if mark == "*")
    return _Tensor(shape, dims, whole, special)


def _sizes(text: str, tensors: Sequence[_Tensor]) -> dict[str, int]:
    """Solve for the size of every factor: those that stand alone first, then what remains."""
    sizes: dict[str, int | None] = {n: None for t in tensors for dim in t.dims for n in dim}
    pairs = [pair for t in tensors for pair in zip(t.dims, t.shape, strict=True)]
    for names, size in pairs:
        if len(names) == 1 and sizes[names[0]] in (None, 1):
            sizes[names[0]] = size
    for _ in sizes:
        for names, size in pairs:
            unknown = [name for name in names if sizes[name] is None]
            if len(unknown) == 1 and size != 1:
                known = prod(sizes[name] or 1 for name in names if name != unknown[0])
                sizes[unknown[0]] = size // known
    open_dims = {name for names, size in pairs if size != 1 for name in names}
    found = {
        n: 1 if size is None else size
        for n, size in sizes.items()
        if size is not None or n not in open_dims
    }
    if len(found) < len(sizes):
        raise _wrong(text, "the size of every factor", f"none of {sorted(set(sizes) - set(found))}")
    return found


def _checked(text: str, tensor: _Tensor, sizes: Mapping[str, int]) -> Dims:
    """The dims without factors of size one."""
    for names, size in zip(tensor.dims, tensor.shape, strict=True):
        if size not in (1, prod(sizes[name] for name in names)):
            expected = " * ".join(f"{name} {sizes[name]}" for name in names) or "size 1"
            raise _wrong(text, expected, f"a dim of {size} in {tensor.shape}")
    return tuple(
        tuple(name for name in names if sizes[name] != 1) if size != 1 else ()
        for names, size in zip(tensor.dims, tensor.shape, strict=True)
    )
