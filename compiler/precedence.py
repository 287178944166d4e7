"""What every action of a schedule waits for, and the order in which all ranks then get there.

An *event* is one action's start, named by rank and position in that rank's list. Besides the
actions before it on its own rank, an event waits for other ranks in three cases: a compute action
for the sends of the values it reads; a forward for earlier sends to be received, so that no more
microbatches than the stage's window are in flight; and, without buffers, a send for the post of
its receive. The dry run asks whether such an order exists, the simulator when each event happens.
"""

from collections.abc import Mapping, Sequence

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.stage import Stage
from mllm_compile.compiler.variant import Variant

Event = tuple[int, int]


def needs(action: Action, variant: Variant) -> list[Action]:
    """The actions of the same stage that must come earlier in its list.

    A compute action needs the receives of what it reads, a transfer the action that computes what
    it sends.
    """
    stage, k = action.stage, action.microbatch
    compute = variant.compute(stage, k)
    forward = compute[:1]
    match action.kind:
        case "F":
            return variant.transfers(stage, "RECV_F", k)
        case "SEND_F":
            return forward
        case "SEND_B":
            return compute[1:2]
        case "I" | "W" if action == compute[1]:
            return forward + variant.transfers(stage, "RECV_B", k)
        case "W":
            return compute[1:2]
        case _:
            return []


def waits(
    schedule: Schedule,
    stages: Sequence[Stage],
    variants: Sequence[Variant],
    *,
    buffered: bool = True,
) -> dict[Event, list[Event]]:
    """The events on other ranks that each event waits for; every transfer must have its match."""
    ranks = {stage.index: stage.ranks for stage in stages}
    at = {
        (rank, action): (rank, position)
        for rank, actions in schedule.actions.items()
        for position, action in enumerate(actions)
    }
    result: dict[Event, list[Event]] = {}
    for rank, actions in schedule.actions.items():
        forwards: dict[int, list[int]] = {}
        for position, action in enumerate(actions):
            awaited = _awaited(action, variants, buffered=buffered)
            if action.kind == "F":
                earlier = forwards.setdefault(action.stage, [])
                awaited += _leaving(action.stage, earlier, schedule, variants)
                earlier.append(action.microbatch)
            if awaited:
                events = [at[peer, other] for other in awaited for peer in ranks[other.stage]]
                result[rank, position] = events
    return result


def _awaited(action: Action, variants: Sequence[Variant], *, buffered: bool) -> list[Action]:
    """What other stages must do first, whatever the window."""
    if action.kind.startswith("SEND"):
        return [] if buffered else [action.match]
    if action.kind.startswith("RECV"):
        return []
    local = needs(action, variants[action.microbatch])
    return [other.match for other in local if other.kind.startswith("RECV")]


def _leaving(
    stage: int, earlier: Sequence[int], schedule: Schedule, variants: Sequence[Variant]
) -> list[Action]:
    """The receives of what the stage sent for the microbatch that leaves its window now."""
    window = schedule.windows.get(stage)
    if window is None or len(earlier) < window:
        return []
    leaving = earlier[-window]
    return [send.match for send in variants[leaving].transfers(stage, "SEND_F", leaving)]


def replay(
    schedule: Schedule, waits: Mapping[Event, Sequence[Event]]
) -> tuple[list[Event], dict[int, int]]:
    """Let every rank go as far as it can.

    Returns the events in an order in which they can happen, and for every rank that gets stuck the
    position of the action at which it does.
    """
    reached = dict.fromkeys(schedule.actions, 0)
    order: list[Event] = []
    before = -1
    while before < len(order):
        before = len(order)
        for rank, actions in schedule.actions.items():
            while reached[rank] < len(actions) and all(
                reached[peer] > position for peer, position in waits.get((rank, reached[rank]), ())
            ):
                order.append((rank, reached[rank]))
                reached[rank] += 1
    stuck = {
        rank: position
        for rank, position in reached.items()
        if position < len(schedule.actions[rank])
    }
    return order, stuck
