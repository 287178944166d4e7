"""What a forward leaves behind in Python objects, and how to put it back.

Parameters, buffers and submodules are not put back here: they are reparametrised.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from mllm_compile.passes.capture.reachable import PLAIN, Contents, is_own, look_into

HOOKS = re.compile(r"\._\w+_hooks\w*(\[[^]]*\])?( \(its length\))?$")  # not what a hook holds
ELSEWHERE = ("global ", "variable ", "default ")  # how paths that are no attributes begin
Place = tuple[int, str]  # identity of what holds something, and where it does
Pending = list[tuple[Place, Any]]


@dataclass
class Snapshot:
    """All that the model can reach, as it is now.

    ``numbers``: plain values and sizes of containers; ``others``: the identity of everything else;
    ``paths``: how to name a place; ``contents``: how to put all back.
    """

    model: nn.Module
    code: bool
    numbers: dict[Place, Any] = field(default_factory=dict)
    others: dict[Place, int] = field(default_factory=dict)
    paths: dict[Place, str] = field(default_factory=dict)
    contents: list[Contents] = field(default_factory=list)
    seen: dict[int, Any] = field(default_factory=dict)  # kept alive, so that ids stay unique
    members: list[tuple[str, Any]] = field(default_factory=list)  # functions of classes, by name
    names: set[str] = field(default_factory=lambda: {"forward", "__getattr__"})  # looked up


def snapshot(model: nn.Module, *, code: bool = True) -> Snapshot:
    """Walk through everything, once each; without ``code``, through no classes and functions."""
    found = Snapshot(model, code)
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    used = {kind: None for _, module in modules for kind in type(module).__mro__} if code else {}
    kinds = [kind for kind in used if is_own(kind)]
    roots: list[tuple[str, Any]] = [*modules, *((kind.__name__, kind) for kind in kinds)]
    found.seen |= {id(root): root for _, root in roots}
    pending = [item for path, root in roots for item in _take(found, path, root)]
    for path, module in modules:
        buffers = Contents(items=[(f".{name}", b) for name, b in module._buffers.items()])
        pending += _note(found, path, module, buffers)
    while pending or (pending := _called(found)):
        place, value = pending.pop()
        skipped = type if code else (type, FunctionType, MethodType)
        if id(value) not in found.seen and not isinstance(value, skipped):
            found.seen[id(value)] = value
            pending += _take(found, found.paths[place], value)
    return found


def _called(found: Snapshot) -> Pending:
    """Functions of the classes that some function names, each once."""
    called = Contents(items=[("", member) for name, member in found.members if name in found.names])
    found.members = [(name, member) for name, member in found.members if name not in found.names]
    return _note(found, "", None, called)


def _take(found: Snapshot, path: str, value: Any) -> Pending:
    """Note what an object holds; returns what is still to be looked into."""
    return [item for contents in look_into(value) for item in _note(found, path, value, contents)]


def _note(found: Snapshot, path: str, holder: Any, contents: Contents) -> Pending:
    pending: Pending = []
    found.contents.append(contents)
    found.members += contents.members.items()
    found.names |= contents.names
    for suffix, value in (*contents.facts.items(), *contents.items):
        place = id(holder), suffix
        found.paths[place] = suffix if suffix.startswith(ELSEWHERE) else path + suffix
        if suffix in contents.facts or isinstance(value, PLAIN):
            found.numbers[place] = repr(value)
        else:
            found.others[place] = id(value)
            pending.append((place, value))
    return pending


def changed(before: Snapshot, after: Snapshot | None = None) -> list[str]:
    """Paths of all that is another than before, except hooks; ``after`` is now by default."""
    after = after or snapshot(before.model, code=before.code)
    places = [
        *_different(before, after, before.numbers, after.numbers),
        *_different(before, after, before.others, after.others),
    ]
    names = dict.fromkeys((before.paths | after.paths)[place] for place in places)
    return [name.removeprefix(".") for name in names if not HOOKS.search(name)]


def counted(before: Snapshot, after: Snapshot) -> list[str]:
    """Paths of the plain values and sizes that are others, in another object of that path too."""
    places = _different(before, after, before.numbers, after.numbers)
    names = [(before.paths | after.paths)[place] for place in places]
    old, new = (
        {s.paths[place]: value for place, value in s.numbers.items()} for s in (before, after)
    )
    names += [
        name
        for name, value in old.items()
        if name in new and value != new[name] and not name.startswith(ELSEWHERE)
    ]
    return [name.removeprefix(".") for name in dict.fromkeys(names)]


def _different(
    before: Snapshot, after: Snapshot, old: dict[Place, Any], new: dict[Place, Any]
) -> list[Place]:
    """Places that differ, of those whose holders both know."""
    return [
        place
        for place in old | new
        if old.get(place) != new.get(place) and place[0] in before.seen and place[0] in after.seen
    ]


def restore(before: Snapshot) -> None:
    """Put every attribute, and the contents of every container, back."""
    for contents in before.contents:
        contents.undo()


@contextmanager
def restored(model: nn.Module) -> Iterator[Snapshot]:
    """Leave the modules as they were, whatever happens inside."""
    before = snapshot(model)
    try:
        yield before
    finally:
        restore(before)
