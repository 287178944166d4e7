"""Ranks as processes, over torch.distributed: gloo between CPUs, NCCL between GPUs.

Two process groups carry the transfers, one towards higher ranks and one towards lower ones. NCCL
runs the operations of one pair of ranks and one group in the order in which they were posted; with
a group per direction neither end can wait behind a message of its own. All ranks create the groups
at once, in one order, and open every channel before the first step. A group of ranks has a process
group of its own, made by all ranks alike.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.runtime.device import backend_of
from mllm_compile.runtime.groups import Group, NativeGroup
from mllm_compile.runtime.transport import Done, Handle, PeerLostError, as_bytes, reason

Channel = tuple[int, int]
Ranks = tuple[int, ...]


class _Work:
    """A torch.distributed operation, its tensor and the rank at its other end."""

    def __init__(self, work: dist.Work | None, tensor: torch.Tensor, peer: int) -> None:
        self._work, self._tensor, self._peer = work, tensor, peer

    def wait(self) -> None:
        """See :class:`Handle`."""
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(f"rank {self._peer}", error) from error


class _Links:
    """The channels of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, tensor: torch.Tensor, peer: int, purpose: str) -> Handle:
        """See :class:`Links`."""
        return self._post(dist.isend, tensor, peer)

    def receive(self, buffer: torch.Tensor, peer: int, purpose: str) -> Handle:
        """See :class:`Links`."""
        return self._post(dist.irecv, buffer, peer)

    def _post(
        self, operation: Callable[..., dist.Work | None], tensor: torch.Tensor, peer: int
    ) -> Handle:
        if tensor.numel() == 0:
            return Done()
        try:
            return _Work(operation(as_bytes(tensor), peer, self.group), tensor, peer)
        except RuntimeError as error:
            raise _lost(f"rank {peer}", error) from error


class DistributedTransport:
    """The end of this process. ``channels`` are all (source rank, target rank) pairs in use.

    Every rank constructs it, with the same ``channels``, after the launcher (or torchrun) has set
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. ``timeout`` bounds every wait, in seconds.
    """

    def __init__(
        self, device: torch.device, channels: Iterable[Channel] = (), timeout: float = 1800.0
    ) -> None:
        self._limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            dist.init_process_group(backend_of(device), timeout=self._limit)
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._up = _Links(dist.new_group(timeout=self._limit))
        self._down = _Links(dist.new_group(timeout=self._limit))
        self._groups: dict[Ranks, Group | None] = {}
        self._open(sorted(set(channels)))

    def _open(self, channels: list[Channel]) -> None:
        """Send one byte over every channel, in one order, so that none connects within a step."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        for source, target in channels:
            if self.rank == source:
                self.send(byte, target).wait()
            elif self.rank == target:
                self.receive(byte, source).wait()

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        """See :class:`Transport`."""
        return (self._up if peer > self.rank else self._down).send(tensor, peer, "")

    def receive(self, buffer: torch.Tensor, peer: int) -> Handle:
        """See :class:`Transport`."""
        return (self._down if peer > self.rank else self._up).receive(buffer, peer, "")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`Transport`."""
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(parts, tensor)
        except RuntimeError as error:
            raise _lost("some rank", error) from error
        return parts

    def connect(self, groups: Iterable[Sequence[int]]) -> None:
        """See :class:`Transport`."""
        for ranks in sorted({tuple(ranks) for ranks in groups} - self._groups.keys()):
            made = dist.new_group(list(ranks), timeout=self._limit, sort_ranks=False)
            self._groups[ranks] = self._communicator(ranks, made)

    def group(self, ranks: Sequence[int]) -> Group:
        """See :class:`Transport`."""
        found = self._groups.get(tuple(ranks))
        if found is None:
            expected = "one that all ranks have connected, with this rank in it"
            raise RunError(explain(f"rank {self.rank}, group {tuple(ranks)}", expected=expected))
        return found

    def _communicator(self, ranks: Ranks, made: dist.ProcessGroup) -> Group | None:
        if self.rank not in ranks:
            return None
        if self.device.type == "cuda":
            group: Group = NativeGroup(ranks, self.rank, _Links(made), made)
        else:
            group = Group(ranks, self.rank, _Links(made))
        group.all_reduce(torch.zeros(len(ranks), device=self.device))  # connects the members
        return group

    def close(self) -> None:
        """Wait for all ranks, so that none misses what another has sent last, and leave."""
        dist.barrier()
        dist.destroy_process_group()


def _lost(who: str, error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"{who} does not answer ({reason(error)})")
