"""A custom ``torch.autograd.Function`` as one opaque node with its own backward.

Tracing would record what its forward does, and silently differentiate that instead of calling its
backward. While a model is captured, ``Function.apply`` records ``mllm::function(tensors, key)``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mllm_compile.compiler.errors import CaptureError, explain
from mllm_compile.passes.capture.provenance import source_line
from mllm_compile.passes.capture.tracing import outside_modes

# Every custom function call of this process, by the key in its node's arguments.
CALLS: dict[int, "FunctionCall"] = {}
# Functions that torch makes for operators with a registered backward: those are nodes already.
REGISTERED = "torch._library"
Spec = tuple[tuple[int, ...], torch.dtype, torch.device]


class _Context:
    """What a custom function sees as ``ctx``."""

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[torch.Tensor | None, ...] = ()
        self.not_differentiable: tuple[torch.Tensor, ...] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: torch.Tensor | None) -> None:
        """Forward-mode differentiation is not captured."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.not_differentiable = tensors

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        raise CaptureError("a custom autograd.Function that writes into its inputs (mark_dirty)")

    def set_materialize_grads(self, value: bool) -> None:
        """Missing gradients arrive as zeros either way."""


INTERNAL = frozenset(vars(_Context(())))


class FunctionCall:
    """One call of a custom function: the class, its other arguments, and what it saves."""

    def __init__(self, cls: type[torch.autograd.Function], args: Sequence[Any]):
        self.cls = cls
        self.where = source_line()
        self.places = [i for i, value in enumerate(args) if isinstance(value, torch.Tensor)]
        self.args = [None if isinstance(value, torch.Tensor) else value for value in args]
        self.needs = tuple(isinstance(v, torch.Tensor) and v.requires_grad for v in args)
        self.is_tuple = False
        self.num_outputs = 0
        self.attributes: dict[str, Any] = {}
        self.saved: list[tuple[str, int]] = []
        self.has_gradient: list[bool] = []
        self.not_differentiable: list[bool] = []
        self.output_specs: list[Spec] = []
        self.gradient_specs: list[Spec] = []

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[_Context, list[torch.Tensor]]:
        """Run the function's own forward."""
        args, context = list(self.args), _Context(self.needs)
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        with torch.no_grad():
            if self.cls.setup_context is not torch.autograd.Function.setup_context:
                output = self.cls.forward(*args)
                self.cls.setup_context(context, tuple(args), output)
            else:
                output = self.cls.forward(context, *args)
        self.is_tuple = isinstance(output, tuple)
        return context, list(output) if isinstance(output, tuple) else [output]

    def extras(
        self, context: _Context, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> tuple[list[tuple[str, int]], list[torch.Tensor]]:
        """Where each saved tensor is, and those that are neither inputs nor outputs."""
        saved: list[tuple[str, int]] = []
        extra: list[torch.Tensor] = []
        for tensor in context.saved_tensors:
            if tensor is None:
                saved.append(("none", 0))
                continue
            for kind, group in (("input", tensors), ("output", outputs)):
                hits = [i for i, candidate in enumerate(group) if candidate is tensor]
                if hits:
                    saved.append((kind, hits[0]))
                    break
            else:
                saved.append(("extra", len(extra)))
                extra.append(tensor)
        return saved, extra

    def pick_saved(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors that backward needs, from inputs and results (outputs, then extras)."""
        groups = {
            "input": tensors,
            "output": results[: self.num_outputs],
            "extra": results[self.num_outputs :],
        }
        return [groups[kind][i] for kind, i in self.saved if kind != "none"]

    def backward(
        self, saved: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the function's own backward; one result per tensor argument."""
        context, fresh = _Context(self.needs), iter(saved)
        context.saved_tensors = tuple(
            None if kind == "none" else next(fresh) for kind, _ in self.saved
        )
        vars(context).update(self.attributes)
        with torch.no_grad():
            result: Any = self.cls.backward(context, *gradients)
        result = result if isinstance(result, tuple) else (result,)
        return [result[place] for place in self.places]

    def learn(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run forward and backward once on fakes: shapes, saved tensors, missing gradients."""
        context, outputs = self.forward(tensors)
        self.num_outputs = len(outputs)
        self.saved, extra = self.extras(context, tensors, outputs)
        self.attributes = {k: v for k, v in vars(context).items() if k not in INTERNAL}
        self._refuse_hidden_tensors(outputs)
        self.not_differentiable = [
            any(output is tensor for tensor in context.not_differentiable) for output in outputs
        ]
        self.output_specs = [_spec(tensor) for tensor in [*outputs, *extra]]
        saved = self.pick_saved(tensors, [*outputs, *extra])
        gradients = self.backward(saved, [torch.ones_like(output) for output in outputs])
        self.has_gradient = [gradient is not None for gradient in gradients]
        self.gradient_specs = [_spec(gradient) for gradient in gradients if gradient is not None]

    def _refuse_hidden_tensors(self, outputs: Sequence[Any]) -> None:
        hidden = pytree.tree_leaves((self.attributes, self.args))
        if any(isinstance(value, (torch.Tensor, torch.nn.Module)) for value in hidden):
            raise CaptureError(
                explain(
                    f"{self.cls.__qualname__} at {self.where}",
                    expected="tensors as arguments, and saved by save_for_backward",
                    got="a tensor or module in a container or as an attribute of ctx",
                )
            )
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            raise CaptureError(
                explain(
                    f"{self.cls.__qualname__} at {self.where}",
                    expected="a custom autograd.Function that returns tensors",
                )
            )


@torch.library.custom_op("mllm::function", mutates_args=())
def function(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    """Outputs of the custom function, then the extra tensors that it saves."""
    call = CALLS[key]
    context, outputs = call.forward(tensors)
    results = [*outputs, *call.extras(context, tensors, outputs)[1]]
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in results]


@function.register_fake
def _(tensors: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    return [_empty(spec) for spec in CALLS[key].output_specs]


@torch.library.custom_op("mllm::function_backward", mutates_args=())
def function_backward(
    saved: list[torch.Tensor], gradients: list[torch.Tensor], key: int
) -> list[torch.Tensor]:
    """The gradients that exist, in the order of the tensor arguments."""
    found = CALLS[key].backward(saved, gradients)
    return [
        gradient.clone(memory_format=torch.contiguous_format)
        for gradient in found
        if gradient is not None
    ]


@function_backward.register_fake
def _(saved: list[torch.Tensor], gradients: list[torch.Tensor], key: int) -> list[torch.Tensor]:
    return [_empty(spec) for spec in CALLS[key].gradient_specs]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, ctx.key = inputs
    ctx.save_for_backward(*CALLS[ctx.key].pick_saved(tensors, output))


def _backward(ctx: Any, gradients: Any) -> Any:
    call = CALLS[ctx.key]
    given = [
        _empty(spec).zero_() if gradient is None else gradient
        for gradient, spec in zip(gradients, call.output_specs, strict=True)
    ]
    found = iter(
        torch.ops.mllm.function_backward(
            list(ctx.saved_tensors), given[: call.num_outputs], ctx.key
        )
    )
    return [next(found) if has else None for has in call.has_gradient], None


function.register_autograd(_backward, setup_context=_setup)


def _record(cls: type[torch.autograd.Function], args: Sequence[Any]) -> Any:
    call = FunctionCall(cls, args)
    tensors = [args[place] for place in call.places]
    with outside_modes(), torch.no_grad():  # fakes carry their own mode: nothing is recorded
        call.learn([tensor.detach() for tensor in tensors])
    key = len(CALLS)
    CALLS[key] = call
    results = torch.ops.mllm.function(tensors, key)[: call.num_outputs]
    outputs = tuple(
        torch.ops.aten.detach.default(result) if hidden else result
        for result, hidden in zip(results, call.not_differentiable, strict=True)
    )
    return outputs if call.is_tuple else outputs[0]


@contextmanager
def opaque_functions() -> Iterator[None]:
    """Record custom functions as nodes; those without a gradient are traced through."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        registered = cls.__module__.startswith(REGISTERED)
        differentiable = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        if registered or not differentiable:
            inlined: Callable[..., Any] = original.__get__(None, cls)
            return inlined(*args, **kwargs)
        if cls.__module__ == "torch.utils.checkpoint":
            raise CaptureError(
                explain(
                    f"checkpoint at {source_line()}",
                    expected="checkpoint(..., use_reentrant=False)",
                    got="the reentrant kind, whose gradient is not in the graph",
                )
            )
        return _record(cls, args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


def _spec(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype, tensor.device


def _empty(spec: Spec) -> torch.Tensor:
    shape, dtype, device = spec
    return torch.empty(shape, dtype=dtype, device=device)
