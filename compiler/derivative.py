"""Ask autograd itself about one operator: which arguments get a gradient, and at which cost.

The operator runs on fake tensors (shapes without data) whose ``requires_grad`` flags are those of
the node's arguments; then its backward runs on fake gradients. So the answers are autograd's own,
for every operator, dtype and custom backward, and FLOPs are those that FlopCounterMode counts.
Answers depend on the call alone, so equal calls (the blocks of a model repeat) are asked once.

An *edge* is one tensor argument of the call, in the order of the flattened arguments; an *element*
is one result of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.compiler.graph import tensors_of


@dataclass(frozen=True, slots=True)
class Argument:
    """All that an operator can see of a tensor argument but its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor, requires_grad: bool) -> "Argument":
        """Describe a fake tensor."""
        return Argument(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes() // tensor.element_size(),
            tensor.dtype,
            tensor.device,
            requires_grad,
        )

    def leaf(self) -> torch.Tensor:
        """A fake leaf tensor that looks like the argument."""
        base = torch.empty(self.storage, dtype=self.dtype, device=self.device)
        view = base.as_strided(self.shape, self.stride, self.offset)
        return view.detach().requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Call:
    """One operator call: the target and its arguments, tensors described by ``Argument``."""

    target: Callable[..., Any] = field(compare=False)
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)
    key: Any

    @staticmethod
    def of(node: fx.Node, requires_grad: Callable[[fx.Node], bool]) -> "Call":
        """The call that a node makes; ``requires_grad`` tells about its arguments."""

        def describe(source: fx.Node) -> Any:
            tensor = tensors_of(source)[0]
            if tensor is None:
                raise CaptureError(
                    explain(f"%{node.name}: argument %{source.name}", expected="a tensor")
                )
            return Argument.of(tensor, requires_grad(source))

        assert callable(node.target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), describe)
        recording = node.meta.get("grad", True)
        return Call(node.target, args, kwargs, (node.target, recording, _key((args, kwargs))))

    @property
    def recording(self) -> bool:
        """Whether the model had gradient recording on."""
        return bool(self.key[1])


@dataclass(frozen=True, slots=True)
class Forward:
    """``requires_grad`` of every element, forward FLOPs, and the edge whose storage it shares."""

    requires_grad: tuple[bool, ...]
    flops: int
    alias: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """Which edges get a gradient; FLOPs of all of them, and of the non-weight ones alone.

    ``saved_edges`` and ``saved_elements`` are kept for the backward pass, and ``saved_bytes`` of
    tensors that are neither.
    """

    edges: tuple[bool, ...] = ()
    flops: int = 0
    input_flops: int = 0
    saved_edges: frozenset[int] = frozenset()
    saved_elements: frozenset[int] = frozenset()
    saved_bytes: int = 0


def edges_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The node's arguments that are nodes, repeated as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def forward(call: Call) -> Forward:
    """Run the call on fake tensors."""
    with FakeTensorMode():
        run = _Run(call)
    return Forward(
        tuple(_requires_grad(item) for item in run.elements),
        run.flops,
        tuple(run.alias(item) for item in run.elements),
    )


@lru_cache(maxsize=1 << 16)
def backward(call: Call, elements: frozenset[int], weights: frozenset[int]) -> Backward:
    """Run the call's backward, for gradients of ``elements``; ``weights`` are parameter edges."""
    with FakeTensorMode():
        run = _Run(call)
        wanted = [k for k, leaf in enumerate(run.leaves) if _requires_grad(leaf)]
        reached, flops = run.gradients(elements, wanted)
        inputs = [k for k in wanted if k not in weights and k in reached]
        _, input_flops = run.gradients(elements, inputs) if set(inputs) != reached else (0, flops)
        saved_edges, saved_elements, saved_bytes = run.saved()
    return Backward(
        tuple(k in reached for k in range(len(run.leaves))),
        flops,
        input_flops,
        saved_edges,
        saved_elements,
        saved_bytes,
    )


class _Run:
    """One execution of a call on fresh leaves, with its autograd graph."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.leaves: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []
        args, kwargs = self._build((call.args, call.kwargs))
        counter = FlopCounterMode(display=False)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        with torch.set_grad_enabled(call.recording), hooks, counter:
            result = call.target(*args, **kwargs)
        elements = result if isinstance(result, tuple | list) else (result,)
        self.elements: tuple[Any, ...] = tuple(elements)
        self.flops = counter.get_total_flops()

    def _build(self, value: Any) -> Any:
        if isinstance(value, Argument):
            self.leaves.append(value.leaf())
            return self.leaves[-1]
        if isinstance(value, list):
            return [self._build(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self._build(item) for item in value)
        if isinstance(value, dict):
            return {name: self._build(item) for name, item in value.items()}
        return value

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append(tensor)
        return tensor

    def alias(self, element: Any) -> int | None:
        """The edge whose storage an element shares."""
        return _sharing(element, self.leaves)

    def gradients(self, elements: frozenset[int], wanted: Sequence[int]) -> tuple[set[int], int]:
        """Edges among ``wanted`` that get a gradient from ``elements``, and the FLOPs it takes."""
        outputs = [self.elements[k] for k in sorted(elements)]
        if not wanted:
            return set(), 0
        counter = FlopCounterMode(display=False)
        try:
            with counter:
                found = torch.autograd.grad(
                    outputs,
                    [self.leaves[k] for k in wanted],
                    [torch.empty_like(item) for item in outputs],
                    retain_graph=True,
                    allow_unused=True,
                )
        except (RuntimeError, NotImplementedError) as error:
            raise CaptureError(f"{self.call.target}: no backward: {error}") from error
        reached = {k for k, gradient in zip(wanted, found, strict=True) if gradient is not None}
        return reached, counter.get_total_flops()

    def saved(self) -> tuple[frozenset[int], frozenset[int], int]:
        """Edges and elements that the backward keeps, and bytes of what else it keeps."""
        edges, elements, other = set(), set(), {}
        for tensor in self.kept:
            if (edge := _sharing(tensor, self.leaves)) is not None:
                edges.add(edge)
            elif (element := _sharing(tensor, self.elements)) is not None:
                elements.add(element)
            else:
                other[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return frozenset(edges), frozenset(elements), sum(other.values())


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _sharing(value: Any, tensors: Sequence[Any]) -> int | None:
    """Index of the first of ``tensors`` in whose storage ``value`` lies."""
    if not isinstance(value, torch.Tensor):
        return None
    storage = _storage(value)
    for k, tensor in enumerate(tensors):
        if isinstance(tensor, torch.Tensor) and _storage(tensor) == storage:
            return k
    return None


def _key(value: Any) -> Any:
    """A hashable stand-in; types count, since 1, 1.0 and True are equal."""
    if isinstance(value, tuple | list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", *((name, _key(item)) for name, item in sorted(value.items())))
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step)))
    return (type(value), value)
