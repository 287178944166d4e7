"""Rules of operators that only rearrange elements, written from the shapes around them."""

from collections.abc import Iterator, Sequence

from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.factors import Shape


def names(count: int) -> list[str]:
    """Names for dims: x0, x1 and so on."""
    return [f"x{dim}" for dim in range(count)]


def one_to_one(sources: Sequence[str], targets: Sequence[str]) -> str:
    """A linear operator of one argument and one result."""
    return f"{' '.join(sources)} -> {' '.join(targets)} | 0"


def view(call: Call) -> str | None:
    """``a b c -> (a b) c`` and the like.

    Both shapes are walked from the outside; where sizes do not divide each other, the dims up to
    the next common boundary are whole.
    """
    (source,), (target,) = call.inputs, call.results
    if 0 in source:
        return None
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    for number, (dims, others) in enumerate(_groups(source, target)):
        steps = list(_steps([source[dim] for dim in dims], [target[dim] for dim in others]))
        for step, (i, j) in enumerate(steps):
            left[dims[i]].append(f"x{number}_{step}")
            right[others[j]].append(f"x{number}_{step}")
        if not steps:
            for dim in dims:
                left[dim].append(f"y{dim}!")
            for dim in others:
                right[dim].append(f"z{dim}!")
    return one_to_one(list(map(_dim, left)), list(map(_dim, right)))


def _dim(factors: Sequence[str]) -> str:
    if len(factors) == 1:
        return factors[0]
    return f"({' '.join(factors)})" if factors else "1"


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims (none of size one) that have the same number of elements."""
    here, there = ([dim for dim, size in enumerate(s) if size != 1] for s in (source, target))
    while here:
        left, right = [here.pop(0)], [there.pop(0)]
        a, b = source[left[0]], target[right[0]]
        while a != b:
            if a < b:
                left.append(here.pop(0))
                a *= source[left[-1]]
            else:
                right.append(there.pop(0))
                b *= target[right[-1]]
        yield left, right


def _steps(source: list[int], target: list[int]) -> Iterator[tuple[int, int]]:
    """For every common factor the dims it lies in; nothing if some sizes do not divide."""
    found, i, j = [], 0, 0
    rest, other = source[0], target[0]
    while True:
        small, large = sorted((rest, other))
        if large % small:
            return
        found.append((i, j))
        rest, other = rest // small, other // small
        if rest == other == 1 and i == len(source) - 1:
            break
        if rest == 1:
            i, rest = i + 1, source[i + 1]
        if other == 1:
            j, other = j + 1, target[j + 1]
    yield from found


def expand(call: Call) -> str:
    """Dims of size one, and new ones, become factors that the argument does not have."""
    (source,), (target,) = call.inputs, call.results
    return one_to_one(names(len(target))[len(target) - len(source) :], names(len(target)))


def repeat(call: Call) -> str:
    """A repeated dim is (repetitions elements); the number of repetitions is a literal."""
    (source,), (target,) = call.inputs, call.results
    new, kept = len(target) - len(source), names(len(source))
    right = [f"n{dim}!" for dim in range(new)]
    for name, size, repeated in zip(kept, source, target[new:], strict=True):
        right.append(name if size == repeated else f"(r{name}! {name})")
    return one_to_one(kept, right)


def permute(call: Call) -> str:
    """``t``, ``transpose`` and ``permute``."""
    order = list(range(len(call.inputs[0])))
    if "dims" in call.arguments:
        order = [dim % len(order) for dim in call["dims"]]
    elif "dim0" in call.arguments:
        a, b = call["dim0"] % len(order), call["dim1"] % len(order)
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    kept = names(len(order))
    return one_to_one(kept, [kept[dim] for dim in order])


def unsqueeze(call: Call) -> str:
    """A new dim of size one."""
    kept = names(len(call.inputs[0]))
    place = call["dim"] % (len(kept) + 1)
    return one_to_one(kept, [*kept[:place], "1", *kept[place:]])


def squeeze(call: Call) -> str:
    """Dims of size one go: those named, or all."""
    shape = call.inputs[0]
    kept, named = names(len(shape)), call.arguments.get("dim")
    dims = range(len(shape)) if named is None else named if isinstance(named, list) else [named]
    gone = {dim % len(shape) for dim in dims if shape and shape[dim] == 1}
    return one_to_one(kept, [name for dim, name in enumerate(kept) if dim not in gone])
