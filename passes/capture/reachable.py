"""What a Python object holds, as far as a forward can reach and change it.

``look_into`` knows modules, containers, instances of the model's own classes, classes, functions
(closures, defaults, the globals that their code names) and a few generators. Tensors, Python
modules and objects of the standard library are leaves.
"""

import functools
import itertools
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

REGISTERED = ("_parameters", "_buffers", "_modules")  # are no state in this sense
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
CONTAINERS = (list, deque, set, dict, OrderedDict, defaultdict, Counter)
CACHE = functools._lru_cache_wrapper
FOREIGN = {*sys.stdlib_module_names, "torch", "numpy", "mllm_compile"} - {"__main__"}
STATES: dict[type, Callable[[Any], Any]] = {
    itertools.count: repr,
    random.Random: lambda generator: generator.getstate(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state),
    np.ndarray: lambda array: array.tobytes(),
}


@dataclass
class Contents:
    """What an object holds: plain facts and further objects, by suffix; ``undo`` puts it back.

    ``members`` are the functions of a class by name; ``names`` is what a function's code looks up.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    items: list[tuple[str, Any]] = field(default_factory=list)
    members: dict[str, Any] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    undo: Callable[[], None] = lambda: None


def look_into(value: Any) -> Iterator[Contents]:
    """All that ``value`` holds now; nothing for a leaf."""
    if type(value) in STATES:
        yield Contents({" (its state)": STATES[type(value)](value)})
    elif isinstance(value, (list, deque, tuple, set, dict)):
        yield _container(value)
    elif isinstance(value, FunctionType):
        yield from _function(value)
    elif isinstance(value, CACHE):
        yield _cache(value)
    elif isinstance(value, MethodType):
        yield Contents(items=[("", value.__self__), ("", value.__func__)])
    elif isinstance(value, functools.partial):
        yield Contents(items=[("", value.func), ("", value.args), ("", value.keywords)])
    elif isinstance(value, type):
        yield from _class(value)
    elif _is_instance(value):
        yield from _instance(value)


def is_own(kind: Any) -> bool:
    """Whether a class or function comes neither from torch nor from the standard library."""
    return str(kind.__module__).partition(".")[0] not in FOREIGN


def _is_instance(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, ModuleType)):
        return False
    return isinstance(value, (nn.Module, SimpleNamespace)) or is_own(type(value))


def _container(value: Any) -> Contents:
    before = list(value.items()) if isinstance(value, dict) else list(value)
    items = before if isinstance(value, dict) else list(enumerate(before))

    def undo() -> None:
        now = list(value.items()) if isinstance(value, dict) else list(value)
        if type(value) in CONTAINERS and not _same(now, before):
            value.clear()
            if isinstance(value, (list, deque)):
                value.extend(before)
            else:
                value.update(before)

    named = [(f"[{k!r}]" if isinstance(k, PLAIN) else "[...]", item) for k, item in items]
    return Contents({" (its length)": len(before)}, named, undo=undo)


def _same(now: list[Any], before: list[Any]) -> bool:
    """Identity of all elements; of pairs, which are made anew, of what they pair."""
    return len(now) == len(before) and all(
        a is b or (type(a) is tuple is type(b) and len(a) == len(b) and all(map(_is, a, b)))
        for a, b in zip(now, before, strict=True)
    )


def _is(a: Any, b: Any) -> bool:
    return a is b


def _scope(
    form: str,
    read: Callable[[], dict[str, Any]],
    put: Callable[[str, Any], None],
    drop: Callable[[str], None],
) -> Contents:
    """Names and what they stand for; names that come up later are dropped again."""
    before = read()

    def undo() -> None:
        now = read()
        for name in now.keys() - before.keys():
            drop(name)
        for name, value in before.items():
            if name not in now or now[name] is not value:
                put(name, value)

    return Contents(items=[(form.format(name), v) for name, v in before.items()], undo=undo)


def _instance(value: Any) -> Iterator[Contents]:
    scope = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        yield from _module(vars(value))
    elif scope is not None:
        yield _scope(".{}", lambda: dict(scope), scope.__setitem__, scope.__delitem__)
    slots = [n for kind in type(value).__mro__ for n in _names(vars(kind).get("__slots__", ()))]
    if slots:
        yield _scope(
            ".{}",
            lambda: {name: getattr(value, name) for name in slots if hasattr(value, name)},
            functools.partial(object.__setattr__, value),
            functools.partial(object.__delattr__, value),
        )


def _module(scope: dict[str, Any]) -> Iterator[Contents]:
    """Like any instance, but its many empty dictionaries of hooks are dealt with at once."""
    empty = [v for n, v in scope.items() if "_hooks" in n and isinstance(v, dict) and not v]
    skipped = set(map(id, empty))

    def undo() -> None:
        for held in filter(None, empty):
            held.clear()

    made = _scope(
        ".{}",
        lambda: {name: v for name, v in scope.items() if name not in REGISTERED},
        scope.__setitem__,
        scope.__delitem__,
    )
    made.items = [(name, held) for name, held in made.items if id(held) not in skipped]
    yield made
    yield Contents(undo=undo)


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _class(kind: type) -> Iterator[Contents]:
    def data() -> dict[str, Any]:
        return {n: v for n, v in vars(kind).items() if not n.startswith("__") and _is_data(v)}

    yield _scope(".{}", data, functools.partial(setattr, kind), functools.partial(delattr, kind))
    members = {name: _function_of(v) for name, v in vars(kind).items()}
    yield Contents(members={n: v for n, v in members.items() if v is not None})


def _function_of(member: Any) -> Any:
    """The function behind a method, class or static method, property or cached method."""
    for name in ("__func__", "fget", "func"):
        member = getattr(member, name, member)
    return member if isinstance(member, (FunctionType, CACHE)) else None


def _is_data(value: Any) -> bool:
    return not (isinstance(value, (type, ModuleType)) or hasattr(value, "__get__"))


def _function(value: FunctionType) -> Iterator[Contents]:
    if not is_own(value):
        return
    scope, names = value.__globals__, names_in(value.__code__)
    defaults = (value.__defaults__, value.__kwdefaults__)
    yield Contents(
        items=[(f"default of {value.__qualname__}", held) for held in defaults], names=names
    )
    yield _scope(
        ".{}", lambda: dict(value.__dict__), value.__dict__.__setitem__, value.__dict__.__delitem__
    )
    yield _scope(
        f"global {value.__module__}.{{}}",
        lambda: {n: scope[n] for n in names if n in scope and _is_state(scope[n])},
        scope.__setitem__,
        scope.__delitem__,
    )
    cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
    yield _scope(
        f"variable {{}} of {value.__qualname__}",
        lambda: {name: cell.cell_contents for name, cell in cells.items() if _is_full(cell)},
        lambda name, content: setattr(cells[name], "cell_contents", content),
        lambda name: delattr(cells[name], "cell_contents"),
    )


@functools.cache
def names_in(code: CodeType) -> frozenset[str]:
    """The names that a function's code, and the code nested in it, looks up."""
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(names_in, nested))


def _is_state(value: Any) -> bool:
    return not isinstance(value, (type, ModuleType))


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _cache(function: Any) -> Contents:
    """Of a cached function: its size alone. What a trace put in must not stay, so all goes."""
    before = function.cache_info().currsize

    def undo() -> None:
        if function.cache_info().currsize != before:
            function.cache_clear()

    return Contents(items=[("", getattr(function, "__wrapped__", None))], undo=undo)
