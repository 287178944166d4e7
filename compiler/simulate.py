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
from mllm_compile.compiler.stage import Stage
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

    ``variants`` and ``costs`` hold one entry per microbatch. The ranks of a stage are alike, so
    that its first rank stands for all of them.
    """
    stages = [replace(stage, ranks=stage.ranks[:1]) for stage in stages]
    rank_of = {stage.index: stage.ranks[0] for stage in stages}
    played = replace(
        schedule, actions={rank: schedule.actions[rank] for rank in sorted({*rank_of.values()})}
    )
    awaited = waits(played, stages, variants)
    order, stuck = replay(played, awaited)
    assert not stuck, "only a schedule that passes the dry run can be simulated"
    clock = _Clock(costs, link or Link())
    for rank, position in order:
        others = [played.actions[peer][at] for peer, at in awaited.get((rank, position), ())]
        clock.advance(rank, played.actions[rank][position], others)
    spans = clock.spans
    busy = dict.fromkeys(played.actions, 0.0)
    for span in spans.values():
        busy[rank_of[span.action.stage]] += (span.end - span.start) * (span.action.kind in COMPUTE)
    lives = {stage: _lives(stage, variants, spans) for stage in rank_of}
    return Simulation(
        step_time=max((span.end for span in spans.values()), default=0.0),
        busy=busy,
        peak_microbatches={s: _peak((a, b, 1) for a, b, _ in live) for s, live in lives.items()},
        peak_bytes={
            s: _peak((a, b, costs[k].stages[s].saved_bytes) for a, b, k in live)
            for s, live in lives.items()
        },
        spans=tuple(spans.values()),
    )


class _Clock:
    """Times of the events so far; they must come in an order in which they can happen."""

    def __init__(self, costs: Sequence[Cost], link: Link) -> None:
        self.costs = costs
        self.link = link
        self.spans: dict[Action, Span] = {}
        self._now: dict[int, float] = {}
        self._posted: dict[Action, float] = {}
        self._channels: dict[Channel, float] = {}

    def advance(self, rank: int, action: Action, awaited: Iterable[Action]) -> None:
        """Let the rank do its next action; ``awaited`` are halves of transfers it waits for."""
        now = self._now.get(rank, 0.0)
        if action.kind not in COMPUTE:
            self._posted[action] = now
            if action.match in self._posted:
                self._transfer(_send(action))
            return
        start = max([now, *(self.spans[_send(other)].end for other in awaited)])
        end = start + self.costs[action.microbatch].seconds(action)
        self.spans[action] = Span(action, start, end)
        self._now[rank] = end

    def _transfer(self, send: Action) -> None:
        channel = (send.stage, send.peer, send.kind)
        posted = self._posted[send], self._posted[send.match]
        start = max(*posted, self._channels.get(channel, 0.0))
        size = self.costs[send.microbatch].size_bytes(send)
        end = start + self.link.latency + size / self.link.bandwidth
        self.spans[send] = Span(send, start, end)
        self._channels[channel] = end


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
