"""A captured program: what one forward of the model is, as two FX graphs.

The *prologue* graph computes, from the batch and the buffers alone, everything that the host had to
know (guards), what Python helpers computed from integers and which keys masks let a query see
(hoisted results), and the counts that a mean loss divides by (denominators). The *main* graph is
the forward itself: functional, ATen only, its placeholders described by ``inputs``.

Metadata of every ``call_function`` node of the main graph:

========== =====================================================================================
``val``    fake result: a tensor, or a tuple or list of tensors
``owner``  dotted path of the module whose forward made the node ("" is the model itself)
``grad``   whether gradient recording was on
``where``  the model's source line, ``file.py:123 function``
========== =====================================================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

InputKind = Literal["parameter", "buffer", "batch", "constant", "hoisted", "denominator"]


@dataclass(frozen=True, slots=True)
class Input:
    """One placeholder of a graph.

    ``name`` is the original FQN of a parameter or buffer (tied weights: the first of their names),
    the key of a batch entry, the name of a constant, or the name of a prologue result.
    """

    kind: InputKind
    name: str
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that the host read while the program was captured.

    ``node`` is the prologue node that computes it anew; a microbatch fits if it gives ``value``.
    ``inputs`` are the batch entries, buffers and constants it is computed from.
    """

    kind: str
    node: str
    value: bool | int | float | complex
    where: str
    inputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides and dtype of one batch entry."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> "TensorSpec":
        """The spec of a real or fake tensor."""
        return TensorSpec(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @staticmethod
    def dense(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> "TensorSpec":
        """The spec of a dense copy in the same order of dims: what its receiver holds.

        ``shape`` is that of the copy where it holds a part of the tensor.
        """
        shape = tuple(tensor.shape if shape is None else shape)
        stride = [1] * tensor.ndim
        size = 1
        for dim in sorted(reversed(range(tensor.ndim)), key=tensor.stride().__getitem__):
            stride[dim] = size
            size *= max(shape[dim], 1)
        return TensorSpec(shape, tuple(stride), tensor.dtype)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a batch must look like before its guards are worth computing."""

    tensors: tuple[tuple[str, TensorSpec], ...]
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """How the capture went, for people: hoisted helpers, refused ones with reasons, notes."""

    passes: int = 1
    seconds: float = 0.0
    hoisted: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    attention: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Captured:
    """One captured program. Both graphs are read-only.

    The main graph returns ``(*outputs, *updates)``: first ``num_outputs`` values of the model (the
    scalar loss comes first), then the new values of the buffers named in ``updates``.

    The prologue returns ``(*guards, *hoisted, *denominators)`` as one flat tuple, in the order of
    ``guards``, then of ``results``: the names under which main's inputs refer to them.

    The loss of the main graph is already divided by its ``denominator`` inputs where the model took
    a mean; the prologue's denominators are the counts of this microbatch alone. Feeding their sum
    over all microbatches makes the microbatch losses (and gradients) add up to the global ones.
    A program whose loss is not such a sum has ``splittable`` False, and the reason in the report.
    """

    main: fx.GraphModule
    prologue: fx.GraphModule
    inputs: tuple[Input, ...]
    prologue_inputs: tuple[Input, ...]
    guards: tuple[Guard, ...]
    results: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    signature: Signature
    num_outputs: int
    updates: tuple[str, ...] = ()
    splittable: bool = True
    report: CaptureReport = field(default_factory=CaptureReport)

    @property
    def denominators(self) -> tuple[str, ...]:
        """Names of the denominator inputs, in prologue order."""
        return tuple(item.name for item in self.inputs if item.kind == "denominator")


@dataclass(frozen=True)
class Prepared:
    """One microbatch, ready to run: the program it fits and the values of its non-parameter inputs.

    ``values`` maps (kind, name) of every batch, constant, hoisted and denominator input to a
    tensor; denominators hold this microbatch's own counts until the step puts in global sums.
    """

    program: Captured
    values: Mapping[tuple[str, str], torch.Tensor]
