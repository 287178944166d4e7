"""When a send is over, so that its tensor can be freed: never by a wait that could block for long.

A backend may not say whether a send is done unless one waits for it, and a wait for a receiver that
is not ready yet could close a circle of waiting ranks. Two facts are certain instead:

* A message from a rank proves that it has posted every receive that stands before that send in its
  list of actions. The sends for these receives can be waited for at once.
* The schedule's window rule: before the F of a stage's n-th microbatch the rank waits for the
  forward sends of the stage's (n - window)-th. The dry run has proved that these waits end.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.runtime.transport import Handle

Edge = tuple[int, int, int]
"""(stage that sends, stage that receives, rank of that stage)"""


class Outbox:
    """The sends of one rank that may still be under way, in one step."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._windows = schedule.windows
        self._ranks = _ranks_of(schedule)
        self._forwards: dict[int, list[int]] = defaultdict(list)
        self._under_way: dict[Edge, deque[tuple[Action, Sequence[Handle]]]] = defaultdict(deque)
        self._proved = _proofs(schedule, {action.stage for action in schedule.actions[rank]})
        self._completed: dict[Edge, int] = defaultdict(int)

    def sent(self, send: Action, handles: Mapping[int, Sequence[Handle]]) -> None:
        """The messages of a SEND action, by rank, have been posted; there may be none."""
        assert send.peer is not None
        for rank in {*self._ranks.get(send.peer, ()), *handles}:
            edge = (send.stage, send.peer, rank)
            self._under_way[edge].append((send, handles.get(rank, ())))

    def arrived(self, receive: Action, rank: int) -> None:
        """A message of this RECV action has come from a rank; complete the sends it proves."""
        assert receive.peer is not None
        edge = (receive.stage, receive.peer, rank)
        proved = self._proved.get((receive, rank), 0)
        while self._completed[edge] < proved and self._under_way[edge]:
            self._complete_first(edge)

    def forward_starts(self, forward: Action) -> None:
        """Keep the window: wait for the sends of the microbatch that leaves it."""
        order = self._forwards[forward.stage]
        window = self._windows.get(forward.stage)
        if window is not None and len(order) >= window:
            self._complete_forwards(forward.stage, order[-window])
        order.append(forward.microbatch)

    def finish(self) -> None:
        """Wait for all sends."""
        for edge, under_way in self._under_way.items():
            while under_way:
                self._complete_first(edge)

    def _complete_forwards(self, stage: int, microbatch: int) -> None:
        for edge, under_way in self._under_way.items():
            while edge[0] == stage and any(
                send.kind == "SEND_F" and send.microbatch == microbatch for send, _ in under_way
            ):
                self._complete_first(edge)

    def _complete_first(self, edge: Edge) -> None:
        for handle in self._under_way[edge][0][1]:
            handle.wait()
        self._under_way[edge].popleft()
        self._completed[edge] += 1


def _ranks_of(schedule: Schedule) -> dict[int, list[int]]:
    """The ranks of every stage that does anything."""
    found: dict[int, list[int]] = {}
    for rank, actions in schedule.actions.items():
        for stage in {action.stage for action in actions}:
            found.setdefault(stage, []).append(rank)
    return found


def _proofs(schedule: Schedule, stages: set[int]) -> dict[tuple[Action, int], int]:
    """By RECV of ``stages`` and sending rank: how many sends to it its messages prove received."""
    proved: dict[tuple[Action, int], int] = {}
    for rank, actions in schedule.actions.items():
        posted: dict[tuple[int, int], int] = defaultdict(int)
        for action in actions:
            if action.peer not in stages:
                continue
            if action.kind.startswith("RECV"):
                posted[action.peer, action.stage] += 1
            else:
                proved[action.match, rank] = posted[action.peer, action.stage]
    return proved
