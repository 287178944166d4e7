"""When a send is over, so that its tensor can be freed: never by a wait that could block for long.

A backend may not say whether a send is done unless one waits for it, and a wait for a receiver that
is not ready yet could close a circle of waiting ranks. Two facts are certain instead:

* A message from a peer proves that the peer has posted every receive that stands before that send
  in its list of actions. The sends for these receives can be waited for at once.
* The schedule's window rule: before the F of a stage's n-th microbatch the rank waits for the
  forward sends of the stage's (n - window)-th. The dry run has proved that these waits end.
"""

from collections import defaultdict, deque

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.runtime.transport import Handle

Edge = tuple[int, int]
"""(stage that sends, stage that receives)"""


class Outbox:
    """The sends of one rank that may still be under way, in one step."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._windows = schedule.windows
        self._forwards: dict[int, list[int]] = defaultdict(list)
        self._under_way: dict[Edge, deque[tuple[Action, list[Handle]]]] = defaultdict(deque)
        self._proved = _proofs(schedule, {action.stage for action in schedule.actions[rank]})
        self._completed: dict[Edge, int] = defaultdict(int)

    def sent(self, send: Action, handles: list[Handle]) -> None:
        """The messages of a SEND action have been posted."""
        assert send.peer is not None
        self._under_way[send.stage, send.peer].append((send, handles))

    def arrived(self, receive: Action) -> None:
        """A message of this RECV action has arrived; complete the sends that it proves."""
        assert receive.peer is not None
        edge = (receive.stage, receive.peer)
        while self._completed[edge] < self._proved.get(receive, 0):
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


def _proofs(schedule: Schedule, stages: set[int]) -> dict[Action, int]:
    """For every RECV of ``stages``: how many sends to that peer its messages prove received."""
    proved: dict[Action, int] = {}
    for actions in schedule.actions.values():
        posted: dict[Edge, int] = defaultdict(int)
        for action in actions:
            if action.peer not in stages:
                continue
            if action.kind.startswith("RECV"):
                posted[action.peer, action.stage] += 1
            else:
                proved[action.match] = posted[action.peer, action.stage]
    return proved
