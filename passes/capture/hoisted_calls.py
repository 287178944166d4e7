"""A call of known tensors as one opaque node: ``mllm::hoisted(tensors, key) -> tensors``.

The call runs on the shadows while the model is captured, and again in the prologue for every
microbatch. Its results are known values. What it returned besides tensors, and the shapes of its
tensors, are checked at every replay.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mllm_compile.compiler.errors import GuardError, explain
from mllm_compile.passes.capture.entries import PLAIN
from mllm_compile.passes.capture.lift import lifted
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.tracing import FakeTensor, outside_modes

if TYPE_CHECKING:
    from mllm_compile.passes.capture.shadow_mode import ShadowMode

# Every hoisted call of this process, by the key in its node's arguments.
CALLS: dict[int, "HoistedCall"] = {}


BAKED = (
    *PLAIN,
    torch.Size,
    torch.memory_format,
    torch.layout,
    FunctionType,
    BuiltinFunctionType,
    type,
    nn.Module,
    range,
    slice,
)


class Refused(Exception):
    """Raised where a call cannot be one opaque node; the message says why."""


@dataclass(frozen=True)
class Results:
    """What a call returned: its tensors, and the rest as a pattern."""

    tensors: list[torch.Tensor]
    plain: tuple[Any, ...]  # None where a tensor stands
    is_tensor: tuple[bool, ...]
    spec: Any

    @staticmethod
    def of(value: Any) -> "Results":
        """Take apart what a call returned."""
        leaves, spec = pytree.tree_flatten(value)
        is_tensor = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        return Results(
            [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            tuple(None if is_t else x for x, is_t in zip(leaves, is_tensor, strict=True)),
            is_tensor,
            spec,
        )

    def rebuild(self, tensors: list[torch.Tensor]) -> Any:
        """The returned value with other tensors in the tensors' places."""
        fresh = iter(tensors)
        pairs = zip(self.plain, self.is_tensor, strict=True)
        return pytree.tree_unflatten([next(fresh) if is_t else x for x, is_t in pairs], self.spec)

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype, torch.device]]:
        """Shape, dtype and device of each tensor."""
        return [(tuple(t.shape), t.dtype, t.device) for t in self.tensors]

    def same_as(self, other: "Results") -> bool:
        """Whether two runs on equal arguments gave the same."""
        return (
            self.spec == other.spec
            and self.shapes() == other.shapes()
            and self.plain == other.plain
            and all(
                torch.equal(a.nan_to_num(), b.nan_to_num())
                for a, b in zip(self.tensors, other.tensors, strict=True)
            )
        )


class HoistedCall:
    """A function and its arguments, tensors left out."""

    def __init__(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any):
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.function, self.name, self.where = function, name, source_line()
        self.tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.leaves = [None if isinstance(leaf, torch.Tensor) else _frozen(leaf) for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.lift: torch.dtype | None = None
        self.expected: Results

    def run(self, tensors: list[torch.Tensor]) -> Results:
        """Call the function on real tensors; it must not change what it was given."""
        leaves = list(self.leaves)
        copies = [tensor.detach().clone() for tensor in tensors]
        for place, tensor in zip(self.places, copies, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with torch.no_grad(), lifted(self.lift):
            result = self.function(*args, **kwargs)
        if isinstance(self.function, FunctionType):
            if pytree.tree_structure((args, kwargs)) != self.spec:
                raise Refused("it changes a container that it was given")
            if not all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True)):
                raise Refused("it writes into a tensor that it was given")
        return Results.of(result)

    def record(self, shadows: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on the captured batch, twice; accept only results that can be replayed."""
        results = self.run(shadows)
        if not results.tensors:
            raise Refused("it returns no tensor")
        if any(isinstance(t, FakeTensor) or t.requires_grad for t in results.tensors):
            raise Refused("it reads parameters or buffers")
        if not all(is_plain(value) for value in results.plain):
            raise Refused("it returns an object that cannot be looked into")
        if not results.same_as(self.run(shadows)):
            raise Refused("it returns something else when it is called again")
        self.expected = results
        return _owned(results.tensors)

    def replay(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run on another microbatch; GuardError where more than the tensors' values differs."""
        results = self.run(tensors)
        for what, got, want in (
            ("structure", results.spec, self.expected.spec),
            ("shapes", results.shapes(), self.expected.shapes()),
            ("host values", results.plain, self.expected.plain),
        ):
            if got != want:
                raise GuardError(
                    explain(
                        f"{what} returned by {self.name} at {self.where}",
                        expected=str(want),
                        got=str(got),
                    )
                )
        return _owned(results.tensors)


def record(
    mode: "ShadowMode", function: Callable[..., Any], name: str, args: Any, kwargs: Any
) -> tuple[HoistedCall, list[torch.Tensor]]:
    """Run a call on the shadows of its arguments; raises Refused if it cannot be one node."""
    call = HoistedCall(function, name, args, kwargs)
    call.lift = mode.lift
    with outside_modes():
        return call, call.record([mode.shadows.real(tensor).clone() for tensor in call.tensors])


def emit(mode: "ShadowMode", call: HoistedCall, real: list[torch.Tensor]) -> Any:
    """Put a recorded call into the trace as one node; returns what the call would return."""
    key = len(CALLS)
    CALLS[key] = call
    with mode:
        fakes = torch.ops.mllm.hoisted(call.tensors, key)
    call.tensors = []
    for fake, value in zip(fakes, real, strict=True):
        mode.shadows.put(fake, value)
    mode.hoisted.append(call.name)
    return call.expected.rebuild(list(fakes))


def _owned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]


def _frozen(value: Any) -> Any:
    """A configuration as it is during capture, which lends it another attention implementation."""
    return copy.deepcopy(value) if hasattr(value, "to_dict") else value


def is_plain(value: Any) -> bool:
    """Values that may be baked into a call: numbers, types, functions, modules, configurations."""
    return isinstance(value, BAKED) or hasattr(value, "__func__") or hasattr(value, "to_dict")


@torch.library.custom_op("mllm::hoisted", mutates_args=())
def hoisted(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    """Replay the call of this key."""
    try:
        return CALLS[key].replay(tensors)
    except Refused as reason:
        raise GuardError(f"{CALLS[key].name} at {CALLS[key].where}: {reason}") from reason


@hoisted.register_fake
def _(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    shapes = CALLS[key].expected.shapes()
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
