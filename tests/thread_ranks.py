"""Ranks as threads that meet at barriers: the simplest communicator, for tests."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mllm_compile.kernels.collective.members import Member, members


@dataclass
class Board:
    """What the ranks of one group show each other."""

    size: int
    barrier: threading.Barrier = field(init=False)
    shown: list = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.shown = [None] * self.size

    def show(self, place: int, item):
        """What everybody shows, in order of places."""
        self.shown[place] = item
        self.barrier.wait()
        seen = list(self.shown)
        self.barrier.wait()
        return seen


@dataclass
class ThreadCommunicator:
    """One rank's end of a board; ``log`` gets (axis, collective, shape) of every call."""

    board: Board
    place: int
    axis: str
    log: list

    def _meet(self, what: str, item, shape) -> list:
        self.log.append((self.axis, what, tuple(shape)))
        seen = self.board.show(self.place, (what, item))
        assert {name for name, _ in seen} == {what}, f"different collectives met: {seen}"
        return [part for _, part in seen]

    def all_gather(self, x: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        parts = self._meet("all_gather", x.clone(), x.shape)
        assert [list(part.shape) for part in parts] == [list(shape) for shape in shapes]
        return parts

    def all_reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        parts = torch.stack(self._meet(f"all_reduce {reduction}", x.clone(), x.shape))
        return parts.sum(0) if reduction == "sum" else parts.amax(0)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        shape = parts[self.place].shape
        seen = self._meet("reduce_scatter", [part.clone() for part in parts], shape)
        return torch.stack([others[self.place] for others in seen]).sum(0)

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        seen = self._meet("all_to_all", [part.clone() for part in parts], parts[self.place].shape)
        arrived = [others[self.place] for others in seen]
        assert [list(part.shape) for part in arrived] == [list(shape) for shape in shapes]
        return arrived

    def start_all_to_all(self, parts, shapes):
        arrived = self.all_to_all(parts, shapes)
        return lambda: arrived


def run_ranks(axes: Mapping[str, int], function: Callable[[dict[str, int]], object]):
    """``function(places)`` in a thread for every rank of a grid, the last axis fastest.

    Returns (results, logs) by rank; a log lists a rank's collectives in the order it called them.
    """
    names = list(axes)
    grid = list(itertools.product(*(range(size) for size in axes.values())))
    boards = {
        (name, place[:i] + place[i + 1 :]): Board(axes[name])
        for place in grid
        for i, name in enumerate(names)
    }
    results, logs, errors = [None] * len(grid), [[] for _ in grid], []

    def body(rank: int) -> None:
        place = grid[rank]
        joined = {
            name: Member(
                place[i],
                axes[name],
                ThreadCommunicator(
                    boards[name, place[:i] + place[i + 1 :]], place[i], name, logs[rank]
                ),
            )
            for i, name in enumerate(names)
        }
        try:
            with members(joined):
                results[rank] = function(dict(zip(names, place, strict=True)))
        except BaseException as error:
            errors.append(error)
            for board in boards.values():
                board.barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(grid))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0]
    return results, logs
