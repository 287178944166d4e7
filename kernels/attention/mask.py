"""Mask predicates: rules ``(batch, head, query, key) -> allowed``, and the operator for them.

A predicate is an ordinary Python function; the tensors it closes over are taken out of it (they
become arguments of ``mllm::mask``, so they are values of the graph) and put back when it runs.
The rule itself stays symbolic in a process-wide table, where later passes can analyse it. Equal
rules get equal keys: the same code over the same constants is one entry, however often it is made.
"""

import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a predicate for its tensor number ``index``."""

    index: int


@dataclass(frozen=True, slots=True)
class Predicate:
    """A mask rule without its tensors.

    ``function`` maps (batch, head, query, key) indices to booleans and holds ``num_tensors`` slots.
    Offsets are added to query and key indices first. With ``padded`` one more tensor [B, K] follows
    the slots: keys it holds 0 for are hidden. ``vectorised`` functions take index tensors that
    broadcast; others take scalars and are mapped.
    """

    function: Callable[..., Any]
    num_tensors: int
    query_offset: int = 0
    key_offset: int = 0
    padded: bool = False
    vectorised: bool = True


PREDICATES: list[Predicate] = []
_KEYS: dict[Hashable, int] = {}


def register(predicate: Predicate) -> int:
    """The predicate's key in the process-wide table; equal rules share one."""
    identity = (
        _identity(predicate.function),
        predicate.num_tensors,
        predicate.query_offset,
        predicate.key_offset,
        predicate.padded,
        predicate.vectorised,
    )
    key = _KEYS.setdefault(identity, len(PREDICATES))
    if key == len(PREDICATES):
        PREDICATES.append(predicate)
    return key


def separate(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[Tensor]]:
    """``function`` with slots for the tensors it closes over, and those tensors in slot order.

    ValueError for an object that keeps tensors as attributes: they cannot be taken out.
    """
    found: dict[int, tuple[Slot, Tensor]] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            _refuse_hidden_tensors(leaf)
            return leaf
        return found.setdefault(id(leaf), (Slot(len(found)), leaf))[0]

    template = _rebuild(function, take)
    return template, [tensor for _, tensor in found.values()]


def _refuse_hidden_tensors(value: Any) -> None:
    owner = getattr(value, "__self__", value)
    if any(isinstance(item, Tensor) for item in getattr(owner, "__dict__", {}).values()) or (
        isinstance(owner, torch.nn.Module) and any(True for _ in owner.parameters())
    ):
        raise ValueError(
            f"mask predicate: {type(owner).__name__} keeps tensors as attributes, where they "
            "cannot become arguments; close over the tensors in a function instead"
        )


def bind(template: Callable[..., Any], tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """The inverse of ``separate``: the function with ``tensors`` in its slots."""
    bound = _rebuild(template, lambda leaf: tensors[leaf.index] if isinstance(leaf, Slot) else leaf)
    assert callable(bound)
    return bound  # type: ignore[no-any-return]


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change`` applied to every leaf that a call of it can reach."""
    if isinstance(value, tuple | list):
        return type(value)(_rebuild(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _rebuild(item, change) for name, item in value.items()}
    if isinstance(value, partial):
        arguments = _rebuild(value.args, change)
        return partial(_rebuild(value.func, change), *arguments, **_rebuild(value.keywords, change))
    if isinstance(value, types.FunctionType) and (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__
    ):
        return _rebuild_function(value, change)
    return change(value)


def _rebuild_function(
    function: types.FunctionType, change: Callable[[Any], Any]
) -> types.FunctionType:
    cells = tuple(
        types.CellType(_rebuild(cell.cell_contents, change)) for cell in function.__closure__ or ()
    )
    rebuilt = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        _rebuild(function.__defaults__, change) if function.__defaults__ else None,
        cells or None,
    )
    rebuilt.__qualname__ = function.__qualname__
    rebuilt.__kwdefaults__ = _rebuild(function.__kwdefaults__, change) or None
    return rebuilt


def _identity(value: Any) -> Hashable:
    """Equal for values that compute the same: code and constants compare, other objects are one."""
    if isinstance(value, tuple | list):
        return (type(value), *(_identity(item) for item in value))
    if isinstance(value, dict):
        return (dict, *((name, _identity(item)) for name, item in sorted(value.items())))
    if isinstance(value, partial):
        return (partial, _identity(value.func), _identity(value.args), _identity(value.keywords))
    if isinstance(value, types.FunctionType):
        cells = tuple(_identity(cell.cell_contents) for cell in value.__closure__ or ())
        defaults = (_identity(value.__defaults__), _identity(value.__kwdefaults__))
        return (value.__code__, id(value.__globals__), cells, defaults)
    if isinstance(value, bool | int | float | str | Slot | type(None)):
        return (type(value), value)
    return (type(value), id(value))


def describe(predicate: Predicate) -> str:
    """The rule in a line for people: the functions it is built of, outermost first."""
    names: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, tuple | list):
            for item in value:
                visit(item)
        elif isinstance(value, partial):
            visit((value.func, value.args))
        elif isinstance(value, types.FunctionType):
            names.append(value.__qualname__.removesuffix(".<locals>.inner_mask").split(".")[0])
            visit([cell.cell_contents for cell in value.__closure__ or ()])

    visit(predicate.function)
    text = names[0] if len(names) == 1 else f"{names[0]}({', '.join(names[1:])})"
    return text + (" with padding" if predicate.padded else "")


def evaluate(
    predicate: Predicate,
    tensors: Sequence[Tensor],
    batch: int,
    queries: int,
    keys: int,
    device: torch.device,
) -> Tensor:
    """The dense boolean mask [batch, 1, queries, keys], True where a query sees a key."""
    function = bind(predicate.function, tensors[: predicate.num_tensors])
    indices = (
        torch.arange(batch, device=device),
        torch.arange(1, device=device),
        torch.arange(queries, device=device) + predicate.query_offset,
        torch.arange(keys, device=device) + predicate.key_offset,
    )
    if predicate.vectorised:
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        views = (index.view(shape) for index, shape in zip(indices, shapes, strict=True))
        allowed = torch.as_tensor(function(*views), device=device)
    else:
        allowed = _map_over_indices(function, indices)
    allowed = allowed.expand(batch, 1, queries, keys)
    if predicate.padded:
        first = predicate.key_offset
        padding = tensors[predicate.num_tensors][:, first : first + keys]
        allowed = allowed & padding.bool()[:, None, None, :]
    return allowed.contiguous()


def _map_over_indices(function: Callable[..., Any], indices: Sequence[Tensor]) -> Tensor:
    """``function`` of every combination of scalar indices."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for position in reversed(range(len(indices))):
        axes = tuple(0 if position == i else None for i in range(len(indices)))
        function = torch.vmap(function, in_dims=axes)
    with all_dispatch_keys(), TransformGetItemToIndex():
        return torch.as_tensor(function(*indices))


def all_dispatch_keys() -> AbstractContextManager[None]:
    """Calls are dispatched as if from outside of any operator.

    The kernel of an operator runs with the dispatch keys of autograd and of function transforms
    switched off: vmap needs them, and without them composite operators come undecomposed.
    """
    kept = torch._C._dispatch_tls_local_include_set()
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    return torch._C._ForceDispatchKeyGuard(kept, nothing)


@torch.library.custom_op("mllm::mask", mutates_args=())
def mask(
    tensors: list[Tensor], key: int, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    """The dense boolean mask of predicate ``key`` over its tensors; see ``evaluate``."""
    with torch.no_grad():
        return evaluate(PREDICATES[key], tensors, batch, queries, keys, device)


@mask.register_fake
def _(
    tensors: list[Tensor], key: int, batch: int, queries: int, keys: int, device: torch.device
) -> Tensor:
    return torch.empty(batch, 1, queries, keys, dtype=torch.bool, device=device)
