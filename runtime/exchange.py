"""The transfers of one rank in one step: pieces to and from other ranks, and to itself.

What a rank sends to itself, because two stages share it, is no message: it waits here until the
receiving stage reads it. The receive may be posted before the send.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mllm_compile.compiler import regions
from mllm_compile.compiler.action import Action
from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.compiler.program import Piece, Transfer
from mllm_compile.runtime.measures import Measures
from mllm_compile.runtime.outbox import Outbox
from mllm_compile.runtime.pieces import is_whole, pack, room, unpack
from mllm_compile.runtime.transport import Handle, Transport

Mail = dict[tuple[Action, int], torch.Tensor]
"""Packed pieces from this rank to itself, by the action that sends and the place in its list."""


@dataclass(frozen=True)
class _Local:
    """A piece from this rank."""

    mail: Mail
    key: tuple[Action, int]
    value: torch.Tensor
    region: regions.Region

    def wait(self) -> None:
        if self.key not in self.mail:
            raise RunError(
                explain(f"{self.key[0]}", expected="to come before what it sends is read")
            )
        unpack(self.mail.pop(self.key), self.value, self.region)


@dataclass(frozen=True)
class _Remote:
    """A piece from another rank; its arrival tells the outbox."""

    handle: Handle
    arrived: tuple[Outbox, Action, int]
    buffer: torch.Tensor
    value: torch.Tensor
    region: regions.Region

    def wait(self) -> None:
        self.handle.wait()
        outbox, action, rank = self.arrived
        outbox.arrived(action, rank)
        if self.buffer is not self.value:
            unpack(self.buffer, self.value, self.region)


@dataclass(frozen=True)
class Arrival:
    """One value being received: the tensor that all its pieces go to."""

    value: torch.Tensor
    pieces: list[Handle]

    def wait(self) -> None:
        """See :class:`Handle`."""
        for piece in self.pieces:
            piece.wait()


class Exchange:
    """Posts transfers."""

    def __init__(self, transport: Transport, outbox: Outbox, measures: Measures) -> None:
        self._transport, self._outbox, self._measures = transport, outbox, measures
        self._mail: Mail = {}

    def send(self, transfer: Transfer, action: Action, values: Mapping[str, torch.Tensor]) -> None:
        """Start to send the pieces of a transfer's values, which must be as announced."""
        for name, spec in zip(transfer.values, transfer.specs, strict=True):
            tensor = values[name]
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                expected, got = (
                    f"{spec.dtype} {spec.shape}",
                    f"{tensor.dtype} {tuple(tensor.shape)}",
                )
                raise RunError(explain(name, expected=expected, got=got))
        handles: dict[int, list[Handle]] = {}
        own = 0
        for piece in transfer.pieces:
            packed = pack(values[piece.value], piece.region)
            if piece.rank == self._transport.rank:
                self._mail[action, own] = packed
                own += 1
            else:
                handles.setdefault(piece.rank, []).append(self._transport.send(packed, piece.rank))
                self._measures.count_send(packed, forward=action.kind == "SEND_F")
        self._outbox.sent(action, handles)

    def receive(self, transfer: Transfer, action: Action) -> dict[str, Arrival]:
        """Post the receives of a transfer: its values by name."""
        found = {
            name: Arrival(room(spec, self._transport.device), [])
            for name, spec in zip(transfer.values, transfer.specs, strict=True)
        }
        missing = {name: arrival.value.numel() for name, arrival in found.items()}
        own = 0
        for piece in transfer.pieces:
            arrival = found[piece.value]
            missing[piece.value] -= regions.size(piece.region)
            if piece.rank == self._transport.rank:
                key = (action.match, own)
                arrival.pieces.append(_Local(self._mail, key, arrival.value, piece.region))
                own += 1
            else:
                arrival.pieces.append(self._post(piece, arrival.value, action))
        for name, count in missing.items():
            if count:
                total = found[name].value.numel()
                got = f"pieces with {total - count}"
                raise RunError(explain(name, expected=f"{total} elements", got=got))
        return found

    def _post(self, piece: Piece, value: torch.Tensor, action: Action) -> Handle:
        """Receive into the value itself where the piece is all of it."""
        buffer = value
        if not (value.is_contiguous() and is_whole(piece.region, value)):
            buffer = value.new_empty(regions.shape(piece.region))
        handle = self._transport.receive(buffer, piece.rank)
        return _Remote(handle, (self._outbox, action, piece.rank), buffer, value, piece.region)
