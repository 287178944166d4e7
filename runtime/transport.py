"""How ranks exchange tensors: the protocol, and the form a value has on the wire.

A *channel* is an ordered pair of ranks. Sends and receives of one channel pair up in the order in
which its two ends post them; nothing is negotiated, so both ends must agree on shape and dtype
beforehand. A tensor without elements is never sent. Collectives of a group of ranks run on channels
of their own and never wait behind a transfer.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from mllm_compile.compiler.errors import RunError

if TYPE_CHECKING:
    from mllm_compile.runtime.groups import Group


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

    def connect(self, groups: Iterable[Sequence[int]]) -> None:
        """Prepare groups of ranks; every rank of the job calls it alike, members or not."""

    def group(self, ranks: Sequence[int]) -> "Group":
        """The communicator of a connected group that this rank is a member of."""


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """The form in which a tensor travels: contiguous, not lazily conjugated or negated.

    A copy is made only if the tensor is not so already.
    """
    return tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as a flat uint8 view: backends differ in the dtypes that they accept."""
    return tensor.reshape(-1).view(torch.uint8)


def reason(error: RuntimeError) -> str:
    """A backend's reason in short: without its source position and its advice."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\]\s*", "", line).partition(". ")[0]


class Done:
    """The handle of a transfer that needs no message."""

    def wait(self) -> None:
        """Nothing to wait for."""
