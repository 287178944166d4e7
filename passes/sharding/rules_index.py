"""Rules of operators that look up or write by index: indexed dims are whole, index dims free."""

from collections.abc import Collection

import torch

from mllm_compile.compiler.graph import tensors_of
from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.factors import Shape
from mllm_compile.passes.sharding.rules_dims import dims_of, tensor


def _positions(call: Call) -> list[int] | None:
    """The indexed dims; None for boolean indices, whose results have sizes of the data."""
    found = []
    for dim, index in enumerate(call["indices"]):
        if isinstance(index, torch.fx.Node):
            values = tensors_of(index)[0]
            if values is None or values.dtype in (torch.bool, torch.uint8):
                return None
            found.append(dim)
    return found


def _indexed(
    shape: Shape, positions: Collection[int], indices: tuple[Shape, ...], mark: str
) -> tuple[str, list[str], list[str]]:
    """The indexed tensor, its index tensors, and the dims of what an index picks."""
    own = [f"i{n}{mark}" for n in range(max(map(len, indices)))]
    texts = [" ".join(own[len(own) - len(index) :]) for index in indices]
    first, last = min(positions), max(positions)
    rest = [(dim, f"x{dim}") for dim in range(len(shape)) if dim not in positions]
    together = last - first + 1 == len(positions)
    before = [name for dim, name in rest if together and dim < first]
    after = [name for dim, name in rest if not together or dim > first]
    return tensor(len(shape), positions, "v"), texts, [*before, *own, *after]


def index(call: Call) -> str | None:
    """``x[i, j]``: what the indices pick takes the place of the indexed dims."""
    positions = _positions(call)
    if not positions:
        return None
    x, texts, picked = _indexed(call.inputs[0], positions, call.inputs[1:], "")
    return f"{', '.join([x, *texts])} -> {' '.join(picked)} | 0"


def index_put(call: Call) -> str | None:
    """Written rows replace or, if accumulated, add to those of ``x``: then they may be divided."""
    positions = _positions(call)
    if not positions:
        return None
    accumulate, *indices = call["accumulate"], *call.inputs[1:-1]
    mark = "" if accumulate else "!"
    x, texts, picked = _indexed(call.inputs[0], positions, tuple(indices), mark)
    values = " ".join(picked[len(picked) - len(call.inputs[-1]) :])
    add = "+" if accumulate else ""
    last = len(call.inputs) - 1
    return f"{', '.join([add + x, *texts, values])} -> {x} | 0+{last}"


def index_select(call: Call) -> str:
    """Rows by a list of indices."""
    rank = len(call.inputs[0])
    own = dims_of(call["dim"], rank)
    picked = tensor(rank, own, "i", "")
    return f"{tensor(rank, own, 'v')}, i{min(own)} -> {picked} | 0"


def index_add(call: Call) -> str:
    """Rows of a source added to rows of ``x``; divided rows give partial sums."""
    rank = len(call.inputs[0])
    own = dims_of(call["dim"], rank)
    x, source = tensor(rank, own, "v"), tensor(rank, own, "i", "")
    return f"+{x}, i{min(own)}, {source} -> {x} | 0+2"


def gather(call: Call) -> str | None:
    """One element of the dim for every index; the other dims must be alike."""
    x, indices = call.inputs
    own = dims_of(call["dim"], len(x))
    if not _alike(own, x, indices):
        return None
    picked = tensor(len(x), own, "i", "")
    return f"{tensor(len(x), own, 'v')}, {picked} -> {picked} | 0"


def scatter(call: Call) -> str | None:
    """Elements written along the dim; the other dims must be alike."""
    x, *others = call.inputs
    own = dims_of(call["dim"], len(x))
    if not _alike(own, x, *others):
        return None
    target = tensor(len(x), own, "v")
    texts = [tensor(len(x), own, f"i{n}_") for n in range(len(others))]
    return f"{', '.join([target, *texts])} -> {target} | {'0+2' if len(others) == 2 else ''}"


def _alike(own: Collection[int], x: Shape, *others: Shape) -> bool:
    return all(
        len(other) == len(x)
        and all(a == b for dim, (a, b) in enumerate(zip(x, other, strict=True)) if dim not in own)
        for other in others
    )


def search(call: Call) -> str | None:
    """``searchsorted`` of any values in one sorted list."""
    return "t!, ... -> ..." if len(call.inputs) == 2 and len(call.inputs[0]) == 1 else None


def masked_scatter(call: Call) -> str | None:
    """Kept places take the source's elements in order: a mask of whole rows leaves rows free.

    The k-th kept row comes from the k-th row of the source: its rows are whole, and so are the
    mask's, which number them. Lowering looks up the rows of a part.
    """
    x, mask, source = call.inputs
    count = numbered_dims(call)
    if count is None:
        return None
    kept = [f"x{dim}" for dim in range(len(x) - count)]
    mark = "" if 0 not in source else "!"
    left = " ".join([*(f"n{dim}{mark}" for dim in range(count)), *kept])
    own = [*(f"m{dim}!" for dim in range(count)), *kept][len(x) - len(mask) :]
    rows = " ".join([*(f"r{dim}!" for dim in range(len(source) - len(kept))), *kept])
    return f"{left}, {' '.join(own)}, {rows} -> {left} | 0+2"


def numbered_dims(call: Call) -> int | None:
    """How many dims of a ``masked_scatter`` number its rows; None if single elements are kept."""
    x, _, source = call.inputs
    count = len(_numbering(call["mask"], x))
    row = x[count:]
    return count if row and row == source[len(source) - len(row) :] else None


def _numbering(mask: torch.fx.Node, x: Shape) -> Shape:
    """The sizes of the dims of ``x`` up to the last one along which the mask may change."""
    value = tensors_of(mask)[0]
    shape = () if value is None else tuple(value.shape)
    if mask.target is torch.ops.aten.expand.default:
        return _numbering(mask.args[0], x)  # type: ignore[arg-type]
    count = len(shape)
    while count and shape[count - 1] == 1:
        count -= 1
    return x[: len(x) - len(shape) + count]
