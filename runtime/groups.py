"""Collectives of some ranks, from point-to-point messages on channels of the group's own.

Every collective is one exchange, in which each member sends a part to each other one, or two. Sums
are taken in the order of the group's ranks: all members get the same bits, on any backend. Shapes
may differ between members and may be without elements. :class:`NativeGroup` leaves the work to the
backend instead.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mllm_compile.compiler.mesh import Mesh
from mllm_compile.kernels.collective.members import Member, Reduction, Shape
from mllm_compile.runtime.transport import Handle, PeerLostError, Transport, reason, wire

_COMBINE: Mapping[Reduction, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}

_SMALL = 1024
"""Elements up to which it is the number of messages that counts, not their size."""


class Links(Protocol):
    """Channels between the members of one group, apart from those of every other group."""

    def send(self, tensor: torch.Tensor, peer: int, purpose: str) -> Handle:
        """Start to send a contiguous tensor to rank ``peer``; ``purpose`` is for messages."""

    def receive(self, buffer: torch.Tensor, peer: int, purpose: str) -> Handle:
        """Start to fill a contiguous buffer from rank ``peer``."""


class Group:
    """The communicator of ``ranks`` on the member ``rank``; all members call alike, in one order.

    Tensors that a collective returns may be those given to it, not copies.
    """

    def __init__(self, ranks: Sequence[int], rank: int, links: Links) -> None:
        self.ranks, self.rank, self._links = tuple(ranks), rank, links
        self.place, self.size = self.ranks.index(rank), len(self.ranks)

    def all_gather(self, x: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """The tensors of all members, in the order of ``ranks``; ``shapes`` are theirs."""
        return self._exchange([wire(x)] * self.size, shapes, "all_gather")

    def all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]
    ) -> list[torch.Tensor]:
        """Part i goes to member i; returns what the members sent here, of ``shapes``."""
        return self._exchange(parts, shapes, "all_to_all")

    def start_all_to_all(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape]
    ) -> Callable[[], list[torch.Tensor]]:
        """The same, under way until the result is called for."""
        return self._start(parts, shapes, "all_to_all")

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Part i goes to member i; returns the sum of what was sent here."""
        return self._reduce_scatter(parts, "reduce_scatter")

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
        """The elementwise sum or maximum over all members, whose shapes are equal."""
        if self.size == 2 or x.numel() <= _SMALL:
            everything = self._exchange([wire(x)] * self.size, [x.shape] * self.size, "all_reduce")
            return _combined(everything, reduction)
        parts = x.reshape(-1).tensor_split(self.size)
        mine = self._reduce_scatter(parts, "all_reduce", reduction)
        sums = self._exchange([mine] * self.size, [part.shape for part in parts], "all_reduce")
        return torch.cat(sums).view(x.shape)

    def _reduce_scatter(
        self, parts: Sequence[torch.Tensor], purpose: str, reduction: Reduction = "sum"
    ) -> torch.Tensor:
        shape = parts[self.place].shape
        return _combined(self._exchange(parts, [shape] * self.size, purpose), reduction)

    def _exchange(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], purpose: str
    ) -> list[torch.Tensor]:
        return self._start(parts, shapes, purpose)()

    def _start(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], purpose: str
    ) -> Callable[[], list[torch.Tensor]]:
        purpose = f"{purpose} of ranks {', '.join(map(str, self.ranks))}"
        own = parts[self.place]
        received = [own if i == self.place else own.new_empty(s) for i, s in enumerate(shapes)]
        others = [(i, peer) for i, peer in enumerate(self.ranks) if i != self.place]
        try:
            handles = [self._links.receive(received[i], peer, purpose) for i, peer in others]
            handles += [self._links.send(wire(parts[i]), peer, purpose) for i, peer in others]
        except PeerLostError as error:
            raise PeerLostError(f"{purpose}: {error}") from error

        def finish() -> list[torch.Tensor]:
            try:
                for handle in handles:
                    handle.wait()
            except PeerLostError as error:
                raise PeerLostError(f"{purpose}: {error}") from error
            return received

        return finish


class NativeGroup(Group):
    """The same collectives by those of the backend, where its sums are equal on all members."""

    def __init__(self, ranks: Sequence[int], rank: int, links: Links, group: dist.ProcessGroup):
        super().__init__(ranks, rank, links)
        self._group = group

    def all_gather(self, x: torch.Tensor, shapes: Sequence[Shape]) -> list[torch.Tensor]:
        """See :class:`Group`."""
        if len({tuple(shape) for shape in shapes}) > 1:
            return super().all_gather(x, shapes)
        out = x.new_empty((self.size, *x.shape))
        self._call("all_gather", dist.all_gather_single, _flat(out), _flat(x))
        return list(out.unbind())

    def reduce_scatter(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """See :class:`Group`."""
        if len({part.shape for part in parts}) > 1:
            return super().reduce_scatter(parts)
        given, out = torch.cat([_flat(part) for part in parts]), wire(parts[0]).clone()
        self._call("reduce_scatter", dist.reduce_scatter_single, _flat(out), given)
        return out

    def all_reduce(self, x: torch.Tensor, reduction: Reduction = "sum") -> torch.Tensor:
        """See :class:`Group`."""
        out, kind = wire(x).clone(), getattr(dist.ReduceOp, reduction.upper())
        self._call("all_reduce", dist.all_reduce, _flat(out), kind)
        return out

    def _start(
        self, parts: Sequence[torch.Tensor], shapes: Sequence[Shape], purpose: str
    ) -> Callable[[], list[torch.Tensor]]:
        out = [parts[0].new_empty(tuple(shape)) for shape in shapes]
        given, got = (torch.cat([_flat(part) for part in side]) for side in (parts, out))
        sizes = [[_flat(part).numel() for part in side] for side in (out, parts)]
        work = self._call(purpose, dist.all_to_all_single, got, given, *sizes, async_op=True)

        def finish() -> list[torch.Tensor]:
            self._call(purpose, lambda group: work.wait())
            for part, piece in zip(out, torch.split(got, sizes[0]), strict=True):
                _flat(part).copy_(piece)
            return out

        return finish

    def _call(
        self, purpose: str, collective: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        try:
            return collective(*arguments, group=self._group, **options)
        except RuntimeError as error:
            ranks = ", ".join(map(str, self.ranks))
            raise PeerLostError(f"{purpose} of ranks {ranks}: {reason(error)}") from error


def _combined(parts: Sequence[torch.Tensor], reduction: Reduction) -> torch.Tensor:
    combine, (total, *others) = _COMBINE[reduction], parts
    if not others:
        return total
    total = combine(total, others[0])
    for other in others[1:]:
        combine(total, other, out=total)
    return total


def groups_of(meshes: Iterable[Mesh]) -> set[tuple[int, ...]]:
    """The groups along the axes of the meshes: what ``Transport.connect`` takes."""
    return {
        mesh.group(rank, axis.name) for mesh in meshes for axis in mesh.axes for rank in mesh.ranks
    }


def members_of(mesh: Mesh, transport: Transport) -> dict[str, Member]:
    """Where this rank stands along the axes of a mesh, for the collectives of its graphs."""
    rank = transport.rank
    return {
        axis.name: Member(
            mesh.place(rank, axis.name), axis.size, transport.group(mesh.group(rank, axis.name))
        )
        for axis in mesh.axes
    }


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dim, with a complex number as two real ones: what backends take."""
    flat = wire(tensor).reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if tensor.is_complex() else flat
