"""Ranks as threads of one process, for tests and for verification without a launcher.

A send completes only when its receive is posted (a rendezvous), as on a real network with full
buffers. One lock guards everything, so a deadlock is seen for certain: all ranks that still run
wait, and none of the transfers they wait for is done. It ends all of them with an error that says
who waits for whom.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from mllm_compile.compiler.errors import RunError, explain
from mllm_compile.runtime.groups import Group
from mllm_compile.runtime.transport import Done, Handle, PeerLostError

T = TypeVar("T")


@dataclass
class _Post:
    """One end of a transfer, and the handle that its rank waits on."""

    world: "LocalWorld"
    rank: int
    tensor: torch.Tensor
    what: str
    purpose: str = ""
    done: bool = False

    def wait(self) -> None:
        self.world.wait(self)


@dataclass
class _Channel:
    sends: deque[_Post] = field(default_factory=deque)
    receives: deque[_Post] = field(default_factory=deque)


class LocalWorld:
    """The channels between ``num_ranks`` threads.

    ``delay``, if given, is called before every transfer and returns seconds to sleep: tests use it
    to shake the order in which ranks meet.
    """

    def __init__(self, num_ranks: int, delay: Callable[[], float] | None = None) -> None:
        self.num_ranks = num_ranks
        self._delay = delay
        self._changed = threading.Condition()
        self._channels: dict[tuple[int, int, str], _Channel] = defaultdict(_Channel)
        self._running = set(range(num_ranks))
        self._waiting: dict[int, _Post] = {}
        self._failure: Exception | None = None

    def transport(self, rank: int, device: torch.device | None = None) -> "LocalTransport":
        """The end of ``rank``."""
        return LocalTransport(self, rank, device or torch.device("cpu"))

    def post(self, source: int, target: int, post: _Post, *, sends: bool) -> None:
        """Enter one end of a transfer and complete all transfers of that channel that can be."""
        if self._delay is not None:
            time.sleep(self._delay())
        with self._changed:
            channel = self._channels[source, target, post.purpose]
            (channel.sends if sends else channel.receives).append(post)
            while channel.sends and channel.receives:
                self._deliver(source, target, channel.sends.popleft(), channel.receives.popleft())
            self._changed.notify_all()

    def _deliver(self, source: int, target: int, send: _Post, receive: _Post) -> None:
        sent, wanted = (
            f"{p.tensor.dtype} {list(p.tensor.shape)} ({p.what})" for p in (send, receive)
        )
        if send.tensor.shape != receive.tensor.shape or send.tensor.dtype != receive.tensor.dtype:
            self._failure = self._failure or RunError(
                explain(f"transfer from rank {source} to {target}", expected=wanted, got=sent)
            )
            return
        receive.tensor.copy_(send.tensor)
        send.done = receive.done = True

    def wait(self, post: _Post) -> None:
        """Block the calling rank until ``post`` is done or any rank has failed."""
        with self._changed:
            self._waiting[post.rank] = post
            self._detect_deadlock()
            self._changed.wait_for(lambda: post.done or self._failure is not None)
            del self._waiting[post.rank]
            if not post.done:
                raise PeerLostError(f"stopped while it waited {post.what}: {self._failure}")

    def _detect_deadlock(self) -> None:
        stuck = {rank: post for rank, post in self._waiting.items() if not post.done}
        if self._failure is None and self._running and set(stuck) == self._running:
            waits = ", ".join(f"rank {rank} waits {post.what}" for rank, post in stuck.items())
            self._failure = RunError(f"deadlock: {waits}")
            self._changed.notify_all()

    def leave(self, rank: int, failure: Exception | None = None) -> None:
        """The rank has ended; a failure ends the others at their next wait."""
        with self._changed:
            self._running.discard(rank)
            self._failure = self._failure or failure
            self._detect_deadlock()
            self._changed.notify_all()

    @property
    def failure(self) -> Exception | None:
        """The first failure, the cause of all others."""
        return self._failure


class _Links:
    """Channels of one rank; those of different purposes are apart."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self.rank = world, rank

    def send(self, tensor: torch.Tensor, peer: int, purpose: str) -> Handle:
        """See :class:`Links`."""
        if tensor.numel() == 0:
            return Done()
        what = f"for rank {peer} to receive{_in(purpose)}"
        post = _Post(self.world, self.rank, tensor, what, purpose)
        self.world.post(self.rank, peer, post, sends=True)
        return post

    def receive(self, buffer: torch.Tensor, peer: int, purpose: str) -> Handle:
        """See :class:`Links`."""
        if buffer.numel() == 0:
            return Done()
        what = f"to receive from rank {peer}{_in(purpose)}"
        post = _Post(self.world, self.rank, buffer, what, purpose)
        self.world.post(peer, self.rank, post, sends=False)
        return post


def _in(purpose: str) -> str:
    return f" in {purpose}" if purpose else ""


class LocalTransport:
    """One thread's end of a :class:`LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int, device: torch.device) -> None:
        self.world, self.rank, self.device = world, rank, device
        self.num_ranks = world.num_ranks
        self._links = _Links(world, rank)

    def send(self, tensor: torch.Tensor, peer: int) -> Handle:
        """See :class:`Transport`."""
        return self._links.send(tensor, peer, "")

    def receive(self, buffer: torch.Tensor, peer: int) -> Handle:
        """See :class:`Transport`."""
        return self._links.receive(buffer, peer, "")

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`Transport`."""
        world = self.group(range(self.num_ranks))
        return world.all_gather(tensor.clone(), [tensor.shape] * self.num_ranks)

    def connect(self, groups: Iterable[Sequence[int]]) -> None:
        """See :class:`Transport`: threads are connected."""

    def group(self, ranks: Sequence[int]) -> Group:
        """See :class:`Transport`."""
        return Group(ranks, self.rank, self._links)


def run_threads(
    num_ranks: int,
    function: Callable[[LocalTransport], T],
    *,
    delay: Callable[[], float] | None = None,
    device: torch.device | None = None,
) -> Sequence[T]:
    """Call ``function`` once per rank, each in its thread, and return the results in rank order.

    Raises:
        Exception: the first failure of any rank, after all threads have ended.
    """
    world = LocalWorld(num_ranks, delay)
    results: dict[int, T] = {}

    def rank_main(rank: int) -> None:
        try:
            results[rank] = function(world.transport(rank, device))
        except Exception as error:
            world.leave(rank, error)
        else:
            world.leave(rank)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(num_ranks)]
