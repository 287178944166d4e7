"""Rules of operators that look along some dims and treat all others alike."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

from mllm_compile.passes.sharding.call import Call
from mllm_compile.passes.sharding.factors import Shape
from mllm_compile.passes.sharding.rules_views import names

Writer = Callable[[Call], str | None]


def dims_of(argument: Any, rank: int) -> set[int]:
    """The dims that an argument names: one, several, or all (none given)."""
    if argument is None or argument == []:
        return set(range(rank))
    dims = argument if isinstance(argument, Iterable) else [argument]
    return {dim % rank for dim in dims if rank}


def tensor(rank: int, own: Collection[int], label: str, mark: str = "!") -> str:
    """The dims of a tensor: ``own`` ones have names of their own, the others x0, x1 and so on."""
    return " ".join(f"{label}{dim}{mark}" if dim in own else f"x{dim}" for dim in range(rank))


def _rule(sources: Iterable[str], targets: Iterable[str], groups: str) -> str:
    return f"{', '.join(sources)} -> {', '.join(targets)} | {groups}"


def along(argument: str, groups: str = "", same: str = "") -> Writer:
    """The named dims are whole and keep their places, in every argument and result.

    With the mark ``same`` they are one factor everywhere: a softmax over ``c*``.
    """

    def rule(call: Call) -> str:
        rank = len(call.results[0])
        own = dims_of(call[argument], rank)
        if same:
            named = tensor(rank, own, "c", same)
            return _rule([named] * len(call.inputs), [named] * len(call.results), groups)
        return _labelled(call, own, groups)

    return rule


def _labelled(call: Call, own: Collection[int], groups: str) -> str:
    sources = [tensor(len(shape), own, f"a{i}_") for i, shape in enumerate(call.inputs)]
    targets = [tensor(len(shape), own, f"z{i}_") for i, shape in enumerate(call.results)]
    return _rule(sources, targets, groups)


def sliced(call: Call) -> str:
    """The dim is whole unless all of it is taken."""
    source, target = call.inputs[0], call.results[0]
    return _labelled(call, {dim for dim in range(len(source)) if source[dim] != target[dim]}, "0")


def padded(call: Call) -> str:
    """Padded dims are whole (pairs of numbers, the last dim first); zeros are linear."""
    last = len(call.inputs[0]) - 1
    own = {last - place // 2 for place, number in enumerate(call["pad"]) if number}
    return _labelled(call, own, "" if call["value"] else "0")


def joined(call: Call) -> str | None:
    """``cat``: the dim is whole, unless a single tensor is joined with nothing.

    Nothing is a tensor [0], whatever the rank of the others.
    """
    rank = len(call.results[0])
    filled = [place for place, shape in enumerate(call.inputs) if len(shape) == rank]
    if any(len(shape) != rank and shape != (0,) for shape in call.inputs):
        return None
    own = dims_of(call["dim"], rank) if len(filled) > 1 else set()
    sources = [
        tensor(rank, own, f"a{place}_") if place in filled else f"n{place}!"
        for place in range(len(call.inputs))
    ]
    return _rule(sources, [tensor(rank, own, "z")], "+".join(map(str, filled)))


def stacked(call: Call) -> str:
    """``stack``: a new whole dim."""
    target, kept = call.results[0], names(len(call.inputs[0]))
    place = call["dim"] % len(target)
    right = [*kept[:place], "n!", *kept[place:]]
    return _rule([" ".join(kept)] * len(call.inputs), [" ".join(right)], _all(call.inputs))


def _all(inputs: tuple[Shape, ...]) -> str:
    return "+".join(map(str, range(len(inputs))))


def taken_out(call: Call) -> str:
    """``select`` and ``unbind``: the results are without the dim."""
    rank = len(call.inputs[0])
    own = dims_of(call["dim"], rank)
    rest = " ".join(f"x{dim}" for dim in range(rank) if dim not in own)
    return _rule([tensor(rank, own, "a")], [rest] * len(call.results), "0")


def put_in(call: Call) -> str:
    """``select_scatter``: its argument's dim is whole, its second argument is without it."""
    rank = len(call.inputs[0])
    own = dims_of(call["dim"], rank)
    rest = " ".join(f"x{dim}" for dim in range(rank) if dim not in own)
    return _rule([tensor(rank, own, "a"), rest], [tensor(rank, own, "a")], "0+1")


def slice_scatter(call: Call) -> str:
    """The dim is whole unless all of it is replaced."""
    x, source = call.inputs
    changed = {dim for dim, size in enumerate(x) if size != source[dim]}
    return _labelled(call, changed, "0+1")


def reduced(mark: str, groups: str = "") -> Writer:
    """The named dims (all, if none) go, or stay with size one; with ``!`` they are whole."""

    def rule(call: Call) -> str | None:
        if len(call.inputs) != 1:
            return None
        rank = len(call.inputs[0])
        own = dims_of(call.arguments.get("dim"), rank)
        kept = ["1" if dim in own else f"x{dim}" for dim in range(rank)]
        if not call.arguments.get("keepdim"):
            kept = [name for name in kept if name != "1"]
        source = tensor(rank, own, "a", mark)
        return _rule([source], [" ".join(kept)] * len(call.results), groups)

    return rule


def triangle(call: Call) -> str:
    """``triu`` and ``tril`` look along the last two dims."""
    rank = len(call.inputs[0])
    own = {rank - 2, rank - 1}
    return _rule([tensor(rank, own, "a")], [tensor(rank, own, "a")], "0")


def unfold(call: Call) -> str:
    """Windows along a dim: what is left of it, and a new last dim."""
    rank = len(call.inputs[0])
    own = dims_of(call["dimension"], rank)
    return _rule([tensor(rank, own, "a")], [f"{tensor(rank, own, 'z')} w!"], "0")
