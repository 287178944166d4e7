"""Dynamo's graph as a module with state, so that ``capture`` can trace it like any model.

Every tensor input that carries gradient, or is a parameter, becomes a parameter; every other tensor
becomes a buffer (a write into one is then an update, whoever owns it); numbers become the batch.
Names are the original ones where Dynamo tells them. While the graph runs, every node runs inside a
module of its own path, in code that claims its source line: owners and source lines of the captured
nodes come out as if the user's model were running.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    numbers: dict[str, Any]


class DynamoGraph:
    """The graph with a name for every input, and a path and source line for every node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.names = tuple(_names(graph.graph.find_nodes(op="placeholder")))
        self.owners = {node: _owner(node) for node in graph.graph.nodes}

    def bind(self, arguments: Sequence[Any]) -> Inputs:
        """Sort the arguments of a call by what they are to capture."""
        found = Inputs({}, {}, {})
        for name, value in zip(self.names, arguments, strict=True):
            if not isinstance(value, torch.Tensor):
                found.numbers[name] = value
            elif value.requires_grad or isinstance(value, nn.Parameter):
                found.parameters[name] = value
            else:
                found.buffers[name] = value
        return found


class DynamoModule(nn.Module):
    """Runs the graph on its own state, which is like ``inputs``."""

    def __init__(self, source: DynamoGraph, inputs: Inputs) -> None:
        super().__init__()
        self._source = (source,)  # a tuple, so that Dynamo's module is no part of this one
        for name, value in inputs.parameters.items():
            place, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(value.detach(), value.requires_grad)
            _module_at(self, place).register_parameter(leaf, parameter)
        for name, value in inputs.buffers.items():
            place, _, leaf = name.rpartition(".")
            _module_at(self, place).register_buffer(leaf, value)
        for path in source.owners.values():
            _module_at(self, path)

    def forward(self, **numbers: Any) -> tuple[Any, ...]:
        """Run the graph: its results, tensors or not."""
        (source,) = self._source
        arguments = [
            numbers[name] if name in numbers else self._state(name) for name in source.names
        ]
        return tuple(_Runner(source, self).run(*arguments))

    def _state(self, name: str) -> Any:
        place, _, leaf = name.rpartition(".")
        return getattr(self.get_submodule(place), leaf)


class _Place(nn.Module):
    """Stands for a module of the user's model: whatever it is called with runs inside it."""

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class _Runner(fx.Interpreter):
    """Runs every node inside the module that Dynamo saw it in."""

    def __init__(self, source: DynamoGraph, model: DynamoModule) -> None:
        super().__init__(source.graph)
        self._owners = source.owners
        self._model = model

    def run_node(self, n: fx.Node) -> Any:
        # partial adds no frame: the claimed line must be the innermost one outside torch
        run = partial(_claiming(n.meta.get("stack_trace", "")), partial(super().run_node, n))
        owner = self._owners[n]
        return self._model.get_submodule(owner)(run) if owner else run()


def _call(run: Callable[[], Any]) -> Any:
    return run()


def _claiming(stack_trace: str) -> Callable[[Callable[[], Any]], Any]:
    """``_call``, as code that stands at the innermost line of a stack trace."""
    frames = FRAME.findall(stack_trace)
    if not frames:
        return _call
    file, line, name = frames[-1]
    code = _call.__code__.replace(
        co_filename=file, co_firstlineno=int(line) - 1, co_name=name, co_qualname=name
    )
    return FunctionType(code, {})


def _module_at(root: nn.Module, path: str) -> nn.Module:
    """The submodule at a dotted path, made if it is not there."""
    module = root
    for part in path.split(".") if path else ():
        if part not in module._modules:
            module.add_module(part, _Place())
        module = module.get_submodule(part)
    return module


def _names(placeholders: Sequence[fx.Node]) -> Iterator[str]:
    """The original name of parameters and buffers, Dynamo's own for other inputs and in doubt."""
    seen: set[str] = set()
    for node in placeholders:
        source = getattr(node, "_dynamo_source", None)
        label = getattr(source, "name", "")
        label = label() if callable(label) else label
        stateful = "._parameters[" in label or "._buffers[" in label
        name = _path(label) if stateful else node.name
        yield node.name if name in seen else name
        seen.add(name)


def _owner(node: fx.Node) -> str:
    """Dotted path of the innermost module that Dynamo saw the node in; "" if none."""
    stack = node.meta.get("nn_module_stack") or {}
    return _path(list(stack.values())[-1][0]) if stack else ""


def _path(label: str) -> str:
    """``L['self']._modules['layers']._modules['0'].mlp[1]`` -> ``layers.0.mlp.1``."""
    label = re.sub(r"^[LG]\['[^']*'\]", "", label)
    label = re.sub(r"_(?:modules|parameters|buffers)\['([^']*)'\]", r"\1", label)
    label = re.sub(r"\[(?:'([^']*)'|(\d+))\]", lambda m: f".{m[1] or m[2]}", label)
    return label.strip(".")
