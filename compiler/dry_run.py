"""Prove, before any process starts, that a schedule is complete, fits together and ends.

``dry_run`` checks the laws below one after another and raises ``PlanError`` at the first that is
broken, with the rank, the action, the reason and a grid of ranks and steps in which the offending
row is marked. The last law lets all ranks walk through their lists with sends that block until
their receive is posted: a schedule that ends so ends with any amount of buffering.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.errors import PlanError
from mllm_compile.compiler.precedence import Event, needs, replay, waits
from mllm_compile.compiler.stage import Stage, representatives
from mllm_compile.compiler.variant import Variant

COLUMNS = 4
"""How many steps of the grid are shown on each side of the fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Where a law is broken: the position may be one past the end of the rank's list."""

    rank: int
    position: int
    reason: str


Law = Callable[[Schedule, Sequence[Stage], Sequence[Variant]], Iterator[Fault]]


def dry_run(schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]) -> None:
    """Raise ``PlanError`` unless the schedule does one step right.

    ``variants`` holds one entry per microbatch.
    """
    for law in LAWS:
        for fault in law(schedule, stages, variants):
            actions = schedule.actions.get(fault.rank, ())
            at_end = fault.position >= len(actions)
            where = "end of its list" if at_end else f"action {actions[fault.position]}"
            raise PlanError(
                f"schedule: rank {fault.rank}, step {fault.position}, {where}: {fault.reason}\n"
                + grid(schedule, fault)
            )


def grid(schedule: Schedule, fault: Fault) -> str:
    """Ranks x steps around a fault; its row starts with ``>``, its action stands in brackets."""
    first = max(0, fault.position - COLUMNS)
    steps = range(first, fault.position + COLUMNS + 1)
    rows = [["  rank", *map(str, steps)]]
    for rank in sorted({*schedule.actions, fault.rank}):
        actions = schedule.actions.get(rank, ())
        cells = [str(actions[step]) if step < len(actions) else "-" for step in steps]
        marked = rank == fault.rank
        if marked:
            cells[fault.position - first] = f"[{cells[fault.position - first]}]"
        rows.append([f"{'>' if marked else ' '} {rank:4}", *cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def complete(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """Every rank does what its stages and the microbatches ask for: each action once, no other."""
    expected: dict[int, set[Action]] = {rank: set() for stage in stages for rank in stage.ranks}
    for stage in stages:
        for k, variant in enumerate(variants):
            for rank in stage.ranks:
                expected[rank].update(variant.actions(stage.index, k))
    for rank in sorted({*expected, *schedule.actions}):
        actions = schedule.actions.get(rank, ())
        open_actions = set(expected.get(rank, ()))
        for position, action in enumerate(actions):
            if action not in expected.get(rank, ()):
                yield Fault(rank, position, "nothing asks for this action on this rank")
            elif action not in open_actions:
                yield Fault(rank, position, "the rank has done this action before")
            open_actions.discard(action)
        if open_actions:
            missing = ", ".join(map(str, sorted(open_actions)))
            yield Fault(rank, len(actions), f"missing: {missing}")


def alike(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """All ranks of a stage go through its actions in one order, as its collectives require."""
    for stage in stages:
        lists = {
            rank: [(p, a) for p, a in enumerate(schedule.actions[rank]) if a.stage == stage.index]
            for rank in stage.ranks
        }
        leader = lists[stage.ranks[0]]
        for rank, own in lists.items():
            for (position, action), (_, other) in zip(own, leader, strict=True):
                if action != other:
                    reason = f"rank {stage.ranks[0]} of the same stage does {other} here"
                    yield Fault(rank, position, reason)


def ordered(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """An action comes after those on its own rank that it needs; a receive before its use."""
    for rank, actions in schedule.actions.items():
        done: set[Action] = set()
        for position, action in enumerate(actions):
            for other in needs(action, variants[action.microbatch]):
                if other not in done:
                    yield Fault(rank, position, f"needs {other} before it")
            done.add(action)


def paired(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """On every channel the n-th receive takes what the n-th send sends."""
    ranks = {stage.index: stage.ranks[0] for stage in stages}
    sent: dict[tuple[int, int | None, str], list[Action]] = {}
    for stage in stages:
        for action in schedule.actions[ranks[stage.index]]:
            if action.stage == stage.index and action.kind.startswith("SEND"):
                sent.setdefault((action.stage, action.peer, action.kind), []).append(action)
    for stage in stages:
        count: Counter[tuple[int, int | None, str]] = Counter()
        for position, action in enumerate(schedule.actions[ranks[stage.index]]):
            if action.stage != stage.index or not action.kind.startswith("RECV"):
                continue
            match = action.match
            channel = (match.stage, match.peer, match.kind)
            other = sent[channel][count[channel]]
            count[channel] += 1
            if other != match:
                reason = f"receive {count[channel]} of its channel, where {other} is sent"
                yield Fault(ranks[stage.index], position, reason)


def in_order(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """Between two ranks, whatever stages they share, messages are received in the order sent."""
    ranks = {stage.index: stage.ranks for stage in representatives(stages)}
    sent: dict[tuple[int, int], list[Action]] = {}
    for source in sorted({rank for held in ranks.values() for rank in held}):
        for action in schedule.actions[source]:
            if action.kind.startswith("SEND") and action.peer is not None:
                for target in ranks[action.peer]:
                    sent.setdefault((source, target), []).append(action)
    count: Counter[tuple[int, int]] = Counter()
    for target in sorted({rank for held in ranks.values() for rank in held}):
        for position, action in enumerate(schedule.actions[target]):
            if not action.kind.startswith("RECV"):
                continue
            for source in ranks[action.match.stage]:
                other = sent[source, target][count[source, target]]
                count[source, target] += 1
                if source != target and other != action.match:
                    reason = f"rank {source} sends {other} to this rank before {action.match}"
                    yield Fault(target, position, reason)


def bounded(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """Before a forward, the microbatch that leaves the stage's window has had its backward."""
    for rank, actions in schedule.actions.items():
        in_flight: Counter[int] = Counter()
        for position, action in enumerate(actions):
            compute = variants[action.microbatch].compute(action.stage, action.microbatch)
            if action == compute[-1]:
                in_flight[action.stage] -= action.kind != "F"
            elif action.kind == "F":
                in_flight[action.stage] += 1
            window = schedule.windows.get(action.stage)
            if action.kind == "F" and window is not None:
                count = max(1, in_flight[action.stage])
                if count > window:
                    reason = f"{count} microbatches in flight at stage {action.stage}"
                    yield Fault(rank, position, f"{reason}, its window is {window}")


def ends(
    schedule: Schedule, stages: Sequence[Stage], variants: Sequence[Variant]
) -> Iterator[Fault]:
    """All ranks reach the end of their lists, even if every send blocks until it is received."""
    stages = representatives(stages)
    kept = {rank for stage in stages for rank in stage.ranks}
    schedule = replace(schedule, actions={rank: schedule.actions[rank] for rank in sorted(kept)})
    awaited = waits(schedule, stages, variants, buffered=False)
    _, stuck = replay(schedule, awaited)
    if not stuck:
        return
    rank = min(stuck, key=lambda rank: (stuck[rank], rank))
    seen: list[int] = []
    story = []
    while rank not in seen:
        seen.append(rank)
        peer, position = _blocker((rank, stuck[rank]), awaited, stuck)
        here, there = schedule.actions[rank][stuck[rank]], schedule.actions[peer][position]
        story.append(f"rank {rank} at {here} waits for {there} of rank {peer}")
        rank = peer
    yield Fault(seen[0], stuck[seen[0]], "deadlock: " + "; ".join(story))


def _blocker(event: Event, awaited: dict[Event, list[Event]], stuck: dict[int, int]) -> Event:
    return next(
        (peer, position)
        for peer, position in awaited[event]
        if peer in stuck and stuck[peer] <= position
    )


LAWS: tuple[Law, ...] = (complete, alike, ordered, paired, in_order, bounded, ends)
