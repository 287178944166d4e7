"""What a forward may leave behind in the modules, and how to put it back.

Parameters, buffers and submodules are not attributes in this sense: they are reparametrised.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

STATE = ("_parameters", "_buffers", "_modules")
CONTAINERS = (list, dict, set, OrderedDict)
Snapshot = dict[nn.Module, dict[str, tuple[Any, Any]]]  # of each attribute: value, contents


def snapshot(model: nn.Module) -> Snapshot:
    """Every attribute of every module, hooks included; of containers, also what they hold now."""
    return {
        module: {
            name: (value, value.copy() if type(value) in CONTAINERS else None)
            for name, value in vars(module).items()
            if name not in STATE
        }
        for module in model.modules()
    }


def changed(before: Snapshot) -> list[tuple[nn.Module, str]]:
    """Module and name of every attribute that is not what it was."""
    return [(module, name) for module, old in before.items() for name in _differences(module, old)]


def counters(before: Snapshot) -> list[str]:
    """``Class.attribute`` of the numbers and strings that have become others."""
    found = []
    for module, name in changed(before):
        old = (
            before[module][name][0] if name in before[module] else getattr(type(module), name, None)
        )
        new = vars(module).get(name)
        numbers = all(
            isinstance(v, (int, float, str)) and not isinstance(v, bool) for v in (old, new)
        )
        if numbers and old != new:
            found.append(f"{type(module).__name__}.{name}")
    return found


def restore(before: Snapshot) -> None:
    """Put every attribute, and the contents of every container, back."""
    for module, name in changed(before):
        attributes, old = vars(module), before[module]
        if name not in old:
            del attributes[name]
            continue
        value, content = old[name]
        attributes[name] = value
        if isinstance(value, list):
            value[:] = content
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(content)


@contextmanager
def restored(model: nn.Module) -> Iterator[Snapshot]:
    """Leave the modules as they were, whatever happens inside."""
    before = snapshot(model)
    try:
        yield before
    finally:
        restore(before)


def _differences(module: nn.Module, old: dict[str, tuple[Any, Any]]) -> list[str]:
    now = vars(module)
    gone = [name for name in old if name not in now]
    fresh = [name for name in now if name not in STATE and name not in old]
    other = [
        name
        for name, (value, content) in old.items()
        if name in now and (now[name] is not value or not _same_content(value, content))
    ]
    return [*gone, *fresh, *other]


def _same_content(value: Any, content: Any) -> bool:
    if type(value) not in CONTAINERS:
        return True
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return all(name in value and value[name] is content[name] for name in content)
    if isinstance(value, set):
        return bool(value == content)
    return all(a is b for a, b in zip(value, content, strict=True))
