"""Writes every operator that reaches it, below autograd, into one graph.

Lighter than ``make_fx``, which this project's traces need little of: shapes are static, no proxy
ever stands for a tensor, and every tensor of a trace is a fake or a constant. Operators composed of
others are decomposed as autograd would have; tensors from outside become constants of the graph.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One graph in the making; ``node_of`` tells which node made a tensor."""

    def __init__(self, fake_mode: FakeTensorMode, decompositions: Decompositions | None = None):
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = fake_mode
        self.root = nn.Module()
        self.graph = fx.Graph()
        self._decompositions = decompositions or {}
        self._nodes = WeakIdKeyDictionary()
        self._constants: dict[int, fx.Node] = {}

    def placeholder(self, fake: torch.Tensor) -> None:
        """An input of the graph."""
        self._made(self.graph.placeholder(f"input_{len(self._nodes)}"), fake)

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node whose result the tensor is; None if it is a constant."""
        return self._nodes.get(tensor)  # type: ignore[no-untyped-call, no-any-return]

    def made(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """From now on the tensor stands for what ``node`` computes."""
        self._nodes[tensor] = node

    def finish(self, results: Sequence[Any]) -> fx.GraphModule:
        """The graph, returning ``results`` as a list."""
        self.graph.output([self._argument(result) for result in results])
        return _LazyGraphModule(
            self.root, self.graph
        )  # nobody runs its code before it is rewritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator and record it."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        decompose = self._decompositions.get(func)
        if decompose is None and not _has_kernel(func, _device_type(args)):
            decompose = func.decompose
        if decompose is not None:
            with self:
                out = decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        out = func(*args, **kwargs)
        self._made(self.graph.call_function(target, node_args, node_kwargs), out)
        return out

    def _made(self, node: fx.Node, value: Any) -> None:
        """``value`` is what ``node`` computes; elements of a sequence get nodes of their own."""
        node.meta["val"] = _snapshot(value)
        if isinstance(value, torch.Tensor):
            self.made(node, value)
        elif isinstance(value, (list, tuple)):
            for place, item in enumerate(value):
                if item is not None:
                    element = self.graph.call_function(operator.getitem, (node, place))
                    self._made(element, item)

    def _argument(self, value: Any) -> Any:
        """An operator's argument with nodes in the place of tensors."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value) or self._constant(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._argument(item) for item in value)
        if isinstance(value, dict):
            return {name: self._argument(item) for name, item in value.items()}
        return value

    def _constant(self, tensor: torch.Tensor) -> fx.Node:
        assert not isinstance(tensor, FakeTensor), "a tensor of the trace that no node made"
        if id(tensor) not in self._constants:
            name = f"_constant_{len(self._constants)}"
            setattr(self.root, name, tensor)  # also keeps it alive, and its id its own
            node = self.graph.get_attr(name)
            node.meta["val"] = self._fake_mode.from_tensor(tensor.detach(), static_shapes=True)
            self._constants[id(tensor)] = node
        return self._constants[id(tensor)]


def _snapshot(value: Any) -> Any:
    """A fake result as it is now: its shape or grad flag may change in place later."""
    if isinstance(value, FakeTensor):
        return snapshot_fake(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_snapshot(item) for item in value)
    return value


def _device_type(value: Any) -> str | None:
    """Device type of the first tensor among an operator's arguments."""
    if isinstance(value, torch.Tensor):
        return value.device.type
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_device_type, value)), None)
    return None


@cache
def _has_kernel(func: Any, device_type: str | None) -> bool:
    """Whether eager runs the operator as it is on the device, instead of decomposing it."""
    if device_type is None:
        return False
    key = torch._C._parse_dispatch_key(torch._C._dispatch_key_for_device(device_type))
    assert key is not None, device_type
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
