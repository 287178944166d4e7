"""Ranks as processes, over torch.distributed: gloo between CPUs, NCCL between GPUs.

Two process groups carry the transfers, one towards higher ranks and one towards lower ones. NCCL
runs the operations of one pair of ranks and one group in the order in which they were posted; with
a group per direction neither end can wait behind a message of its own. All ranks create the groups
at once, in one order, and open every channel before the first step.
"""

import re
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from mllm_compile.runtime.device import backend_of
from mllm_compile.runtime.transport import Done, Handle, PeerLostError, as_bytes

Channel = tuple[int, int]


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


class DistributedTransport:
    """The end of this process. ``channels`` are all (source rank, target rank) pairs in use.

    Every rank constructs it, with the same ``channels``, after the launcher (or torchrun) has set
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. ``timeout`` bounds every wait, in seconds.
    """

    def __init__(
        self, device: torch.device, channels: Iterable[Channel] = (), timeout: float = 1800.0
    ) -> None:
        limit = timedelta(seconds=timeout)
        if not dist.is_initialized():
            dist.init_process_group(backend_of(device), timeout=limit)
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self._up = dist.new_group(timeout=limit)
        self._down = dist.new_group(timeout=limit)
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
        if tensor.numel() == 0:
            return Done()
        group = self._up if peer > self.rank else self._down
        try:
            return _Work(dist.isend(as_bytes(tensor), peer, group), tensor, peer)
        except RuntimeError as error:
            raise _lost(f"rank {peer}", error) from error

    def receive(self, buffer: torch.Tensor, peer: int) -> Handle:
        """See :class:`Transport`."""
        if buffer.numel() == 0:
            return Done()
        group = self._down if peer > self.rank else self._up
        try:
            return _Work(dist.irecv(as_bytes(buffer), peer, group), buffer, peer)
        except RuntimeError as error:
            raise _lost(f"rank {peer}", error) from error

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`Transport`."""
        parts = [torch.empty_like(tensor) for _ in range(self.num_ranks)]
        try:
            dist.all_gather(parts, tensor)
        except RuntimeError as error:
            raise _lost("some rank", error) from error
        return parts

    def close(self) -> None:
        """Wait for all ranks, so that none misses what another has sent last, and leave."""
        dist.barrier()
        dist.destroy_process_group()


def _lost(who: str, error: RuntimeError) -> PeerLostError:
    """The backend's reason in short: without its source position and its advice."""
    line = str(error).strip().partition("\n")[0]
    reason = re.sub(r"^\[[^]]*\]\s*", "", line).partition(". ")[0]
    return PeerLostError(f"{who} does not answer ({reason})")
