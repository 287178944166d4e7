"""How ranks exchange tensors: the protocol, and the form a value has on the wire.

A *channel* is an ordered pair of ranks. Sends and receives of one channel pair up in the order in
which its two ends post them; nothing is negotiated, so both ends must agree on shape and dtype
beforehand (``Transfer.specs``). A value without elements is never sent.
"""

from typing import Protocol

import torch

from mllm_compile.compiler.captured import TensorSpec
from mllm_compile.compiler.errors import RunError


class PeerLostError(RunError):
    """Another rank ended or closed its connection: a consequence, the cause lies with that rank."""


class Handle(Protocol):
    """A transfer under way. It keeps its tensor alive."""

    def wait(self) -> None:
        """Return once the tensor may be read (a receive) or freed (a send).

        Raises:
            PeerLostError: the other rank is gone.
        """


class Transport(Protocol):
    """What the runtime needs of a network. ``rank`` is this end; ``device`` holds its tensors."""

    rank: int
    num_ranks: int
    device: torch.device

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        """Start to send a contiguous tensor to rank ``peer``."""

    def receive(self, buffer: torch.Tensor, peer: int) -> Handle:
        """Start to fill the contiguous ``buffer`` with the next tensor from rank ``peer``."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in rank order; every rank takes part with an equal shape."""


def to_wire(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The contiguous form in which a value travels: dims from the largest stride of ``spec`` down.

    A copy is made only if the tensor is not laid out as ``spec`` says.
    """
    return tensor.resolve_conj().resolve_neg().permute(_order(spec)).contiguous()


def receive_buffer(
    spec: TensorSpec, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A fresh buffer for ``Transport.receive``, and the view of it that has the shape of ``spec``.

    The view has the strides of ``spec`` too, if these describe a dense tensor.
    """
    order = _order(spec)
    buffer = torch.empty([spec.shape[dim] for dim in order], dtype=spec.dtype, device=device)
    back = sorted(range(len(order)), key=order.__getitem__)
    return buffer, buffer.permute(back)


def _order(spec: TensorSpec) -> list[int]:
    return sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat uint8 view: backends differ in the dtypes that they accept."""
    return tensor.reshape(-1).view(torch.uint8)


class Done:
    """The handle of a transfer that needs no message."""

    def wait(self) -> None:
        """Nothing to wait for."""
