"""Decide the order of every rank's actions: 1F1B over the DAG of stages.

One formula decides. Let d be a stage's depth, the length of the longest path from it to a sink.
All stages share one clock, and on it

    F of microbatch k runs at tick 2k - d + 1,    I and W at tick 2k + d.

A stage's actions in the order of their ticks *are* 1F1B: min(d, M) forwards, then one backward and
one forward in turn, then the remaining backwards. Along every boundary d falls, so F ticks grow
downstream and I ticks grow upstream: whatever an action waits for happens earlier on the clock, on
any DAG. So no such schedule can deadlock, and actions may be left out at will, where a modality is
absent or nothing is trained. Within a tick, receives are posted, then F or I runs, then results
are sent, then W runs. A receive is posted one tick before its send (between neighbours: one
microbatch ahead of its use), so that the schedule ends even if every send blocks until its receive
is posted. Stages that share ranks share channels too: receives stand in the order of the sends.

Warm-up counts: arXiv 2503.11367 §4. Zero bubble: ZB-H1 of arXiv 2401.10241.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mllm_compile.compiler.action import Action, Schedule
from mllm_compile.compiler.errors import PlanError, explain
from mllm_compile.compiler.plan import Plan
from mllm_compile.compiler.stage import Stage
from mllm_compile.compiler.variant import Variant, depths


def schedule(plan: Plan) -> Plan:
    """Plan with stages and boundaries -> plan with a schedule of its M equal microbatches."""
    variants = [variant_of(plan)] * plan.request.microbatches
    return replace(plan, schedule=make_schedule(plan.stages, variants))


def make_schedule(
    stages: Sequence[Stage], variants: Sequence[Variant], *, zero_bubble: bool = False
) -> Schedule:
    """Order the actions of one step; ``variants`` holds one entry per microbatch.

    W follows I and its sends at once. With ``zero_bubble`` the W of shallow stages are put off
    instead, to fill the gaps of the drain: until as many microbatches are in flight there as at the
    deepest stage.
    """
    if not stages or not variants:
        raise PlanError(explain("schedule", expected="at least one stage and one microbatch"))
    depth = depths((stage.index for stage in stages), variants)
    limit = max(depth.values()) if zero_bubble else 0
    actions: dict[int, list[Action]] = {rank: [] for stage in stages for rank in stage.ranks}
    for stage in stages:
        for microbatch, variant in enumerate(variants):
            for rank in stage.ranks:
                actions[rank] += variant.actions(stage.index, microbatch)
    return Schedule(
        {
            rank: tuple(sorted(todo, key=lambda action: _place(action, depth, limit)))
            for rank, todo in actions.items()
        },
        {stage: min(max(d, limit), len(variants)) for stage, d in depth.items()},
    )


def _place(action: Action, depth: Mapping[int, int], limit: int) -> tuple[object, ...]:
    """Where an action stands in its rank's list; receives of one moment stand as they are sent."""
    sent = action.match if action.kind.startswith("RECV") else action
    return *_moment(action, depth, limit), *_moment(sent, depth, limit), sent


def _moment(action: Action, depth: Mapping[int, int], limit: int) -> tuple[int, int]:
    """Tick of an action, and its place within the tick."""
    k, d = action.microbatch, depth[action.stage]
    match action.kind:
        case "F":
            return 2 * k - d + 1, 1
        case "SEND_F":
            return 2 * k - d + 1, 2
        case "I":
            return 2 * k + d, 1
        case "SEND_B":
            return 2 * k + d, 2
        case "W":
            return 2 * (k + max(limit - d, 0)) + d, 3
        case _:
            sent, _ = _moment(action.match, depth, limit)
            return sent - 1, 0


def variant_of(plan: Plan) -> Variant:
    """What the plan's own program asks of the stages."""
    kinds = {
        node.name: item
        for node, item in zip(
            plan.captured.main.graph.find_nodes(op="placeholder"), plan.captured.inputs, strict=True
        )
    }
    trainable = {
        name
        for name, item in kinds.items()
        if item.kind == "parameter" and item.trainable and name in plan.needs_grad
    }
    nodes = {node.name: node for node in plan.captured.main.graph.nodes}
    trains = {
        stage.index
        for stage in plan.stages
        for name in stage.nodes
        if name in plan.needs_grad
        and any(source.name in trainable for source in nodes[name].all_input_nodes)
    }
    return Variant(
        frozenset(stage.index for stage in plan.stages if stage.nodes),
        frozenset(trains),
        plan.boundaries,
    )
