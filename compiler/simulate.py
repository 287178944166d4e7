"""When every action of a schedule happens, given how long each one takes.

A rank runs its compute actions one after another, in the order of its list; sends and receives
cost it no time. A transfer starts when its values are there, its receive is posted and the
transfer before it on the same channel (source, target, direction) is over; it takes
``latency + bytes / bandwidth``. With equal stages and free transfers, K stages and M microbatches
take (M + K - 1) (F + dI + dW), the closed form of 1F1B. The result is made to rank plans; it knows
nothing of links that several channels share, or of transfers that slow computation down.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from mllm_compile.compiler.action import COMPUTE, Action, Schedule
from mllm_compile.compiler.precedence import replay, waits
from mllm_compile.compiler.stage import Stage, representatives
from mllm_compile.compiler.variant import Variant

Channel = tuple[int, int | None, str]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds of a stage's F, I and W; bytes that it keeps of a microbatch in flight."""

    forward: float
    input_grad: float = 0.0
    weight_grad: float = 0.0
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """One microbatch: cost of every stage, bytes (forward, backward) over every boundary."""

    stages: Mapping[int, StageCost]
    boundaries: Mapping[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def seconds(self, action: Action) -> float:
        """How long a compute action takes."""
        stage = self.stages[action.stage]
        seconds = {"F": stage.forward, "I": stage.input_grad, "W": stage.weight_grad}
        return seconds[action.kind]

    def size_bytes(self, send: Action) -> int:
        """How much a send sends."""
        assert send.peer is not None
        forward, backward = self.boundaries.get(
            (min(send.stage, send.peer), max(send.stage, send.peer)), (0, 0)
        )
        return forward if send.kind == "SEND_F" else backward


@dataclass(frozen=True, slots=True)
class Link:
    """What connects two ranks: bytes per second, and seconds before the first byte arrives."""

    bandwidth: float = inf
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """A compute action or a transfer (named by its send), and its seconds from the step's start."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Seconds of the step, seconds of work per rank, and what each stage held at its fullest."""

    step_time: float
    busy: Mapping[int, float]
    peak_microbatches: Mapping[int, int]
    peak_bytes: Mapping[int, int]
    spans: tuple[Span, ...]

    def bubble(self, rank: int) -> float:
        """The part of the step, 0 to 1, in which the rank computes nothing."""
        return 1 - self.busy[rank] / self.step_time if self.step_time else 0.0


def simulate(
    schedule: Schedule,
    stages: Sequence[Stage],
    variants: Sequence[Variant],
    costs: Sequence[Cost],
    link: Link | None = None,
) -> Simulation:
    """Play one step of a schedule that passes the dry run.

    ``variants`` and ``costs`` hold one entry per microbatch. Of ranks with the same stages the
    first stands for all.
    """
    stages = representatives(stages)
    ranks = {stage.index: stage.ranks for stage in stages}
    kept = sorted({rank for held in ranks.values() for rank in held})
    played = replace(schedule, actions={rank: schedule.actions[rank] for rank in kept})
    awaited = waits(played, stages, variants)
    order, stuck = replay(played, awaited)
    assert not stuck, "only a schedule that passes the dry run can be simulated"
    clock = _Clock(costs, link or Link(), ranks)
    for rank, position in order:
        others = [
            (peer, played.actions[peer][at]) for peer, at in awaited.get((rank, position), ())
        ]
        clock.advance(rank, played.actions[rank][position], others)
    spans = clock.spans()
    lives = {stage: _lives(stage, variants, spans) for stage in ranks}
    return Simulation(
        step_time=max((span.end for span in spans.values()), default=0.0),
        busy=clock.busy,
        peak_microbatches={s: _peak((a, b, 1) for a, b, _ in live) for s, live in lives.items()},
        peak_bytes={
            s: _peak((a, b, costs[k].stages[s].saved_bytes) for a, b, k in live)
            for s, live in lives.items()
        },
        spans=tuple(spans.values()),
    )


class _Clock:
    """Times of the events so far; they must come in an order in which they can happen."""

    def __init__(
        self, costs: Sequence[Cost], link: Link, ranks: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.costs, self.link, self.ranks = costs, link, ranks
        self.busy = {rank: 0.0 for held in ranks.values() for rank in held}
        self._now = dict.fromkeys(self.busy, 0.0)
        self._posted: dict[tuple[int, Action], float] = {}
        self._spans: dict[tuple[int, Action], Span] = {}
        self._channels: dict[tuple[int, Channel], float] = {}

    def advance(self, rank: int, action: Action, awaited: Iterable[tuple[int, Action]]) -> None:
        """Let the rank do its next action; ``awaited`` are the halves of transfers, by rank."""
        now = self._now[rank]
        if action.kind not in COMPUTE:
            self._posted[rank, action] = now
            return
        for peer, other in awaited:
            target = rank if other.kind.startswith("SEND") else peer
            now = max(now, self._arrival(_send(other), target))
        end = now + self.costs[action.microbatch].seconds(action)
        self._spans[rank, action] = Span(action, now, end)
        self.busy[rank] += end - now
        self._now[rank] = end

    def spans(self) -> dict[Action, Span]:
        """Every compute action and transfer, from its first rank's start to its last one's end."""
        for target, action in list(self._posted):
            if action.kind.startswith("RECV"):
                self._arrival(action.match, target)
        found: dict[Action, Span] = {}
        for span in self._spans.values():
            known = found.get(span.action, span)
            start, end = min(known.start, span.start), max(known.end, span.end)
            found[span.action] = Span(span.action, start, end)
        return found

    def _arrival(self, send: Action, target: int) -> float:
        """When what ``send`` sends is on rank ``target``; decided once."""
        if (target, send) not in self._spans:
            channel = target, (send.stage, send.peer, send.kind)
            posted = [self._posted.get((rank, send), 0.0) for rank in self.ranks[send.stage]]
            received = self._posted[target, send.match]
            start = max(*posted, received, self._channels.get(channel, 0.0))
            size = self.costs[send.microbatch].size_bytes(send)
            end = start + self.link.latency + size / self.link.bandwidth
            self._spans[target, send] = Span(send, start, end)
            self._channels[channel] = end
        return self._spans[target, send].end


def _send(action: Action) -> Action:
    return action if action.kind.startswith("SEND") else action.match


def _lives(
    stage: int, variants: Sequence[Variant], spans: Mapping[Action, Span]
) -> list[tuple[float, float, int]]:
    """When each microbatch is in flight at the stage: (start, end, microbatch)."""
    lives = []
    for k, variant in enumerate(variants):
        compute = variant.compute(stage, k)
        if compute:
            last = compute if len(compute) > 1 else compute + variant.transfers(stage, "SEND_F", k)
            end = max(spans[action].end for action in last)
            lives.append((spans[compute[0]].start, end, k))
    return lives


def _peak(lives: Iterable[tuple[float, float, int]]) -> int:
    """The largest sum of the amounts of intervals (start, end, amount) that overlap."""
    steps = [step for start, end, n in lives for step in ((start, 1, n), (end, 0, -n))]
    level = peak = 0
    for _, _, change in sorted(steps):
        level += change
        peak = max(peak, level)
    return peak
